"""The hook into transformers: attention is whatever the `layout` passed to the model says it is.

A layout (`PackedLayout` for training, `PagedLayout` for generation) travels as a keyword argument of
the forward call down to every attention layer, so the Hugging Face module stays unmodified and
there is no global state.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "groupwise"

UNSUPPORTED = ("softcap", "s_aux")
"""Attention variants that the layouts do not compute; a model that uses one is refused when it is loaded."""


class Layout(Protocol):
    def attend(
        self, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, *, layer: int, scale: float
    ) -> Tensor: ...


def _attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _mask: Tensor | None,
    *,
    layout: Layout,
    **options: Any,
) -> tuple[Tensor, None]:
    for option in UNSUPPORTED:
        assert options.get(option) is None, f"attention with {option} is not supported"
    layer, scale = int(getattr(module, "layer_idx")), options.get("scaling")  # noqa: B009
    return layout.attend(q, k, v, layer=layer, scale=scale or q.shape[-1] ** -0.5), None


def register() -> None:
    """Make `groupwise` a name that `set_attn_implementation` knows.

    Attention without a mask function of its own gets no mask, which is right: the layouts do their own
    masking, and looking for one would make a GPU wait.
    """
    AttentionInterface.register(NAME, _attention)
