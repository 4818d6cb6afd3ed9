"""LoRA in fewer passes over memory, on PEFT's own modules and weights.

PEFT computes `base(x) + B(A(x)) * scaling`: three results the size of the output, and as many gradients.
Here the low-rank product is added into the large one while it is computed, forward and backward. PEFT keeps
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


def _forward(layer: Any, x: Tensor) -> Tensor:
    base = layer.base_layer
    if layer.disable_adapters or layer.merged:
        output: Tensor = base(x)
        return output
    (name,) = layer.active_adapters
    a_RI, b_OR = layer.lora_A[name].weight, layer.lora_B[name].weight
    y_NO: Tensor = _AdaptedLinear.apply(  # type: ignore[no-untyped-call]
        x.flatten(0, -2), base, base.bias, a_RI, b_OR, layer.scaling[name]
    )
    return y_NO.view(*x.shape[:-1], y_NO.shape[-1])


class _AdaptedLinear(torch.autograd.Function):
    """x Wᵀ + bias + scale · (x Aᵀ) Bᵀ; W and bias are frozen. `low` is what lies between A and B, scaled."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, base: Any, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scale: float
    ) -> Tensor:
        # The base is kept, not its weight: one that is quantized is unpacked again for the backward pass.
        ctx.base, ctx.scale, ctx.adapter_type = base, scale, a_RI.dtype
        w_OI = plain_weight(base).to(x_NI.dtype)
        a_RI, b_OR = a_RI.to(x_NI.dtype), b_OR.to(x_NI.dtype)
        low_NR = _scaled_product(x_NI, a_RI.T, scale)
        ctx.save_for_backward(x_NI, a_RI, b_OR, low_NR)
        y_NO = nn.functional.linear(x_NI, w_OI, bias_O).addmm_(low_NR, b_OR.T)
        return y_NO.detach()  # compiled by torch 2.11, what was changed in place would have no gradient

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, a_RI, b_OR, low_NR = ctx.saved_tensors
        dy_NO = grads[0]
        w_OI = plain_weight(ctx.base).to(dy_NO.dtype)
        dlow_NR = _scaled_product(dy_NO, b_OR, ctx.scale)
        dx_NI = (dy_NO @ w_OI).addmm_(dlow_NR, a_RI) if ctx.needs_input_grad[0] else None
        da_RI = _product(dlow_NR.T, x_NI, ctx.adapter_type)
        db_OR = _product(dy_NO.T, low_NR, ctx.adapter_type)
        return dx_NI, None, None, da_RI, db_OR, None


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale · left @ right, in one launch: what is multiplied by nothing is not read."""
    return torch.addmm(left.new_empty(1), left, right, beta=0, alpha=scale)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix product in the precision it is kept in: a GPU sums in float32 anyway."""
    if left.is_cuda and left.dtype != dtype == torch.float32:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)
