"""Which chunks are closest in meaning: one matrix product for many queries, and the best of each exactly.

Axes: Q queries, N chunks, C candidates of one query, D dimensions.
"""

from __future__ import annotations

import numpy as np

from groupwise.retrieval.best import contenders
from groupwise.retrieval.embed import Vectors
from groupwise.retrieval.fusion import Ranking

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
