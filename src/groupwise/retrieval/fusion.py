"""One ranking from two: what the dense and the sparse side each found, best first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from groupwise.errors import ConfigError

RRF_DAMPING = 60
"""As in the paper (Cormack, Clarke & Büttcher 2009)."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Numbers of chunks, best first, and their scores."""

    numbers: Sequence[int]
    scores: Sequence[float]


def reciprocal_ranks(ranking: Ranking) -> dict[int, float]:
    """1, 1/2, 1/3 …: steep, so that what one side is sure of stays on top."""
    return {number: 1 / (rank + 1) for rank, number in enumerate(ranking.numbers)}


def damped_ranks(ranking: Ranking) -> dict[int, float]:
    """1/61, 1/62 …: flat, so that what both sides found comes first."""
    return {number: 1 / (RRF_DAMPING + rank + 1) for rank, number in enumerate(ranking.numbers)}


def scaled_scores(ranking: Ranking) -> dict[int, float]:
    """The scores as shares of the best one."""
    top = max(ranking.scores, default=0.0)
    if top <= 0:
        return dict.fromkeys(ranking.numbers, 0.0)
    return {n: score / top for n, score in zip(ranking.numbers, ranking.scores, strict=True)}


FUSIONS: dict[str, Callable[[Ranking], Mapping[int, float]]] = {
    "weighted": reciprocal_ranks,
    "rrf": damped_ranks,
    "scores": scaled_scores,
}


def fuse(
    dense: Ranking, sparse: Ranking, *, count: int, kind: str, dense_weight: float, sparse_weight: float
) -> Ranking:
    """Add up both sides' weighted values; absent means 0, and equals go by number.

    Example: dense (4, 7), sparse (7, 9), weighted 0.8 and 0.2 -> 4: 0.8, 7: 0.4 + 0.2, 9: 0.1
    """
    if kind not in FUSIONS:
        raise ConfigError(f"fusion must be one of {', '.join(FUSIONS)}; got {kind!r}")
    total: dict[int, float] = {}
    for ranking, weight in ((dense, dense_weight), (sparse, sparse_weight)):
        for number, value in FUSIONS[kind](ranking).items():
            total[number] = total.get(number, 0.0) + weight * value
    ordered = sorted(total, key=lambda number: (-total[number], number))[:count]
    return Ranking(ordered, [total[number] for number in ordered])
