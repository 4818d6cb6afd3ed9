"""Fused attention with rotary embeddings: fewer passes over memory than autograd's.

transformers rotates queries and keys with five operations each, and autograd needs six more in the backward
pass. Here, two suffice in either direction.

Axes: T tokens, N heads, D head size, M hidden size.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.model.attention.hf_interface import AttentionVariant, Layout
from groupwise.model.attention.packed import PackedLayout
from groupwise.model.device import has_kernels
from groupwise.model.ops.equivalence import RecordingLayout, computes_the_same
from groupwise.model.ops.lora_linear import project

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling", "layer_idx")


def use_fused_rotary(model: nn.Module) -> None:
    """Replace the forward pass of every plain rotary attention; leave other modules unchanged."""
    # Take a floating-point parameter: quantized weights have an integer dtype.
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    if like is None or (like.device.type != "cuda" and like.dtype != torch.float32):
        return
    for module in model.modules():
        if all(hasattr(module, part) for part in PARTS) and _is_plain(module, like.device):
            module.packed_window = _window(module, like)  # type: ignore[assignment]
            module.forward = MethodType(_forward, module)


def rotate(x_TND: Tensor, cos_T1D: Tensor, first_T1D: Tensor, second_T1D: Tensor) -> Tensor:
    """Multiply every head by `cos`, and add each half of it, scaled, to the other half.

    `first` scales what is added to the first half, `second` what is added to the second half.
    """
    half = x_TND.shape[-1] // 2
    rotated_TND = x_TND * cos_T1D
    rotated_TND[..., :half].addcmul_(x_TND[..., half:], first_T1D)
    rotated_TND[..., half:].addcmul_(x_TND[..., :half], second_T1D)
    return rotated_TND


def sine_halves(sin_T1D: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of `rotate`: the negative sines for the first half, and those for the second."""
    first_T1D, second_T1D = sin_T1D.chunk(2, -1)
    return -first_T1D, second_T1D


class _Rotate(torch.autograd.Function):
    """Rotation by the angles of `cos` and `sin`; the gradient is its transpose."""

    @staticmethod
    def forward(ctx: Any, x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1D, sin_T1D)
        return _rotate(x_TND, cos_T1D, sin_T1D, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos_T1D, sin_T1D = ctx.saved_tensors
        return _rotate(grads[0], cos_T1D, sin_T1D, back=True), None, None


def _rotate(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, *, back: bool) -> Tensor:
    if has_kernels(x_TND):
        from groupwise.model.ops import triton_kernels

        return triton_kernels.rotate_heads(x_TND, cos_T1D[:, 0], sin_T1D[:, 0], back=back)
    first, second = sine_halves(sin_T1D)
    return rotate(x_TND, cos_T1D, second, first) if back else rotate(x_TND, cos_T1D, first, second)


def _forward(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    *,
    layout: Layout | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    # Use the original for calls without a layout (such as transformers' `generate`) and for partial rotary.
    if layout is None or position_embeddings[0].shape[-1] != module.head_dim:
        options |= {} if layout is None else {"layout": layout}
        own: tuple[Tensor, Tensor | None] = type(module).forward(
            module, hidden_states, position_embeddings, attention_mask, **options
        )
        return own
    x_TM = hidden_states[0]
    q_TND, k_TND, v_TND = (
        x_TO.view(len(x_TO), x_TO.shape[-1] // module.head_dim, module.head_dim)
        for x_TO in project(x_TM, (module.q_proj, module.k_proj, module.v_proj))
    )
    cos_T1D, sin_T1D = (x_1TD[0, :, None] for x_1TD in position_embeddings)
    rotated = [_Rotate.apply(x_TND, cos_T1D, sin_T1D) for x_TND in (q_TND, k_TND)]  # type: ignore[no-untyped-call]
    q_1HTD, k_1KTD, v_1KTD = (x_TND.transpose(0, 1)[None] for x_TND in (*rotated, v_TND))
    variant = AttentionVariant(window=getattr(module, "packed_window", None))
    mixed_1THD = layout.attend(
        q_1HTD, k_1KTD, v_1KTD, layer=module.layer_idx, scale=module.scaling, variant=variant
    )
    return module.o_proj(mixed_1THD.flatten(2)), None


def _arguments(module: Any, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """Return the input and the other arguments of a short pass through an attention module."""
    tokens = 6
    layout = PackedLayout.build([(4, (2,))], device=device)
    width = getattr(module.q_proj, "in_features", 0)
    x_1TM = torch.linspace(-2.0, 3.0, tokens * width, device=device).sin().view(1, tokens, width)
    angles = torch.linspace(0.0, 5.0, tokens * module.head_dim // 2, device=device)
    angles_1TD = angles.view(1, tokens, -1).repeat(1, 1, 2)
    return x_1TM, {"position_embeddings": (angles_1TD.cos(), angles_1TD.sin()), "layout": layout}


@torch.no_grad()
def _window(module: Any, like: Tensor) -> int | None:
    """Return the sliding window that the module gives to its attention, longer than the short pass or not."""
    x_1TM, arguments = _arguments(module, like.device)
    layout = RecordingLayout(arguments["layout"])
    module(x_1TM.to(like.dtype), attention_mask=None, **(arguments | {"layout": layout}))
    # A module that still has transformers' attention does not call the layout.
    return layout.calls[0].window if layout.calls else getattr(module, "sliding_window", None)


def _is_plain(module: Any, device: torch.device) -> bool:
    x_1TM, arguments = _arguments(module, device)
    return computes_the_same(
        module,
        x_1TM,
        lambda one, x: one(x, attention_mask=None, **arguments)[0],
        lambda one, x: _forward(one, x, **arguments)[0],
    )
