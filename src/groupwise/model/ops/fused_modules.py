"""Fused RMSNorm and SwiGLU block: fewer passes over memory, and less kept for the backward pass.

A small model spends a tenth of its update in norms, which are memory-bound. On a GPU they use torch's kernel;
on a CPU that kernel is slower than the implementation here.

Of a SwiGLU block, autograd keeps four tensors of the intermediate size: gate, silu(gate), up, and
silu(gate) · up. Here only gate and up are kept. Recomputing the rest is as fast as reading it, and on a GPU
the kernel that computes the gradients does so in place.

Under gradient checkpointing, the intermediate activations exist for one tile of tokens at a time.

Axes: N tokens, M hidden size, I intermediate size, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from groupwise.model.device import has_kernels, tile_count
from groupwise.model.ops.checkpointing import output_is_unused, placeholder
from groupwise.model.ops.equivalence import computes_the_same
from groupwise.model.ops.lora_linear import (
    LoRALinear,
    lora_linear_of,
    needed_gradients,
    project,
    trained_tensors,
)


def use_fused_rmsnorm(model: nn.Module) -> None:
    """Replace the forward pass of every plain RMSNorm; leave other modules unchanged."""
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        plain = isinstance(getattr(module, "variance_epsilon", None), float) and weight.dim() == 1
        if not plain:
            continue
        fused = _norm_on_gpu if weight.device.type == "cuda" else _norm_on_cpu
        if (weight.device.type == "cuda" or weight.dtype == torch.float32) and _is_plain_norm(module, fused):
            module.forward = MethodType(fused, module)


def _norm_on_cpu(module: Any, x: Tensor) -> Tensor:
    y: Tensor = _RMSNorm.apply(x, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
    return y


def _norm_on_gpu(module: Any, x: Tensor) -> Tensor:
    # Some models keep the residual stream in float32, and torch's kernel needs one dtype.
    weight = module.weight.float() if x.dtype == torch.float32 else module.weight
    return nn.functional.rms_norm(x, weight.shape, weight, module.variance_epsilon)


def _is_plain_norm(module: Any, fused: Callable[[Any, Tensor], Tensor]) -> bool:
    if len(signature(module.forward).parameters) != 1:  # Mamba's norm also takes a gate
        return False
    width, device = len(module.weight), module.weight.device
    x_NM = torch.linspace(-2.0, 3.0, 2 * width, device=device).view(2, -1)
    return computes_the_same(module, x_NM, lambda one, x: one(x), fused)


class _RMSNorm(torch.autograd.Function):
    """y = w · x̂ with x̂ = x / √(mean x² + ε)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_M: Tensor, eps: float) -> Tensor:
        square: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_M, scale)
        return (x * scale).mul_(weight_M)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """dx = scale · w dy - x · scale³ · mean(w dy · x), where the mean is over the hidden size."""
        x, weight_M, scale = ctx.saved_tensors
        dy = grads[0]
        along_NM = (dy * x).flatten(0, -2)
        scale_N = scale.flatten()
        dweight = scale_N @ along_NM if ctx.needs_input_grad[1] else None
        pull = (along_NM @ weight_M).mul_(scale_N.pow(3)).div_(-x.shape[-1]).view(scale.shape)
        dx = torch.mul(dy, scale, out=along_NM.view(dy.shape)).mul_(weight_M)
        return dx.addcmul_(x, pull), dweight, None


PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


def use_fused_swiglu(model: nn.Module) -> None:
    """Replace the forward pass of every plain SwiGLU block; leave other modules unchanged."""
    for module in model.modules():
        linears = all(isinstance(getattr(module, part, None), nn.Module) for part in PARTS[:3])
        if linears and hasattr(module, PARTS[3]) and _is_plain_block(module):
            module.forward = MethodType(_gated_block, module)


def _is_plain_block(module: Any) -> bool:
    width = getattr(module.gate_proj, "in_features", 0)
    x_NM = torch.linspace(-2.0, 3.0, 2 * width, device=module.down_proj.weight.device).view(2, width)
    return computes_the_same(module, x_NM, lambda one, x: one(x), _gated_block)


def _gated_block(module: Any, x: Tensor) -> Tensor:
    layers = module.gate_proj, module.up_proj, module.down_proj
    linears = [linear for linear in map(lora_linear_of, layers) if linear is not None]
    if len(linears) < len(layers):
        y: Tensor = module.down_proj(_GatedSiLU.apply(*project(x, layers[:2])))  # type: ignore[no-untyped-call]
        return y
    y_NM: Tensor = _GatedBlock.apply(  # type: ignore[no-untyped-call]
        x.flatten(0, -2), linears, torch.is_grad_enabled(), *trained_tensors(linears)
    )
    return y_NM.view(*x.shape[:-1], y_NM.shape[-1])


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    if has_kernels(gate):
        from groupwise.model.ops.triton_kernels import gated_silu

        return gated_silu(gate, up)
    return silu(gate).mul_(up)


def _gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and up, and silu(gate) · up; overwrites all three arguments."""
    if has_kernels(gate):
        from groupwise.model.ops.triton_kernels import gated_silu_backward_

        gated_silu_backward_(grad, gate, up)
        return gate, up, grad
    activated = silu(gate)
    gated = activated * up
    dup = activated.mul_(grad)
    return torch.ops.aten.silu_backward(grad.mul_(up), gate), dup, gated


def _mark_consumed(ctx: Any) -> None:
    """Forbid a second backward pass: the first one overwrites the saved activations."""
    assert not ctx.consumed, "the backward pass can run only once: it overwrites the saved activations"
    ctx.consumed = True


class _GatedSiLU(torch.autograd.Function):
    """silu(gate) · up"""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.consumed = False
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        _mark_consumed(ctx)
        dgate, dup, _ = _gradients(grads[0].clone(memory_format=torch.contiguous_format), *ctx.saved_tensors)
        return dgate, dup


class _GatedBlock(torch.autograd.Function):
    """down(silu(gate(x)) · up(x))"""

    @staticmethod
    def forward(
        ctx: Any, x_NM: Tensor, linears: Sequence[LoRALinear], differentiable: bool, *_: Tensor | None
    ) -> Tensor:
        ctx.linears = [linear.rounded(x_NM.dtype) for linear in linears]
        if not differentiable:
            tiles = [_block(ctx.linears, x_NM[rows])[0] for rows in _tiles(len(x_NM))]
            return tiles[0] if len(tiles) == 1 else torch.cat(tiles)
        ctx.consumed = False
        if output_is_unused():
            ctx.save_for_backward(x_NM)
            return placeholder(x_NM, linears[-1].base.out_features)
        y_NM, saved = _block(ctx.linears, x_NM)
        ctx.save_for_backward(x_NM, *saved)
        return y_NM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _mark_consumed(ctx)
        dy_NM, (x_NM, *saved) = grads[0], ctx.saved_tensors
        dx_NM = x_NM.new_empty(x_NM.shape)
        wanted = needed_gradients(ctx.linears, ctx.needs_input_grad)
        sums: list[Tensor | None] = []
        for rows in [slice(None)] if saved else _tiles(len(x_NM)):
            gradients = _block_gradients(
                ctx.linears, dy_NM[rows], x_NM[rows], saved, dx_NM=dx_NM[rows], wanted=wanted
            )
            sums = _added(sums, gradients) if sums else gradients
        return dx_NM, None, None, *sums


def _tiles(tokens: int) -> Iterator[slice]:
    """Yield tiles of nearly equal size. Example: 8201 -> 0–4099, 4100–8200"""
    count = tile_count(tokens)
    for i in range(count):
        yield slice(tokens * i // count, tokens * (i + 1) // count)


def _block(linears: Sequence[LoRALinear], x_NM: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Return the block's y_NM and the tensors that its backward pass needs."""
    gate, up, down = linears
    factors = [*gate.product(x_NM), *up.product(x_NM)]
    y_NM, low_NR = down.product(_gated(factors[0], factors[2]))  # type: ignore[arg-type]
    return y_NM, [*factors, low_NR]


def _block_gradients(
    linears: Sequence[LoRALinear],
    dy_NM: Tensor,
    x_NM: Tensor,
    saved: Sequence[Any],
    *,
    dx_NM: Tensor,
    wanted: Sequence[Sequence[bool]],
) -> list[Tensor | None]:
    """Write the gradient of x to dx and return those of the three linear layers."""
    gate, up, down = linears
    gate_NI, gate_low_NR, up_NI, up_low_NR, *low = saved or (*gate.product(x_NM), *up.product(x_NM))
    dlow_NR = down.low_gradient(dy_NM)
    dgated_NI = torch.empty_like(gate_NI)
    down.input_gradient(dgated_NI, dy_NM, dlow_NR, add=False)
    dgate_NI, dup_NI, gated_NI = _gradients(dgated_NI, gate_NI, up_NI)
    low_NR = low[0] if low else down.low(gated_NI)
    return [
        *gate.backward(dgate_NI, x_NM, gate_low_NR, dx_NI=dx_NM, add=False, wanted=wanted[0]),
        *up.backward(dup_NI, x_NM, up_low_NR, dx_NI=dx_NM, add=True, wanted=wanted[1]),
        *down.gradients(dy_NM, dlow_NR, gated_NI, low_NR, wanted=wanted[2]),
    ]


def _added(sums: Sequence[Tensor | None], terms: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [
        None if one is None or other is None else one.add_(other)
        for one, other in zip(sums, terms, strict=True)
    ]
