"""The gated SiLU of a decoder layer, keeping less for the backward pass.

Autograd keeps the gate, its SiLU and the other factor, each of the layer's inner width, the widest there
is. The SiLU is as quickly computed again as read back. A GPU computes it in one pass either way.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from groupwise.model.kernels import has_kernels

PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


def shorten_gates(model: nn.Module) -> None:
    """Give every module that computes a plain gated SiLU the shorter memory; others stay as they are."""
    # Weights that are quantized are of another type and shape than what they stand for.
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    for module in model.modules():
        if all(hasattr(module, part) for part in PARTS) and _same(module, dtype):
            module.forward = MethodType(_forward, module)


def _forward(module: Any, x: Tensor) -> Tensor:
    gated = _GatedSiLU.apply(module.gate_proj(x), module.up_proj(x))  # type: ignore[no-untyped-call]
    y: Tensor = module.down_proj(gated)
    return y


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


class _GatedSiLU(torch.autograd.Function):
    """silu(gate) · up"""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if has_kernels(gate):
            from groupwise.model.pointwise import gated_silu

            return gated_silu(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if has_kernels(gate):
            from groupwise.model.pointwise import gated_silu_backward

            return gated_silu_backward(grads[0].contiguous(), gate, up)
        dgate = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return dgate, silu(gate).mul_(grads[0])
