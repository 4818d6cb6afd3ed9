"""The highest of many scores, without sorting them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from groupwise.errors import ConfigError
from groupwise.retrieval.embed import Vectors

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


ROUNDING = 1e-4
"""More than rounding in float32 can change the product of two vectors of length 1."""


def closest(asked_QD: Vectors, chunks_ND: Vectors, count: int) -> list[Ranking]:
    """Return the chunks of highest product with each query, the lower number first among equals.

    A query of which the embedding knows no word is no closer to one chunk than to another, and a deleted
    chunk's vector is 0: a chunk whose product is 0 is not found.
    """
    scores_QN: Vectors = asked_QD @ chunks_ND.T
    return [ranked(*row, chunks_ND, count) for row in zip(asked_QD, scores_QN, strict=True)]


def ranked(asked_D: Vectors, scores_N: Vectors, chunks_ND: Vectors, count: int) -> Ranking:
    """Compute the scores of candidates again, each alone: how a large product rounds depends on its size."""
    candidates_C = contenders(scores_N, count, above=0.0, slack=ROUNDING)
    exact_C = np.einsum("cd,d->c", chunks_ND[candidates_C], asked_D, dtype=np.float64)
    order_C = np.argsort(-exact_C, kind="stable")[:count]
    return Ranking(candidates_C[order_C].tolist(), exact_C[order_C].tolist())


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
