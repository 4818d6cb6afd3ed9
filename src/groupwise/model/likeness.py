"""Whether a shorter pass computes what a module does: found by trying.

Modules that have the same parts differ in what they do with them: another activation, a clamp, a norm between
two products, noise in training. In half precision some of these look like rounding; in float32 they do not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.model.mode import in_mode
from groupwise.model.quantized import is_quantized_model

SCALES = (1.0, 16.0)
"""Of inputs: what is clamped shows in large ones."""
LIMIT = 1e-3
"""Of the difference, relative to the result."""

Pass = Callable[[Any, Tensor], Tensor]


@torch.no_grad()
def computes_the_same(module: nn.Module, x: Tensor, own: Pass, short: Pass) -> bool:
    """Whether two passes of a module agree on an input in float32, scaled, in evaluation and in training."""
    exact = _in_float32(module)
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        for training in (False, True):
            with in_mode(exact, training=training):
                if not all(_agree(exact, scale * x, own, short) for scale in SCALES):
                    return False
    return True


def _agree(module: nn.Module, x: Tensor, own: Pass, short: Pass) -> bool:
    try:
        ours, theirs = short(module, x), own(module, x)
        # A result of zeros, as new layers may have, tells nothing.
        return bool(theirs.norm() > 0 and (ours - theirs).norm() <= LIMIT * theirs.norm())
    except (TypeError, RuntimeError, AttributeError, ValueError, LookupError):
        return False  # it asks for more than what it is given, or has parts of another kind


def _in_float32(module: nn.Module) -> nn.Module:
    """A copy, unless it is so already; quantized weights are unpacked to the precision of their input."""
    if is_quantized_model(module) or all(p.dtype == torch.float32 for p in module.parameters()):
        return module
    return copy.deepcopy(module).float()
