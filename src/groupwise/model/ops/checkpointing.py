"""Gradient checkpointing: a layer keeps nothing but its input, and is computed again in the backward pass.

torch's own way hooks every tensor that a layer would have kept, which takes the host a good part of the time
that the layer takes it; a GPU waits for it when passes are small. Here the backward pass computes the layer
and differentiates it on the spot, without the last product where its result goes unread (tried when
a model is loaded). That asks for layers without noise of their own, which would have to be the
same twice; for one differentiable input, the hidden states; and for nobody who watches the passes of a layer
(FSDP, DeepSpeed). Otherwise torch does it.
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
"""What transformers hands on to torch's `checkpoint`."""


def recompute_layers(policy: Policy) -> None:
    """Turn gradient checkpointing on for a policy, ours where it can be."""
    noisy = policy.noisy
    policy.model.gradient_checkpointing_enable(TORCH)
    if not noisy:
        _call(policy, partial(compute_again, whole=reads_results(policy)))


def _call(policy: Policy, function: Callable[..., Any]) -> None:
    """Have a function called with every layer of a model in training, and with the layer's inputs."""
    for module in policy.model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = function


def leave_to_torch(model: Any) -> None:
    """Where layers are recomputed, let torch do it."""
    if model.is_gradient_checkpointing:
        model.gradient_checkpointing_enable(TORCH)


def compute_again(layer: Callable[..., Any], *inputs: Any, whole: bool = True) -> Any:
    """Compute a layer, hidden states first; a gradient of its result will compute it again, whole or not."""
    if not _has_one_gradient(layer, inputs):
        return checkpoint(layer, *inputs, use_reentrant=False)
    hidden, *others = inputs
    if not hidden.requires_grad:  # embeddings that are not trained, below layers that are
        hidden = hidden.detach().requires_grad_()
    return _RecomputedLayer.apply(layer, whole, hidden, *others)  # type: ignore[no-untyped-call]


def _has_one_gradient(layer: Callable[..., Any], inputs: Sequence[Any]) -> bool:
    """Whether no input but the first may get a gradient."""
    named = layer.keywords.values() if isinstance(layer, partial) else ()
    return bool(inputs) and not any(map(may_want_gradient, (*inputs[1:], *named)))


def may_want_gradient(value: Any) -> bool:
    """Whether an argument may get a gradient: in what can be changed, layers may leave each other tensors."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, tuple):
        return any(map(may_want_gradient, value))
    return isinstance(value, list | Mapping)


class _RecomputedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Callable[..., Any], whole: bool, hidden: Tensor, *others: Any) -> Any:
        ctx.layer, ctx.whole, ctx.others = layer, whole, others
        ctx.save_for_backward(hidden)
        found = layer(hidden, *others)
        for result in _results(found):
            assert result is None or isinstance(result, Tensor), "a layer's result would get no gradient"
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), nullcontext() if ctx.whole else results_unread():
            found = ctx.layer(hidden, *ctx.others)
        wanted = [
            (get_gradient_edge(result), grad)
            for result, grad in zip(_results(found), grads, strict=True)
            if isinstance(result, Tensor) and result.requires_grad
        ]
        del found  # the gradients do not ask for the results
        torch.autograd.backward([edge for edge, _ in wanted], [grad for _, grad in wanted])
        return None, None, hidden.grad, *(None for _ in ctx.others)


def _results(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def reads_results(policy: Policy) -> bool:
    """Whether some layer's gradients change when its results are taken for unread; tried on a short row.

    A layer that computes them all the same has shown nothing, and counts as one that reads them.
    """
    trained = list(policy.trainable().values())
    needed: list[bool] = []

    def try_layer(layer: Callable[..., Any], *inputs: Any) -> Any:
        if _has_one_gradient(layer, inputs):
            _, whole = _differentiated(layer, *inputs, trained=trained)
            with results_unread():
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
    """A layer's first result, and the gradients of its input and of what is trained in it."""
    hidden = hidden.detach().requires_grad_()
    found = _results(layer(hidden, *others))
    results = [result for result in found if isinstance(result, Tensor) and result.requires_grad]
    # cuBLAS warns where it is the first that a thread asks of a GPU: the ramp's product comes before it.
    weighed = torch.stack([(result * _ramp(result)).sum() for result in results]).sum()
    gradients = torch.autograd.grad(weighed, [hidden, *trained], allow_unused=True)
    return results[0].detach(), [gradient for gradient in gradients if gradient is not None]


def _ramp(result: Tensor) -> Tensor:
    """Different numbers around 1."""
    return torch.linspace(0.5, 1.5, result.shape[-1], dtype=result.dtype, device=result.device)


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether gradients differ by no more than rounding; what is not a number is close to nothing."""
    return bool((one - other).norm() <= 16 * torch.finfo(one.dtype).eps * one.norm())


_unread = ContextVar("unread", default=False)


@contextmanager
def results_unread() -> Iterator[None]:
    """While this lasts, nobody reads what the blocks of a layer give."""
    token = _unread.set(True)
    try:
        yield
    finally:
        _unread.reset(token)


def is_unread() -> bool:
    return _unread.get()


def stand_in(x_NI: Tensor, outputs: int) -> Tensor:
    """What stands for a result_NO, and takes no memory."""
    return x_NI.new_full((1, 1), torch.nan).expand(len(x_NI), outputs)
