"""BM25 over any list of texts, exact under additions and deletions.

A term's postings are the texts that hold it and how often. What depends on the whole corpus, how rare
a term is and how long a text is on average, is applied when a query is answered, so a text that comes
or goes changes its own postings and a few sums, and the scores are those of an index built anew.

score(q, d) = Σ_t idf(t) · tf / (tf + k1 · (1 − b + b · |d| / mean |d|)),  idf = ln(1 + (N − n + ½) / (n + ½))

the form that Lucene uses. Axes: N texts, P postings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from groupwise.retrieval.words import words_of

K1, B = 1.2, 0.75


class SparseIndex:
    """Postings by term; texts are numbered in the order they came."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        """Words of each text; of a removed one, what it had."""
        self.removed: set[int] = set()
        self._terms: dict[str, tuple[list[int], list[int]]] = {}
        self._arrays: dict[str, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}
        """Of terms that were asked for: the same as arrays."""
        self._lengths_N: NDArray[np.float32] = np.zeros(0, np.float32)

    @classmethod
    def of(cls, texts: Iterable[str]) -> SparseIndex:
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
            texts, counted = self._terms.setdefault(term, ([], []))
            texts.append(number)
            counted.append(count)
            self._arrays.pop(term, None)
        self.lengths.append(sum(counts.values()))
        return number

    def remove(self, number: int) -> None:
        """Take a text out; its number is not used again."""
        self.removed.add(number)

    def scores(self, query: str) -> NDArray[np.float32]:
        """Return the score of every text; 0 for one that shares no word with the query."""
        scores_N = np.zeros(len(self.lengths), np.float32)
        norms_N = self._norms()
        gone = len(self.removed)
        for term, weight in Counter(words_of(query)).items():
            posting = self._posting(term)
            if posting is None:
                continue
            texts_P, counts_P = posting
            held = len(texts_P) - (sum(int(n) in self.removed for n in texts_P) if gone else 0)
            rarity = math.log(1 + (len(self.lengths) - gone - held + 0.5) / (held + 0.5))
            scores_N[texts_P] += weight * rarity * counts_P / (counts_P + norms_N[texts_P])
        if gone:
            scores_N[list(self.removed)] = 0.0
        return scores_N

    def search(self, query: str, count: int) -> tuple[list[int], list[float]]:
        """Return the numbers and scores of the best texts that share a word with the query."""
        return best(self.scores(query), count, above=0.0)

    def _norms(self) -> NDArray[np.float32]:
        if len(self._lengths_N) != len(self.lengths):
            self._lengths_N = np.array(self.lengths, np.float32)
        alive = len(self.lengths) - len(self.removed)
        total = float(self._lengths_N.sum()) - sum(self.lengths[n] for n in self.removed)
        mean = total / alive if alive and total else 1.0
        norms_N: NDArray[np.float32] = K1 * (1 - B + B * self._lengths_N / np.float32(mean))
        return norms_N

    def _posting(self, term: str) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
        if term not in self._terms:
            return None
        if term not in self._arrays:
            texts, counts = self._terms[term]
            self._arrays[term] = (np.array(texts, np.int32), np.array(counts, np.float32))
        return self._arrays[term]


def best(
    scores_N: NDArray[np.float32], count: int, *, above: float = -math.inf
) -> tuple[list[int], list[float]]:
    """Return the highest scores and where they are, the lower number first among equals.

    Example: scores [1, 3, 1], 2 of them -> [1, 0], [3.0, 1.0]
    """
    if count < len(scores_N):
        # All that reach the count-th highest score, so that equals at the border are settled by number.
        border = np.partition(scores_N, len(scores_N) - count)[len(scores_N) - count]
        candidates = np.flatnonzero(scores_N >= border)
    else:
        candidates = np.arange(len(scores_N))
    order = candidates[np.argsort(-scores_N[candidates], kind="stable")][:count]
    chosen = [int(number) for number in order if scores_N[number] > above]
    return chosen, [float(scores_N[number]) for number in chosen]
