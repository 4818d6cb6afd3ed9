"""Several rewards of a group to one a member.

Each function takes the weighted rewards of a group's members, a row a member and a column a reward, and
gives one number a member. Where nothing tells the rewards apart, all fall back to their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, pstdev

from groupwise.algo.advantages import SAME
from groupwise.records import Group, Rollout

Table = Sequence[Sequence[float]]
POWER_STEPS = 200
"""More than enough for the first component of a handful of rewards."""


def uniform(table: Table) -> list[float]:
    """The mean of a member's rewards."""
    return [fmean(row) for row in table]


def by_deviation(table: Table) -> list[float]:
    """Weigh each reward by how much it varies in the group: what is the same for all says nothing."""
    spreads = [pstdev(column) for column in zip(*table, strict=True)]
    total = sum(spreads)
    if total <= SAME:
        return uniform(table)
    return [sum(spread * value for spread, value in zip(spreads, row, strict=True)) / total for row in table]


def by_component(table: Table) -> list[float]:
    """Weigh standardised rewards by their loading on the first principal component.

    A component has no sign of its own, and independent rewards load on it with either: it is turned to
    agree with the mean, and a reward that still pulls the other way counts 0 instead of being inverted.
    """
    scaled = [standardised(column) for column in zip(*table, strict=True)]
    loadings = first_component([column for column in scaled if any(column)])
    if loadings is None:
        return uniform(table)
    varied = iter(loadings)
    weights = [next(varied) if any(column) else 0.0 for column in scaled]
    if sum(weights) < 0:
        weights = [-weight for weight in weights]
    weights = [max(0.0, weight) for weight in weights]
    total = sum(weights)
    if total <= SAME:
        return uniform(table)
    return [sum(w * column[m] for w, column in zip(weights, scaled, strict=True)) / total
            for m in range(len(table))]  # fmt: skip


def standardised(column: Sequence[float]) -> list[float]:
    spread, mean = pstdev(column), fmean(column)
    return [0.0] * len(column) if spread <= SAME else [(value - mean) / spread for value in column]


def first_component(columns: Sequence[Sequence[float]]) -> list[float] | None:
    """Return the loadings of the direction of largest variance, by power iteration; None without columns.

    It starts at the mean of the columns and stays there when no direction stands out.
    """
    if not columns:
        return None
    count = len(columns[0])
    covariance = [[sum(a * b for a, b in zip(x, y, strict=True)) / count for y in columns] for x in columns]
    vector = [1 / math.sqrt(len(columns))] * len(columns)
    for _ in range(POWER_STEPS):
        moved = [sum(c * v for c, v in zip(row, vector, strict=True)) for row in covariance]
        length = math.hypot(*moved)
        if length <= SAME:
            return None
        vector = [value / length for value in moved]
    return vector


def by_length(table: Table) -> list[float]:
    """The root of the sum of squares, each square with its reward's sign: -1 stays worse than 0."""
    totals = [math.fsum(math.copysign(value * value, value) for value in row) for row in table]
    return [math.copysign(math.sqrt(abs(total)), total) for total in totals]


COMBINED: dict[str, Callable[[Table], list[float]]] = {
    "uniform": uniform,
    "std": by_deviation,
    "pca": by_component,
    "l2": by_length,
}


def with_combined(group: Group, *, kind: str, weights: Mapping[str, float]) -> Group:
    """Return the group with each valid member's reward combined anew; `sum` leaves the weighted sum as it is.

    A reward of weight 0 takes no part. Where a member lacks one that others have, it gets their mean.
    """
    if kind == "sum" or not group.valid:
        return group
    names = sorted({name for rollout in group.valid for name in rollout.rewards if weights.get(name, 1.0)})
    if not names:
        return group
    means = {name: fmean(r.rewards[name] for r in group.valid if name in r.rewards) for name in names}
    table = [
        [weights.get(name, 1.0) * rollout.rewards.get(name, means[name]) for name in names]
        for rollout in group.valid
    ]
    combined = iter(COMBINED[kind](table))
    rollouts = tuple(
        rollout.scored(reward=next(combined)) if rollout.error is None else rollout
        for rollout in group.rollouts
    )
    return replace(group, rollouts=rollouts)


def agreeing(rollouts: Sequence[Rollout], *, weights: Mapping[str, float]) -> list[Rollout]:
    """Return the members whose rewards all say the same: none below its mean in the group, or none above.

    They are weighted first: where a weight is negative, less is better. A reward of weight 0 says nothing.
    """
    names = sorted({name for rollout in rollouts for name in rollout.rewards if weights.get(name, 1.0)})
    means = {name: fmean(r.rewards[name] for r in rollouts if name in r.rewards) for name in names}

    def agree(rollout: Rollout) -> bool:
        above = [
            weights.get(name, 1.0) * (rollout.rewards[name] - mean)
            for name, mean in means.items()
            if name in rollout.rewards
        ]
        return all(gap >= -SAME for gap in above) or all(gap <= SAME for gap in above)

    return [rollout for rollout in rollouts if agree(rollout)]
