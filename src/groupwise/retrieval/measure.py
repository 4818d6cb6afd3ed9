"""How well an index finds the documents of questions: MRR, recall and nDCG, of each side and of both."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import fmean
from typing import Any

from groupwise.retrieval.documents import Question
from groupwise.retrieval.index import Index

SIDES = ("dense", "sparse", "fused")


def measure(index: Index, questions: Sequence[Question], *, count: int = 5, **weights: Any) -> dict[str, Any]:
    """Ask every question on every side and return means over the `count` chunks that a search returns."""
    asked = [question.text for question in questions]
    report: dict[str, Any] = {"questions": len(questions), "count": count}
    for side in SIDES:
        found = index.search_all(asked, count, side=side, **weights)
        names = [[hit.chunk.document for hit in hits] for hits in found]
        golds = [set(question.documents) for question in questions]
        pairs = list(zip(names, golds, strict=True))
        report[side] = {
            f"mrr@{count}": fmean(reciprocal_rank(found, gold) for found, gold in pairs),
            f"recall@{count}": fmean(float(bool(gold & set(found))) for found, gold in pairs),
            f"ndcg@{count}": fmean(ndcg(found, gold, count) for found, gold in pairs),
        }
    return report


def reciprocal_rank(found: Sequence[str], gold: Collection[str]) -> float:
    """1 / the rank of the first gold document; 0 without one."""
    return next((1 / rank for rank, name in enumerate(found, start=1) if name in gold), 0.0)


def ndcg(found: Sequence[str], gold: Collection[str], count: int) -> float:
    """Gain of the gold documents, each once, discounted by rank, over the most there could be.

    Example: found (x, a), gold {a} -> (1 / log2 3) / 1 = 0.63
    """
    first = {name: rank for rank, name in reversed(list(enumerate(found, start=1))) if name in gold}
    gain = math.fsum(1 / math.log2(rank + 1) for rank in first.values())
    ideal = math.fsum(1 / math.log2(rank + 1) for rank in range(1, min(len(gold), count) + 1))
    return gain / ideal
