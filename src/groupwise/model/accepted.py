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
from groupwise.model import interface
from groupwise.model.packed import PackedLayout
from groupwise.model.policy import Policy
from groupwise.model.source import first_line

PROMPT, ANSWER = 10, 7


@dataclass(frozen=True, slots=True)
class Watched:
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
    """Switch the model to our attention, and refuse it if its logits then differ from its own."""
    interface.register()
    device = model.get_output_embeddings().weight.device
    tokens_T = torch.arange(3, 3 + PROMPT + 2 * ANSWER, device=device) % model.config.vocab_size
    own_TV = _apart(model, tokens_T)
    try:
        model.set_attn_implementation(interface.NAME)
        policy = Policy(model, tokenizer=_NoTokenizer())
        layout = Watched(PackedLayout.build([(PROMPT, (ANSWER, ANSWER))], device=device), policy)
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
    limit = 1e-3 if model.dtype == torch.float32 else 5e-2
    if not difference < limit and model.dtype != torch.float32:
        limit = max(limit, 3 * _noise(model, tokens_T, own_TV))
    if not difference < limit:
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


def _noise(model: Any, tokens_T: Tensor, own_TV: Tensor) -> float:
    """How far the model's logits move when it computes the same attention in another order.

    Rounding to bfloat16 grows with depth, and more so in a model that has not been trained.
    """
    model.set_attn_implementation("eager")
    try:
        other_TV = _apart(model, tokens_T)
    finally:
        model.set_attn_implementation(interface.NAME)
    return float((other_TV - own_TV).abs().max() / own_TV.abs().max())


class _NoTokenizer:
    eos_token_id = None
