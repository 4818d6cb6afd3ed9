"""LoRA in fewer passes over memory, on PEFT's own modules and weights.

PEFT computes `base(x) + B(A(x)) * scaling`: three results the size of the output, and as many gradients.
Here the large product is added to the low-rank one while it is computed, forward and backward. PEFT keeps
adapters in float32 beside a model in half precision and multiplies in float32 there; here the products
are in the model's precision, and the adapters, their gradients and the optimizer in float32.

Axes: N tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.model.lora import is_adapted
from groupwise.model.quantized import is_quantized, plain_weight


def adapt_in_place(model: nn.Module) -> None:
    """Give every plain LoRA layer the shorter passes; others (dropout, variants) keep PEFT's."""
    for module in model.modules():
        if not is_adapted(module) or getattr(module, "lora_variant", True):
            continue
        layer: Any = module
        without_dropout = all(isinstance(dropout, nn.Identity) for dropout in layer.lora_dropout.values())
        base = layer.base_layer
        plain = type(base) is nn.Linear or is_quantized(base)
        if without_dropout and plain and not base.weight.requires_grad:
            layer.forward = MethodType(_forward, layer)


def is_short(layer: Any) -> bool:
    """Whether a layer has the shorter passes."""
    forward = vars(layer).get("forward")
    return getattr(forward, "__func__", None) is _forward


def _forward(layer: Any, x: Tensor) -> Tensor:
    base = layer.base_layer
    if layer.disable_adapters or layer.merged:
        output: Tensor = base(x)
        return output
    y_NO: Tensor = _AdaptedLinear.apply(  # type: ignore[no-untyped-call]
        x.flatten(0, -2), base, base.bias, *adapter_of(layer)
    )
    return y_NO.view(*x.shape[:-1], y_NO.shape[-1])


def adapter_of(layer: Any) -> tuple[Tensor, Tensor, float]:
    """(a_RI, b_OR, scale) of a layer's only adapter."""
    (name,) = layer.active_adapters
    return layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]


class _AdaptedLinear(torch.autograd.Function):
    """x Wᵀ + bias + scale · (x Aᵀ) Bᵀ; W and bias are frozen."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, base: Any, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scale: float
    ) -> Tensor:
        # The base is kept, not its weight: one that is quantized is unpacked again for the backward pass.
        ctx.base, ctx.scale, ctx.adapter_type = base, scale, a_RI.dtype
        a_RI, b_OR = a_RI.to(x_NI.dtype), b_OR.to(x_NI.dtype)
        y_NO, low_NR = adapted_product(x_NI, base, bias_O, a_RI, b_OR, scale)
        ctx.save_for_backward(x_NI, a_RI, b_OR, low_NR)
        return y_NO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, a_RI, b_OR, low_NR = ctx.saved_tensors
        dlow_NR = scaled_product(grads[0], b_OR, ctx.scale)
        dx_NI = input_gradient(grads[0], dlow_NR, ctx.base, a_RI) if ctx.needs_input_grad[0] else None
        da_RI, db_OR = adapter_gradients(grads[0], dlow_NR, x_NI, low_NR, ctx.adapter_type)
        return dx_NI, None, None, da_RI, db_OR, None


def adapted_product(
    x_NI: Tensor, base: Any, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (y_NO, low_NR): what a layer with an adapter gives, and what lies between A and B, scaled."""
    low_NR = scaled_product(x_NI, a_RI.T, scale)
    y_NO = nn.functional.linear(low_NR, b_OR, bias_O).addmm_(x_NI, plain_weight(base).to(x_NI.dtype).T)
    return y_NO.detach(), low_NR  # compiled by torch 2.11, what was changed in place would have no gradient


def input_gradient(dy_NO: Tensor, dlow_NR: Tensor, base: Any, a_RI: Tensor) -> Tensor:
    return (dlow_NR @ a_RI).addmm_(dy_NO, plain_weight(base).to(dy_NO.dtype))


def adapter_gradients(
    dy_NO: Tensor, dlow_NR: Tensor, x_NI: Tensor, low_NR: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (da_RI, db_OR)."""
    return _product(dlow_NR.T, x_NI, dtype), _product(dy_NO.T, low_NR, dtype)


def scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale · left @ right, in one launch: what is multiplied by nothing is not read."""
    return torch.addmm(left.new_empty(1), left, right, beta=0, alpha=scale)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix product in the precision it is kept in: a GPU sums in float32 anyway."""
    if left.is_cuda and left.dtype != dtype == torch.float32:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)
