"""Gradient checkpointing: a layer keeps only its input and is recomputed in the backward pass.

torch's implementation hooks every tensor that a layer saves. With small passes this host overhead makes the
GPU wait. Here the backward pass recomputes the layer and differentiates it directly. It skips the layer's
last matmul if no gradient depends on its result, which is tested when a model is loaded.

Requirements: layers without random numbers such as dropout, one differentiable input (the hidden states), and
no hooks on the layers' passes (FSDP, DeepSpeed). Otherwise torch's implementation is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from groupwise.model.ops.equivalence import compute_short_row
from groupwise.model.policy import Policy

TORCH = {"use_reentrant": False}
"""Arguments of torch's `checkpoint`, passed through transformers."""


def recompute_layers(policy: Policy) -> None:
    """Enable gradient checkpointing for a policy, with this implementation where possible."""
    noisy = policy.noisy
    policy.model.gradient_checkpointing_enable(TORCH)
    if not noisy:
        _call(policy, partial(recompute_in_backward, whole=needs_outputs(policy)))


def _call(policy: Policy, function: Callable[..., Any]) -> None:
    """Make transformers call `function(layer, *inputs)` for every layer in training."""
    for module in policy.model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = function


def use_torch_checkpointing(model: Any) -> None:
    """Switch gradient checkpointing, if enabled, to torch's implementation."""
    if model.is_gradient_checkpointing:
        model.gradient_checkpointing_enable(TORCH)


def recompute_in_backward(layer: Callable[..., Any], *inputs: Any, whole: bool = True) -> Any:
    """Run a layer (hidden states first) and recompute it in the backward pass.

    `whole`: recompute the layer's last matmul, too.
    """
    if not _has_one_gradient(layer, inputs):
        return checkpoint(layer, *inputs, use_reentrant=False)
    hidden, *others = inputs
    if not hidden.requires_grad:  # frozen embeddings below trained layers
        hidden = hidden.detach().requires_grad_()
    return _RecomputedLayer.apply(layer, whole, hidden, *others)  # type: ignore[no-untyped-call]


def _has_one_gradient(layer: Callable[..., Any], inputs: Sequence[Any]) -> bool:
    """Whether only the first input may receive a gradient."""
    named = layer.keywords.values() if isinstance(layer, partial) else ()
    return bool(inputs) and not any(map(may_need_gradient, (*inputs[1:], *named)))


def may_need_gradient(value: Any) -> bool:
    """Whether an argument may receive a gradient; layers may pass tensors in mutable containers."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, tuple):
        return any(map(may_need_gradient, value))
    return isinstance(value, list | Mapping)


class _RecomputedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Callable[..., Any], whole: bool, hidden: Tensor, *others: Any) -> Any:
        ctx.layer, ctx.whole, ctx.others = layer, whole, others
        ctx.save_for_backward(hidden)
        output = layer(hidden, *others)
        for result in _results(output):
            assert result is None or isinstance(result, Tensor), "layer outputs must be tensors"
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), nullcontext() if ctx.whole else outputs_unused():
            output = ctx.layer(hidden, *ctx.others)
        wanted = [
            (get_gradient_edge(result), grad)
            for result, grad in zip(_results(output), grads, strict=True)
            if isinstance(result, Tensor) and result.requires_grad
        ]
        del output  # the gradients do not need the results
        torch.autograd.backward([edge for edge, _ in wanted], [grad for _, grad in wanted])
        return None, None, hidden.grad, *(None for _ in ctx.others)


def _results(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


def needs_outputs(policy: Policy) -> bool:
    """Whether some layer's gradients depend on the results of its last matmul; tested on a short row.

    A layer that computes them in any case proves nothing and counts as dependent.
    """
    trained = list(policy.trainable().values())
    needed: list[bool] = []

    def try_layer(layer: Callable[..., Any], *inputs: Any) -> Any:
        if _has_one_gradient(layer, inputs):
            _, whole = _differentiated(layer, *inputs, trained=trained)
            with outputs_unused():
                result, parts = _differentiated(layer, *inputs, trained=trained)
            needed.append(not result.isnan().any() or not all(map(_close, whole, parts)))
        return layer(*inputs)

    _call(policy, try_layer)
    compute_short_row(policy)
    return any(needed)


@torch.enable_grad()
def _differentiated(
    layer: Callable[..., Any], hidden: Tensor, *others: Any, trained: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return a layer's first result and the gradients of its input and its trained parameters."""
    hidden = hidden.detach().requires_grad_()
    outputs = _results(layer(hidden, *others))
    results = [result for result in outputs if isinstance(result, Tensor) and result.requires_grad]
    # The ramp's product runs first: cuBLAS warns if it is a thread's first GPU operation.
    weighted = torch.stack([(result * _ramp(result)).sum() for result in results]).sum()
    gradients = torch.autograd.grad(weighted, [hidden, *trained], allow_unused=True)
    return results[0].detach(), [gradient for gradient in gradients if gradient is not None]


def _ramp(result: Tensor) -> Tensor:
    """Return distinct weights around 1."""
    return torch.linspace(0.5, 1.5, result.shape[-1], dtype=result.dtype, device=result.device)


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether gradients agree up to rounding; False for NaN."""
    return bool((one - other).norm() <= 16 * torch.finfo(one.dtype).eps * one.norm())


_unused = ContextVar("unused", default=False)


@contextmanager
def outputs_unused() -> Iterator[None]:
    """Declare inside this context that the outputs of a layer's blocks are unused."""
    token = _unused.set(True)
    try:
        yield
    finally:
        _unused.reset(token)


def output_is_unused() -> bool:
    return _unused.get()


def placeholder(x_NI: Tensor, outputs: int) -> Tensor:
    """Return a result_NO of NaN that takes no memory."""
    return x_NI.new_full((1, 1), torch.nan).expand(len(x_NI), outputs)
