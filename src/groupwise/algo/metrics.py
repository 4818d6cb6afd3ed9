"""Diagnostics of many micro-batches to those of one training step.

Every metric is a sum over tokens, so that parts add up and are divided once, by `policy/tokens`; but
a name that ends in _max or _min keeps the extreme.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def merge(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the metrics of all parts together."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = combine(name, total[name], value) if name in total else value
    return total


def combine(name: str, left: Tensor, right: Tensor) -> Tensor:
    """Return two values of one metric as one: the greater, the smaller or the sum, as its name asks."""
    if name.endswith("_max"):
        return torch.maximum(left, right)
    if name.endswith("_min"):
        return torch.minimum(left, right)
    return left + right


def averages(total: Mapping[str, Tensor]) -> dict[str, float]:
    """Return merged metrics as means per token, extremes as they are; nothing when there were no tokens."""
    tokens = float(total.get("policy/tokens", 0.0))
    if not tokens:
        return {}
    return {
        name: float(value) if name.endswith(("_max", "_min")) else float(value) / tokens
        for name, value in total.items()
        if name != "policy/tokens"
    }
