"""How rewards are distributed, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from groupwise.report.slices import Slices

MOST_STEPS = 100
"""Steps in one picture; of more, evenly spread ones are read."""
FEW_VALUES = 12
"""Up to this many different rewards, each is a bin of its own."""
BINS = 24
QUARTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def distribution(slices: Slices, *, first: int | None = None, last: int | None = None) -> dict[str, Any]:
    """Return how often each reward was given in each step, and the quartiles.

    {"steps": [1, 2], "bins": [[0.0, 0.0], [1.0, 1.0]], "counts": [[3, 5], [8, 0]], …}: in step 1
    three rollouts got reward 0 and eight got 1; counts has a row for each bin.
    """
    inside = [
        step for step in slices.steps() if (first is None or step >= first) and (last is None or step <= last)
    ]
    steps, rewards = [], []
    for step in spread(inside, MOST_STEPS):
        try:
            values = slices.rewards(step)
        except OSError:
            continue  # removed by a run that resumed before this step
        if len(values):
            steps.append(step)
            rewards.append(values)
    bins = bins_of(rewards)
    return {
        "steps": steps,
        "of": len(inside),
        "bins": bins,
        "counts": count(rewards, bins),
        "mean": [float(values.mean()) for values in rewards],
        "quantiles": {
            f"{share:g}": [float(np.quantile(values, share)) for values in rewards] for share in QUARTILES
        },
    }


def spread(steps: Sequence[int], most: int) -> list[int]:
    """Return at most this many steps, evenly spread, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    places = np.linspace(0, len(steps) - 1, most).round().astype(int)
    return [steps[place] for place in places]


def bins_of(rewards: Sequence[NDArray[np.float64]]) -> list[list[float]]:
    """Return the bins from low to high, each as its ends; a reward that stands alone has both ends equal."""
    if not rewards:
        return []
    values = np.unique(np.concatenate([np.unique(step.round(6)) for step in rewards]))
    if len(values) <= FEW_VALUES:
        return [[float(value), float(value)] for value in values]
    edges = np.linspace(values[0], values[-1], BINS + 1)
    return [[float(low), float(high)] for low, high in itertools.pairwise(edges)]


def count(rewards: Sequence[NDArray[np.float64]], bins: Sequence[Sequence[float]]) -> list[list[int]]:
    """Return, for each bin, how many of each step's rewards lie in it."""
    if not bins:
        return []
    # A reward belongs to the last bin that begins at or below it; rounding must not push it out.
    starts = np.array([low for low, _ in bins]) - 1e-6
    columns = [
        np.bincount(np.searchsorted(starts, values, side="right") - 1, minlength=len(bins))
        for values in rewards
    ]
    table: list[list[int]] = np.stack(columns, axis=1).tolist()
    return table
