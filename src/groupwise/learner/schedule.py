"""The learning rate, counted in optimizer steps."""

from __future__ import annotations

import math


def learning_rate(update: int, *, peak: float, kind: str, warmup: int, total: int) -> float:
    """Return the rate of optimizer step `update` (from 0) of `total`.

    The first warm-up step already learns; linear and cosine reach 0 just after the last step.
    """
    if update < warmup:
        return peak * (update + 1) / warmup
    if kind == "constant":
        return peak
    done = min(1.0, (update - warmup) / max(1, total - warmup))
    return peak * (1 - done) if kind == "linear" else peak * 0.5 * (1 + math.cos(math.pi * done))
