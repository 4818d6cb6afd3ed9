"""Fused linear layers with and without LoRA, on PEFT's own modules and weights.

PEFT computes `base(x) + B(A(x)) * scaling`: three tensors of the output size, and as many gradients. Here the
base matmul accumulates into the low-rank result, forward and backward, and layers that share an input
accumulate into one input gradient. Beside a half-precision model, PEFT keeps adapters in float32 and also
multiplies in float32. Here matmuls are in the model's dtype, while adapters, their gradients and the
optimizer stay in float32.

Axes: N tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from groupwise.model.adapters.lora import is_adapted
from groupwise.model.adapters.quantization import is_quantized, plain_weight
from groupwise.model.device import add_product, product, repeatable_linear, uses_onednn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def use_fast_linears(model: nn.Module) -> None:
    """Replace the forward pass of every plain linear layer on a CPU where torch's own is slower."""
    for module in model.modules():
        if type(module) is nn.Linear and uses_onednn(module.weight, module.weight):
            module.forward = MethodType(_plain_forward, module)  # type: ignore[method-assign]


def _plain_forward(linear: nn.Linear, input: Tensor) -> Tensor:
    if input.dim() < 2:
        return nn.functional.linear(input, linear.weight, linear.bias)
    (y,) = _apply(input, [LoRALinear(linear)])
    return y


def use_fused_lora(model: nn.Module) -> None:
    """Replace the forward pass of every plain LoRA layer; layers with dropout or variants keep PEFT's."""
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
    if layer.disable_adapters or layer.merged:
        output: Tensor = layer.base_layer(x)
        return output
    (y,) = _apply(x, [_adapted(layer)])
    return y


def project(x: Tensor, layers: Sequence[Any]) -> Sequence[Tensor]:
    """Apply several layers to one input."""
    linears = [lora_linear_of(layer) for layer in layers]
    known = [linear for linear in linears if linear is not None]
    return _apply(x, known) if len(known) == len(linears) else [layer(x) for layer in layers]


def _apply(x: Tensor, linears: Sequence[LoRALinear]) -> list[Tensor]:
    outputs = _SharedInputLinears.apply(x.flatten(0, -2), linears, *trained_tensors(linears))  # type: ignore[no-untyped-call]
    return [y_NO.view(*x.shape[:-1], y_NO.shape[-1]) for y_NO in outputs]


def lora_linear_of(layer: Any) -> LoRALinear | None:
    """Return a layer as a `LoRALinear`, or None for one that must be called as a module."""
    if any(getattr(layer, hooks) for hooks in HOOKS):
        return None  # hooks must see its passes, such as DeepSpeed's
    forward = getattr(vars(layer).get("forward"), "__func__", vars(layer).get("forward"))
    if forward is _forward:
        return LoRALinear(layer.base_layer) if layer.disable_adapters or layer.merged else _adapted(layer)
    plain = type(layer) is nn.Linear and forward in (None, _plain_forward)
    return LoRALinear(layer) if plain or (is_quantized(layer) and not is_adapted(layer)) else None


def _adapted(layer: Any) -> LoRALinear:
    (name,) = layer.active_adapters
    return LoRALinear(
        layer.base_layer, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]
    )


@dataclass(frozen=True, slots=True)
class LoRALinear:
    """x Wᵀ + bias; or, with a frozen and possibly quantized W, x Wᵀ + bias + scale · (x Aᵀ) Bᵀ."""

    base: Any
    """The layer with W and the bias; a quantized W is dequantized for each matmul."""
    a_RI: Tensor | None = None
    b_OR: Tensor | None = None
    scale: float = 1.0

    def rounded(self, dtype: torch.dtype) -> LoRALinear:
        """Return the layer with its adapter cast to `dtype`."""
        if self.a_RI is None or self.b_OR is None:
            return self
        return LoRALinear(self.base, self.a_RI.to(dtype), self.b_OR.to(dtype), self.scale)

    def _weight(self, like: Tensor) -> Tensor:
        return plain_weight(self.base).to(like.dtype)

    def product(self, x_NI: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (y_NO, low_NR), where `low` is the scaled product x Aᵀ."""
        bias_O = None if self.base.bias is None else self.base.bias.to(x_NI.dtype)
        low_NR = self.low(x_NI)
        if low_NR is None:
            return repeatable_linear(x_NI, self._weight(x_NI), bias_O), None
        y_NO = repeatable_linear(low_NR, self.b_OR, bias_O)  # type: ignore[arg-type]
        add_product(y_NO, x_NI, self._weight(x_NI).T)
        return y_NO, low_NR

    def low(self, x_NI: Tensor) -> Tensor | None:
        return None if self.a_RI is None else _scaled_product(x_NI, self.a_RI.T, self.scale)

    def low_gradient(self, dy_NO: Tensor) -> Tensor | None:
        return None if self.b_OR is None else _scaled_product(dy_NO, self.b_OR, self.scale)

    def input_gradient(self, dx_NI: Tensor, dy_NO: Tensor, dlow_NR: Tensor | None, *, add: bool) -> None:
        """Write the input's gradient to dx, or add it with `add`."""
        if dlow_NR is not None:
            add_product(dx_NI, dlow_NR, self.a_RI, add=add)  # type: ignore[arg-type]
        add_product(dx_NI, dy_NO, self._weight(dy_NO), add=add or dlow_NR is not None)

    def gradients(
        self,
        dy_NO: Tensor,
        dlow_NR: Tensor | None,
        x_NI: Tensor,
        low_NR: Tensor | None,
        *,
        wanted: Sequence[bool],
    ) -> list[Tensor | None]:
        """Return the wanted gradients of weight, bias, A and B; those of the adapter in float32."""
        return [
            product(dy_NO.T, x_NI) if wanted[0] else None,
            dy_NO.sum(0) if wanted[1] else None,
            None if dlow_NR is None or not wanted[2] else _whole_product(dlow_NR.T, x_NI),
            None if low_NR is None or not wanted[3] else _whole_product(dy_NO.T, low_NR),
        ]

    def backward(
        self,
        dy_NO: Tensor,
        x_NI: Tensor,
        low_NR: Tensor | None,
        *,
        dx_NI: Tensor | None,
        add: bool,
        wanted: Sequence[bool],
    ) -> list[Tensor | None]:
        """Write the input's gradient to dx, or add it, and return the parameter gradients."""
        dlow_NR = self.low_gradient(dy_NO)
        if dx_NI is not None:
            self.input_gradient(dx_NI, dy_NO, dlow_NR, add=add)
        return self.gradients(dy_NO, dlow_NR, x_NI, low_NR, wanted=wanted)


def needed_gradients(linears: Sequence[LoRALinear], needs_gradient: Sequence[bool]) -> list[Sequence[bool]]:
    """Split autograd's `needs_input_grad` by layer; `trained_tensors` are the last arguments."""
    flags = needs_gradient[len(needs_gradient) - 4 * len(linears) :]
    return [flags[4 * i : 4 * i + 4] for i in range(len(linears))]


def trained_tensors(linears: Iterable[LoRALinear]) -> list[Tensor | None]:
    """Return weight, bias, A and B of each layer, with None for those that need no gradient."""
    tensors = [
        t for linear in linears for t in (linear.base.weight, linear.base.bias, linear.a_RI, linear.b_OR)
    ]
    return [t if t is not None and t.requires_grad else None for t in tensors]


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return scale · left @ right in one launch; with beta=0 the first argument is not read."""
    if uses_onednn(left, right):
        return product(left, right).mul_(scale)
    return torch.addmm(left.new_empty(1), left, right, beta=0, alpha=scale)


def _whole_product(left: Tensor, right: Tensor) -> Tensor:
    """Return a matrix product in float32 or better; a GPU accumulates in float32 anyway."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=torch.float32)
    return product(left, right)


class _SharedInputLinears(torch.autograd.Function):
    """Several linear layers with one input, and one accumulated input gradient."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, linears: Sequence[LoRALinear], *_: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.linears = [linear.rounded(x_NI.dtype) for linear in linears]
        products = [linear.product(x_NI) for linear in ctx.linears]
        ctx.shape = x_NI.shape
        trains = any(ctx.needs_input_grad[2:])  # otherwise no gradient needs the input
        ctx.save_for_backward(x_NI if trains else None, *(low_NR for _, low_NR in products))
        return tuple(y_NO for y_NO, _ in products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, *lows = ctx.saved_tensors
        dx_NI = grads[0].new_empty(ctx.shape) if ctx.needs_input_grad[0] else None
        gradients: list[Tensor | None] = []
        wanted = needed_gradients(ctx.linears, ctx.needs_input_grad)
        for i, (linear, dy_NO, low_NR) in enumerate(zip(ctx.linears, grads, lows, strict=True)):
            gradients += linear.backward(dy_NO, x_NI, low_NR, dx_NI=dx_NI, add=i > 0, wanted=wanted[i])
        return dx_NI, None, *gradients
