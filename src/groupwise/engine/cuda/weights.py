"""The matrices that generate: those which share an input stacked into one, adapters folded in.

Stacking needs a copy, and so does folding; the copies stay where they are (a CUDA graph keeps
addresses) and are brought up to date before each call. The policy's own weights are never touched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Matrix:
    """One or more linear layers of one input, as one product."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts
        base = [_base(part) for part in parts]
        assert all(type(part) is nn.Linear for part in base), "plain linear layers only"
        self._copied = len(parts) > 1 or any(_adapted(part) for part in parts)
        self.weight: Tensor = base[0].weight
        self.bias: Tensor | None = base[0].bias
        if self._copied:
            rows = sum(part.out_features for part in base)
            self.weight = torch.empty(
                rows, base[0].in_features, dtype=self.weight.dtype, device=self.weight.device
            )
            if self.bias is not None:
                self.bias = torch.empty(rows, dtype=self.weight.dtype, device=self.weight.device)
        self.refresh()

    def refresh(self) -> None:
        """Copy the policy's weights as they are now."""
        if not self._copied:
            return
        start = 0
        for part in self._parts:
            base = _base(part)
            rows = slice(start, start + base.out_features)
            self.weight[rows].copy_(_folded(part))
            if self.bias is not None:
                self.bias[rows].copy_(base.bias)
            start = rows.stop

    def __call__(self, x_TN: Tensor) -> Tensor:
        return nn.functional.linear(x_TN, self.weight, self.bias)


def _adapted(part: Any) -> bool:
    return hasattr(part, "get_delta_weight")


def _base(part: Any) -> Any:
    return part.get_base_layer() if _adapted(part) else part


def _folded(part: Any) -> Tensor:
    weight: Tensor = _base(part).weight
    if not _adapted(part) or part.disable_adapters:
        return weight
    # Added in float32 and rounded once.
    delta: Tensor = sum(part.get_delta_weight(name).float() for name in part.active_adapters)
    return weight.float() + delta
