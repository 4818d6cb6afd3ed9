"""Linear layers whose frozen weights are quantized (bitsandbytes): unpacked for each product.

The same numbers on every device and in every mode, which bitsandbytes' own passes are not: its CPU kernels
round otherwise than its training passes, and its int8 products also quantize what comes in. Between passes
only the packed weight is held.

Axes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def is_quantized(linear: Any) -> bool:
    return type(getattr(linear, "weight", None)).__name__ in ("Params4bit", "Int8Params")


def is_quantized_model(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Linear) and is_quantized(module) for module in model.modules())


def plain_weight(linear: Any) -> Tensor:
    """The weight_OI of a linear layer as numbers."""
    if not is_quantized(linear):
        weight: Tensor = linear.weight
        return weight
    from peft.utils.integrations import dequantize_module_weight

    whole: Tensor = dequantize_module_weight(linear)
    return whole


def unpack_in_passes(model: nn.Module) -> None:
    """Give every quantized layer passes that unpack its weight for the moment of a product."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and is_quantized(module):
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(linear: Any, x: Tensor) -> Tensor:
    y_NO: Tensor = _UnpackedLinear.apply(x.flatten(0, -2), linear, linear.bias)  # type: ignore[no-untyped-call]
    return y_NO.view(*x.shape[:-1], y_NO.shape[-1])


class _UnpackedLinear(torch.autograd.Function):
    """x Wᵀ + bias; W and bias are frozen."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, linear: Any, bias_O: Tensor | None) -> Tensor:
        ctx.linear = linear
        bias_O = None if bias_O is None else bias_O.to(x_NI.dtype)
        return nn.functional.linear(x_NI, plain_weight(linear).to(x_NI.dtype), bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy_NO = grads[0]
        return dy_NO @ plain_weight(ctx.linear).to(dy_NO.dtype), None, None
