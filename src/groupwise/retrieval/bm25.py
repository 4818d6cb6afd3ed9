"""The BM25 index, in memory and on disk. The file holds plain arrays, without pickled objects.

Axes: N texts, P postings of one term.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from groupwise.retrieval.documents import words_of
from groupwise.retrieval.ranking import top_k


def save_postings(path: Path, index: BM25Index) -> None:
    """Write the postings of all terms, concatenated, with the offset of each term."""
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


def load_postings(path: Path) -> BM25Index:
    index = BM25Index()
    with np.load(path, allow_pickle=False) as saved:
        joined = saved["terms"].tobytes().decode()
        terms = joined.split("\n") if joined else []  # a corpus may have no words
        starts, texts, counts = saved["starts"], saved["texts"], saved["counts"]
        index.lengths = saved["lengths"].tolist()
    for number, term in enumerate(terms):
        part = slice(int(starts[number]), int(starts[number + 1]))
        index.terms[term] = (texts[part].tolist(), counts[part].tolist())
    return index


Weighed = tuple[NDArray[np.int64] | slice, NDArray[np.float32]]
"""The texts that contain a term, and what it adds to the score of each."""
K1, B = 1.2, 0.75
COMMON_ONE_IN = 16
"""A term in this share of the texts gets a dense array of scores: a plain sum is faster."""


class BM25Index:
    """Postings by term. Texts are numbered in the order in which they were added."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        """Number of words of each text, including removed ones."""
        self.removed: set[int] = set()
        self.terms: dict[str, tuple[list[int], list[int]]] = {}
        """The texts that contain a term, and its count in each."""
        self._weighed: dict[str, Weighed] = {}
        """Cache of term weights, cleared when the corpus changes."""
        self._norms_N: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, texts: Iterable[str]) -> BM25Index:
        index = cls()
        for text in texts:
            index.add(text)
        return index

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, text: str) -> int:
        """Add a text and return its number."""
        number, counts = len(self.lengths), Counter(words_of(text))
        for term, count in counts.items():
            texts, counted = self.terms.setdefault(term, ([], []))
            texts.append(number)
            counted.append(count)
        self.lengths.append(sum(counts.values()))
        self._changed()
        return number

    def remove(self, number: int) -> None:
        """Remove a text; its number is not reused."""
        self.removed.add(number)
        self._changed()

    def scores(self, query: str) -> NDArray[np.float32]:
        """Return the score of every text; 0 for one that shares no word with the query."""
        scores_N = np.zeros(len(self.lengths), np.float32)
        for term, times in Counter(words_of(query)).items():
            weighed = self._weighed.get(term) or self._weigh(term)
            if weighed is not None:
                texts_P, added_P = weighed
                scores_N[texts_P] += added_P if times == 1 else times * added_P
        return scores_N

    def search(self, query: str, count: int) -> tuple[list[int], list[float]]:
        """Return the numbers and scores of the best texts that share a word with the query."""
        return top_k(self.scores(query), count, above=0.0)

    def _weigh(self, term: str) -> Weighed | None:
        if term not in self.terms:
            return None
        texts_P, counts_P = (np.array(values) for values in self.terms[term])
        if self.removed:
            present_P = ~np.isin(texts_P, list(self.removed))
            texts_P, counts_P = texts_P[present_P], counts_P[present_P]
        alive = len(self.lengths) - len(self.removed)
        rarity = math.log(1 + (alive - len(texts_P) + 0.5) / (len(texts_P) + 0.5))
        added_P = (rarity * counts_P / (counts_P + self._norms()[texts_P])).astype(np.float32)
        if len(texts_P) * COMMON_ONE_IN < len(self.lengths):
            self._weighed[term] = (texts_P, added_P)
        else:
            added_N = np.zeros(len(self.lengths), np.float32)
            added_N[texts_P] = added_P
            self._weighed[term] = (slice(None), added_N)
        return self._weighed[term]

    def _norms(self) -> NDArray[np.float32]:
        """Return the length normalization of each text."""
        if self._norms_N is None:
            alive = len(self.lengths) - len(self.removed)
            total = sum(self.lengths) - sum(self.lengths[number] for number in self.removed)
            mean = total / alive if alive and total else 1.0
            self._norms_N = (K1 * (1 - B + B * np.array(self.lengths) / mean)).astype(np.float32)
        return self._norms_N

    def _changed(self) -> None:
        self._norms_N = None
        if self._weighed:
            self._weighed = {}
