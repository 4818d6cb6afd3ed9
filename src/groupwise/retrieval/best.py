"""The highest of many scores, without sorting them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

ROWS = 64
"""Scores are laid out in this many rows, whose columns' maxima tell what cannot be among the highest."""


def best(
    scores_N: NDArray[np.float32], count: int, *, above: float = -math.inf
) -> tuple[list[int], list[float]]:
    """Return the highest scores and where they are, the lower number first among equals.

    Example: scores [1, 3, 1], 2 of them -> [1, 0], [3.0, 1.0]
    """
    candidates_C = contenders(scores_N, count, above=above)
    scores_C = scores_N[candidates_C]
    order_C = np.argsort(-scores_C, kind="stable")[:count]
    return candidates_C[order_C].tolist(), scores_C[order_C].tolist()


def contenders(
    scores_N: NDArray[np.float32], count: int, *, above: float = -math.inf, slack: float = 0.0
) -> NDArray[np.int64]:
    """Return, in order, every place whose score reaches the `count`-th highest, and perhaps a few more.

    `slack`: how much less than that will do. What is not higher than `above` is left out.
    """
    border = lower_bound(scores_N, count) - slack
    return np.flatnonzero(scores_N >= border) if border > above else np.flatnonzero(scores_N > above)


def lower_bound(scores_N: NDArray[np.float32], count: int) -> float:
    """Return a score that at least `count` places reach, close to the highest such; -inf if there are fewer.

    The `count`-th highest of the columns' maxima: each is a score of its own.
    """
    whole = len(scores_N) // ROWS * ROWS
    columns = np.concatenate([scores_N[:whole].reshape(ROWS, -1).max(axis=0), scores_N[whole:]])
    if count > len(columns):
        columns = scores_N
    if count > len(columns):
        return -math.inf
    return float(np.partition(columns, len(columns) - count)[len(columns) - count])
