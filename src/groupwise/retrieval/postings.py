"""The sparse index on disk: arrays, nothing that could run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from groupwise.retrieval.sparse import SparseIndex


def save_postings(path: Path, index: SparseIndex) -> None:
    """Write the postings of every term one after the other, and where each begins."""
    terms = sorted(index.terms)
    texts = [np.array(index.terms[term][0], np.int32) for term in terms]
    counts = [np.array(index.terms[term][1], np.int32) for term in terms]
    np.savez(
        path,
        terms=np.frombuffer("\n".join(terms).encode(), np.uint8),
        starts=np.cumsum([0, *map(len, texts)]),
        texts=np.concatenate(texts) if texts else np.zeros(0, np.int32),
        counts=np.concatenate(counts) if counts else np.zeros(0, np.int32),
        lengths=np.array(index.lengths, np.int32),
    )


def load_postings(path: Path) -> SparseIndex:
    index = SparseIndex()
    with np.load(path, allow_pickle=False) as saved:
        joined = saved["terms"].tobytes().decode()
        terms = joined.split("\n") if joined else []  # a corpus may have no words to find
        starts, texts, counts = saved["starts"], saved["texts"], saved["counts"]
        index.lengths = saved["lengths"].tolist()
    for number, term in enumerate(terms):
        part = slice(int(starts[number]), int(starts[number + 1]))
        index.terms[term] = (texts[part].tolist(), counts[part].tolist())
    return index
