"""Whether a model computes what we take it to compute: found out by looking, not by a list of names.

A group of two members is computed in one packed row and compared with the model's own passes over each. What
that shows is what such a list would have to spell out: short sliding windows, capped scores, scaled logits,
attention that does not go through the interface, layers that remember by other means than attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import ConfigError
from groupwise.model.attention import hf_interface
from groupwise.model.attention.packed import PackedLayout
from groupwise.model.ops.equivalence import float32_excerpt
from groupwise.model.policy import Policy
from groupwise.model.resolve import first_line

PROMPT, ANSWER = 10, 7
LIMIT = 1e-3
"""Of the difference in float32, relative to the largest logit."""


@dataclass(frozen=True, slots=True)
class RecordingLayout:
    """A layout that notes which layers come by, and what the cache would have to hold of them."""

    layout: PackedLayout
    policy: Policy
    seen: list[int] = field(default_factory=list)

    def attend(self, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, *, layer: int, scale: float) -> Tensor:
        expected = (1, self.policy.key_heads, k_1KTD.shape[2], self.policy.head_size)
        assert k_1KTD.shape == v_1KTD.shape == expected, "keys or values have an unusual shape"
        self.seen.append(layer)
        return self.layout.attend(q_1HTD, k_1KTD, v_1KTD, layer=layer, scale=scale)


@torch.no_grad()
def check_attention(model: Any, *, name: str) -> None:
    """Switch the model to our attention, and refuse it if that makes it another function.

    The comparison is made in float32, on an excerpt where the model is in half precision: there, rounding
    alone can change the logits of a sound model by half of their size.
    """
    hf_interface.register()
    exact = model
    if any(p.is_floating_point() and p.dtype != torch.float32 for p in model.parameters()):
        exact = float32_excerpt(model, tokens=PROMPT + 2 * ANSWER)
    vocabulary, device = (
        len(exact.get_output_embeddings().weight),
        model.get_output_embeddings().weight.device,
    )
    tokens_T = torch.arange(PROMPT + 2 * ANSWER, device=device) % vocabulary
    try:
        own_TV = _apart(exact, tokens_T)
        model.set_attn_implementation(hf_interface.NAME)
        exact.set_attn_implementation(hf_interface.NAME)
        policy = Policy(exact, tokenizer=_NoTokenizer())
        layout = RecordingLayout(PackedLayout.build([(PROMPT, (ANSWER, ANSWER))], device=device), policy)
        positions_T = torch.arange(len(tokens_T), device=device)
        positions_T[PROMPT + ANSWER :] -= ANSWER
        hidden_TM = policy.hidden(tokens_T, positions_T, layout)
    except (ValueError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"the model {name!r} does not accept our attention: {first_line(error)}") from error
    if layout.seen != list(range(policy.layers)):
        raise ConfigError(
            f"the model {name!r} is not supported: attention that can be replaced is called "
            f"{len(layout.seen)} times in its {policy.layers} layers, and not once in each"
        )
    if getattr(model.config.get_text_config(), "final_logit_softcapping", None):
        raise ConfigError(f"the model {name!r} caps its logits, which is not supported")
    difference = (policy.logits(hidden_TM).float() - own_TV).abs().max() / own_TV.abs().max()
    if not difference < LIMIT:
        raise ConfigError(
            f"the model {name!r} computes attention or logits in a way that is not supported "
            f"(its logits differ by {difference:.1e} of their size)"
        )


def _apart(model: Any, tokens_T: Tensor) -> Tensor:
    """The logits of the packed row as the model computes them: a pass for each member behind its prompt."""
    first_T, second_T = tokens_T[: PROMPT + ANSWER], tokens_T[PROMPT + ANSWER :]
    first_TV = model(first_T[None]).logits[0]
    second_TV = model(torch.cat([tokens_T[:PROMPT], second_T])[None]).logits[0, PROMPT:]
    return torch.cat([first_TV, second_TV]).float()


class _NoTokenizer:
    eos_token_id = None
