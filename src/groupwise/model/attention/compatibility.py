"""Check that a model computes the same function with packed attention, instead of listing supported models.

A group of two members is computed as one packed row and compared with the model's own passes over each. This
detects short sliding windows, capped scores, scaled logits, attention outside of the interface, and layers
with other state than attention.
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
"""Largest allowed difference in float32, relative to the largest logit."""


@dataclass(frozen=True, slots=True)
class RecordingLayout:
    """A layout that records which layers call it, and checks the shapes of their keys and values."""

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
    """Switch the model to packed attention, and raise ConfigError if its outputs change.

    The comparison is in float32, on an excerpt if the model is in half precision. In half precision,
    rounding alone can change the logits of a correct model by half of their size.
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
        reference_TV = _unpacked_logits(exact, tokens_T)
        model.set_attn_implementation(hf_interface.NAME)
        exact.set_attn_implementation(hf_interface.NAME)
        policy = Policy(exact, tokenizer=_NoTokenizer())
        layout = RecordingLayout(PackedLayout.build([(PROMPT, (ANSWER, ANSWER))], device=device), policy)
        positions_T = torch.arange(len(tokens_T), device=device)
        positions_T[PROMPT + ANSWER :] -= ANSWER
        hidden_TM = policy.hidden(tokens_T, positions_T, layout)
    except (ValueError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"the model {name!r} does not support groupwise's attention: {first_line(error)}; choose another "
            "model"
        ) from error
    if layout.seen != list(range(policy.layers)):
        raise ConfigError(
            f"the model {name!r} is not supported: its {policy.layers} layers call replaceable attention "
            f"{len(layout.seen)} times, not once each; choose another model"
        )
    if getattr(model.config.get_text_config(), "final_logit_softcapping", None):
        raise ConfigError(f"the model {name!r} caps its logits, which is not supported; choose another model")
    difference = (policy.logits(hidden_TM).float() - reference_TV).abs().max() / reference_TV.abs().max()
    if not difference < LIMIT:
        raise ConfigError(
            f"the model {name!r} computes attention or logits in a way that is not supported "
            f"(relative logit difference {difference:.1e}); choose another model"
        )


def _unpacked_logits(model: Any, tokens_T: Tensor) -> Tensor:
    """Return the logits of the packed row from one pass of the model per member, each with its prompt."""
    first_T, second_T = tokens_T[: PROMPT + ANSWER], tokens_T[PROMPT + ANSWER :]
    first_TV = model(first_T[None]).logits[0]
    second_TV = model(torch.cat([tokens_T[:PROMPT], second_T])[None]).logits[0, PROMPT:]
    return torch.cat([first_TV, second_TV]).float()


class _NoTokenizer:
    eos_token_id = None
