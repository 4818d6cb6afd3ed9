"""Rank chunks: exact top-k selection without a full sort, and fusion of dense and sparse rankings.

Axes: N chunks, Q queries, D dimensions, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from groupwise.errors import ConfigError
from groupwise.retrieval.embed import Vectors

ROWS = 64
"""Scores are arranged in this many rows; the maxima of the columns bound the top k."""


def top_k(
    scores_N: NDArray[np.float32], count: int, *, above: float = -math.inf
) -> tuple[list[int], list[float]]:
    """Return the indices and values of the highest scores, the lower index first among ties.

    Example: scores [1, 3, 1], 2 of them -> [1, 0], [3.0, 1.0]
    """
    candidates_C = top_candidates(scores_N, count, above=above)
    scores_C = scores_N[candidates_C]
    order_C = np.argsort(-scores_C, kind="stable")[:count]
    return candidates_C[order_C].tolist(), scores_C[order_C].tolist()


def top_candidates(
    scores_N: NDArray[np.float32], count: int, *, above: float = -math.inf, slack: float = 0.0
) -> NDArray[np.int64]:
    """Return, in order, every index whose score reaches the `count`-th highest, and possibly a few more.

    `slack` lowers the threshold. Scores not above `above` are excluded.
    """
    threshold = lower_bound(scores_N, count) - slack
    return np.flatnonzero(scores_N >= threshold) if threshold > above else np.flatnonzero(scores_N > above)


def lower_bound(scores_N: NDArray[np.float32], count: int) -> float:
    """Return a score that at least `count` entries reach, close to the highest such; -inf if there are fewer.

    This is the `count`-th highest of the columns' maxima, which are distinct entries.
    """
    whole = len(scores_N) // ROWS * ROWS
    columns = np.concatenate([scores_N[:whole].reshape(ROWS, -1).max(axis=0), scores_N[whole:]])
    if count > len(columns):
        columns = scores_N
    if count > len(columns):
        return -math.inf
    return float(np.partition(columns, len(columns) - count)[len(columns) - count])


ROUNDING = 1e-4
"""Upper bound of the float32 rounding error of the product of two unit vectors."""


def nearest_chunks(queries_QD: Vectors, chunks_ND: Vectors, count: int) -> list[Ranking]:
    """Return the chunks with the highest dot product with each query, the lower number first among ties.

    A chunk with a product of 0 is not returned: its vector is 0 because it was deleted, or the embedding
    knows no word of the query.
    """
    scores_QN: Vectors = queries_QD @ chunks_ND.T
    return [ranked(*row, chunks_ND, count) for row in zip(queries_QD, scores_QN, strict=True)]


def ranked(query_D: Vectors, scores_N: Vectors, chunks_ND: Vectors, count: int) -> Ranking:
    """Rank candidates by recomputed scores: the rounding of a large matrix product depends on its size."""
    candidates_C = top_candidates(scores_N, count, above=0.0, slack=ROUNDING)
    exact_C = np.einsum("cd,d->c", chunks_ND[candidates_C], query_D, dtype=np.float64)
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
    """Return 1, 1/2, 1/3 … by rank: steep, so that the top result of one side stays on top."""
    return {number: 1 / (rank + 1) for rank, number in enumerate(ranking.numbers)}


def damped_ranks(ranking: Ranking) -> dict[int, float]:
    """Return 1/61, 1/62 … by rank: flat, so that results of both sides come first."""
    return {number: 1 / (RRF_DAMPING + rank + 1) for rank, number in enumerate(ranking.numbers)}


def scaled_scores(ranking: Ranking) -> dict[int, float]:
    """Return the scores divided by the best one."""
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
    """Add the weighted values of both sides; a missing result counts as 0, and ties are ordered by number.

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
