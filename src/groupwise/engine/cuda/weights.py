"""The matrices that generate: those which share an input stacked into one, adapters folded in.

Stacking needs a copy, and so do folding and unpacking what is quantized; the copies stay where they are
(a CUDA graph keeps addresses) and are brought up to date before each call. The policy's own weights are never
touched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from groupwise.model.lora import base_of, effective_weight, is_adapted
from groupwise.model.quantized import is_quantized


class Matrix:
    """One or more linear layers of one input, as one product."""

    def __init__(self, *parts: Any, like: Tensor) -> None:
        self._parts = parts
        base = [base_of(part) for part in parts]
        quantized = [is_quantized(part) for part in base]
        assert all(type(part) is nn.Linear for part in base) or all(quantized), "plain linear layers only"
        self._copied = len(parts) > 1 or any(is_adapted(part) for part in parts) or any(quantized)
        self.weight: Tensor = base[0].weight
        self.bias: Tensor | None = base[0].bias
        if self._copied:
            rows = sum(part.out_features for part in base)
            self.weight = torch.empty(rows, base[0].in_features, dtype=like.dtype, device=like.device)
            if self.bias is not None:
                self.bias = torch.empty(rows, dtype=like.dtype, device=like.device)
        self.refresh()

    def refresh(self) -> None:
        """Copy the policy's weights as they are now."""
        if not self._copied:
            return
        start = 0
        for part in self._parts:
            base = base_of(part)
            rows = slice(start, start + base.out_features)
            self.weight[rows].copy_(effective_weight(part))
            if self.bias is not None:
                self.bias[rows].copy_(base.bias)
            start = rows.stop

    def __call__(self, x_TN: Tensor, _own: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x_TN, self.weight, self.bias)
