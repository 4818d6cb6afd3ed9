"""The hook into transformers: the `layout` passed to the model defines its attention.

A layout (`PackedLayout` for training, `PagedLayout` for generation) is a keyword argument of the
forward call and reaches every attention layer. The Hugging Face module stays unmodified, and there
is no global state.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "groupwise"

UNSUPPORTED = ("softcap", "s_aux")
"""Attention options that layouts do not support; loading a model that uses one fails."""


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
    """Register `groupwise` as an attention implementation of transformers.

    Without a registered mask function, transformers builds no mask. Layouts do their own masking, and
    building a mask would synchronize with the GPU.
    """
    AttentionInterface.register(NAME, _attention)
