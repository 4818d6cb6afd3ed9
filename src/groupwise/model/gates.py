"""The gated SiLU of a decoder layer and the product that follows, keeping less for the backward pass.

Autograd keeps the gate, its SiLU, the other factor and what they make, each of the layer's inner width, the
widest there is. Here gate and factor are kept: the rest is as quickly computed again as read back, and on a
GPU by the same kernel that computes the gradients, which takes no memory of its own.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from groupwise.model.adapter import (
    adapted_product,
    adapter_gradients,
    adapter_of,
    input_gradient,
    is_short,
    scaled_product,
)
from groupwise.model.kernels import has_kernels
from groupwise.model.lora import base_of
from groupwise.model.unread import is_unread, stand_in

PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


def shorten_gates(model: nn.Module) -> None:
    """Give every module that computes a plain gated SiLU the shorter memory; others stay as they are."""
    # Weights that are quantized are of another type and shape than what they stand for.
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    for module in model.modules():
        if all(hasattr(module, part) for part in PARTS) and _same(module, dtype):
            module.forward = MethodType(_forward, module)


def _forward(module: Any, x: Tensor) -> Tensor:
    gate, up, down = module.gate_proj(x), module.up_proj(x), module.down_proj
    if _is_watched(down):
        return _after_product(down, gate, up)
    if is_short(down) and not (down.disable_adapters or down.merged):
        base = down.base_layer
        return _product(gate, up, base, None, base.bias, *adapter_of(down))
    base = base_of(down)
    if type(base) is nn.Linear and (base is down or is_short(down)):
        return _product(gate, up, base, base.weight, base.bias, None, None, 1.0)
    return _after_product(down, gate, up)


def _is_watched(layer: nn.Module) -> bool:
    """Whether someone wants to see the passes of a layer, which then has to be called: DeepSpeed does."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)


def _after_product(down: Any, gate: Tensor, up: Tensor) -> Tensor:
    y: Tensor = down(_GatedSiLU.apply(gate, up))  # type: ignore[no-untyped-call]
    return y


def _product(gate: Tensor, up: Tensor, *down: Any) -> Tensor:
    y_NO: Tensor = _GatedProduct.apply(gate.flatten(0, -2), up.flatten(0, -2), *down)  # type: ignore[no-untyped-call]
    return y_NO.view(*gate.shape[:-1], y_NO.shape[-1])


@torch.no_grad()
def _same(module: Any, dtype: torch.dtype) -> bool:
    """Whether the module is what its attributes look like: some gate with another function, for one."""
    try:
        x_NM = torch.linspace(-2.0, 3.0, 2 * module.gate_proj.in_features).view(2, -1)
        x_NM = x_NM.to(dtype=dtype, device=module.down_proj.weight.device)
        own_NM, short_NM = module(x_NM), _forward(module, x_NM)
    except (TypeError, RuntimeError, AttributeError):
        return False
    return bool((own_NM - short_NM).norm() <= 16 * torch.finfo(dtype).eps * own_NM.norm())


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    if has_kernels(gate):
        from groupwise.model.pointwise import gated_silu

        return gated_silu(gate, up)
    return silu(gate).mul_(up)


def _gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and up, and silu(gate) · up again; all three arguments are used up."""
    if has_kernels(gate):
        from groupwise.model.pointwise import gated_silu_backward_

        gated_silu_backward_(grad, gate, up)
        return gate, up, grad
    open_gate = silu(gate)
    gated = open_gate * up
    dup = open_gate.mul_(grad)
    return torch.ops.aten.silu_backward(grad.mul_(up), gate), dup, gated


def _spend(ctx: Any) -> None:
    """A graph that is kept after its backward pass must not be used again: its gates may be gradients now."""
    assert not ctx.spent, "gradients were written where the gates had been"
    ctx.spent = True


class _GatedSiLU(torch.autograd.Function):
    """silu(gate) · up"""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.spent = False
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        _spend(ctx)
        dgate, dup, _ = _gradients(grads[0].clone(memory_format=torch.contiguous_format), *ctx.saved_tensors)
        return dgate, dup


class _GatedProduct(torch.autograd.Function):
    """The layer that follows, of silu(gate) · up, which is not kept.

    The layer is a weight, or a base that is frozen (and may be quantized) with an adapter.

    Axes: N tokens, I inner width, O outputs, R rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate_NI: Tensor,
        up_NI: Tensor,
        base: Any,
        weight_OI: Tensor | None,
        bias_O: Tensor | None,
        a_RI: Tensor | None,
        b_OR: Tensor | None,
        scale: float,
    ) -> Tensor:
        ctx.base, ctx.scale, ctx.spent = base, scale, False
        if a_RI is None or b_OR is None:
            ctx.adapter_type = None
            ctx.save_for_backward(gate_NI, up_NI, weight_OI)
            if is_unread():
                return stand_in(gate_NI, len(weight_OI))  # type: ignore[arg-type]
            return nn.functional.linear(_gated(gate_NI, up_NI), weight_OI, bias_O)  # type: ignore[arg-type]
        ctx.adapter_type = a_RI.dtype
        a_RI, b_OR = a_RI.to(gate_NI.dtype), b_OR.to(gate_NI.dtype)
        if is_unread():
            y_NO, low_NR = stand_in(gate_NI, len(b_OR)), None
        else:
            y_NO, low_NR = adapted_product(_gated(gate_NI, up_NI), base, bias_O, a_RI, b_OR, scale)
        ctx.save_for_backward(gate_NI, up_NI, a_RI, b_OR, low_NR)
        return y_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _spend(ctx)
        dy_NO, (gate_NI, up_NI, *others) = grads[0], ctx.saved_tensors
        dweight_OI = dbias_O = da_RI = db_OR = None
        if ctx.adapter_type is None:
            dgate_NI, dup_NI, gated_NI = _gradients(dy_NO @ others[0], gate_NI, up_NI)
            if ctx.needs_input_grad[3]:
                dweight_OI = dy_NO.T @ gated_NI
            if ctx.needs_input_grad[4]:
                dbias_O = dy_NO.sum(0)
        else:
            a_RI, b_OR, low_NR = others
            dlow_NR = scaled_product(dy_NO, b_OR, ctx.scale)
            dgated_NI = input_gradient(dy_NO, dlow_NR, ctx.base, a_RI)
            dgate_NI, dup_NI, gated_NI = _gradients(dgated_NI, gate_NI, up_NI)
            if low_NR is None:
                low_NR = scaled_product(gated_NI, a_RI.T, ctx.scale)
            da_RI, db_OR = adapter_gradients(dy_NO, dlow_NR, gated_NI, low_NR, ctx.adapter_type)
        return dgate_NI, dup_NI, None, dweight_OI, dbias_O, da_RI, db_OR, None
