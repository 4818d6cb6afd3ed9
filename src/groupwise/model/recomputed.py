"""Gradient checkpointing: a layer keeps nothing but its input, and is computed again in the backward pass.

torch's own way hooks every tensor that a layer would have kept, which takes the host a good part of the time
that the layer takes it; a GPU waits for it when passes are small. Here the backward pass computes the layer
and differentiates it on the spot. That asks for layers without noise of their own, which would have to be the
same twice; for one differentiable input, the hidden states; and for nobody who watches the passes of a layer
(FSDP, DeepSpeed). Otherwise torch does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from groupwise.model.policy import Policy

TORCH = {"use_reentrant": False}
"""What transformers hands on to torch's `checkpoint`."""


def recompute_layers(policy: Policy) -> None:
    """Turn gradient checkpointing on for a policy, ours where it can be."""
    noisy = policy.noisy
    policy.model.gradient_checkpointing_enable(TORCH)
    if noisy:
        return
    for module in policy.model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = compute_again


def leave_to_torch(model: Any) -> None:
    """Where layers are recomputed, let torch do it."""
    if model.is_gradient_checkpointing:
        model.gradient_checkpointing_enable(TORCH)


def compute_again(layer: Callable[..., Any], *inputs: Any) -> Any:
    """Compute a layer, hidden states first; a gradient of its result will compute it again."""
    named = layer.keywords.values() if isinstance(layer, partial) else ()
    if not inputs or any(map(may_want_gradient, (*inputs[1:], *named))):
        return checkpoint(layer, *inputs, use_reentrant=False)
    hidden, *others = inputs
    if not hidden.requires_grad:  # embeddings that are not trained, below layers that are
        hidden = hidden.detach().requires_grad_()
    return _Recomputed.apply(layer, hidden, *others)  # type: ignore[no-untyped-call]


def may_want_gradient(value: Any) -> bool:
    """Whether an argument may get a gradient: in what can be changed, layers may leave each other tensors."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, tuple):
        return any(map(may_want_gradient, value))
    return isinstance(value, list | Mapping)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Callable[..., Any], hidden: Tensor, *others: Any) -> Any:
        ctx.layer, ctx.others = layer, others
        ctx.save_for_backward(hidden)
        found = layer(hidden, *others)
        for result in found if isinstance(found, tuple) else (found,):
            assert result is None or isinstance(result, Tensor), "a layer's result would get no gradient"
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            found = ctx.layer(hidden, *ctx.others)
        wanted = [
            (get_gradient_edge(result), grad)
            for result, grad in zip(found if isinstance(found, tuple) else (found,), grads, strict=True)
            if isinstance(result, Tensor) and result.requires_grad
        ]
        del found  # the gradients do not ask for the results
        torch.autograd.backward([edge for edge, _ in wanted], [grad for _, grad in wanted])
        return None, hidden.grad, *(None for _ in ctx.others)
