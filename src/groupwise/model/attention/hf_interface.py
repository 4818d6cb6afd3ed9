"""The hook into transformers: the `layout` passed to the model defines its attention.

A layout (`PackedLayout` for training, `PagedLayout` for generation) is a keyword argument of the
forward call and reaches every attention layer. The Hugging Face module stays unmodified, and there
is no global state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "groupwise"


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """What a layer's attention does beyond softmax(q·k)·v over all earlier tokens."""

    window: int | None = None
    """Sliding window: a token attends to this many tokens at most, the last of which is itself."""
    cap: float | None = None
    """Soft cap: scores become cap · tanh(score / cap)."""
    sinks_H: Tensor | None = None
    """Attention sinks: for each query head, the score of one more key, whose value is 0."""

    @property
    def plain(self) -> bool:
        return self.window is None and self.cap is None and self.sinks_H is None


STANDARD = AttentionVariant()


class Layout(Protocol):
    def attend(
        self,
        q_1HTD: Tensor,
        k_1KTD: Tensor,
        v_1KTD: Tensor,
        *,
        layer: int,
        scale: float,
        variant: AttentionVariant = STANDARD,
    ) -> Tensor: ...


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *masks: Any, **options: Any
) -> tuple[Tensor, None]:
    mask = masks[0] if masks else options.get("attention_mask")
    assert mask is None, "attention with a mask or bias of its own"
    layout: Layout = options.get("layout") or getattr(module, "layout")  # noqa: B009
    layer, scale = int(getattr(module, "layer_idx")), options.get("scaling")  # noqa: B009
    window = options.get("sliding_window")
    variant = AttentionVariant(
        window=int(window) if window else None,
        cap=options.get("softcap") or options.get("softcapping"),
        sinks_H=options.get("s_aux"),
    )
    size = value.shape[-1]
    if size < key.shape[-1]:  # multi-head latent attention; zeros in values add nothing
        value = nn.functional.pad(value, (0, key.shape[-1] - size))
    output_1THD = layout.attend(
        query,
        key,
        value,
        layer=layer,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        variant=STANDARD if variant.plain else variant,
    )
    return output_1THD[..., :size], None


def register() -> None:
    """Register `groupwise` as an attention implementation of transformers.

    Without a registered mask function, transformers builds no mask. Layouts do their own masking, and
    building a mask would synchronize with the GPU.
    """
    AttentionInterface.register(NAME, _attention)


def pass_layout_on(decoder: nn.Module) -> None:
    """Hand the layout to attention modules whose decoder layer does not pass keyword arguments on."""

    def keep(layer: nn.Module, _inputs: Any, options: dict[str, Any]) -> None:
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layout = options.get("layout")  # type: ignore[assignment]

    for child in decoder.children():
        for layer in child if isinstance(child, nn.ModuleList) else ():
            layer.register_forward_pre_hook(keep, with_kwargs=True)


def merge_sinks(output_THD: Tensor, lse_TH: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Add the sinks' share to the softmax: return the smaller output and the larger log-sum-exp."""
    whole_TH = torch.logaddexp(lse_TH, sinks_H.to(lse_TH.dtype))
    return output_THD * (lse_TH - whole_TH).exp()[..., None].to(output_THD.dtype), whole_TH
