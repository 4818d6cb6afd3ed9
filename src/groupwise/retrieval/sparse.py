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
        self.terms: dict[str, tuple[list[int], list[int]]] = {}
        """The texts that hold a term, and how often each does."""
        self._weighed: dict[str, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        """Of terms that were asked for, until the corpus changes: texts, and what the term adds to each."""
        self._norms_N: NDArray[np.float32] | None = None

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
            texts, counted = self.terms.setdefault(term, ([], []))
            texts.append(number)
            counted.append(count)
        self.lengths.append(sum(counts.values()))
        self._changed()
        return number

    def remove(self, number: int) -> None:
        """Take a text out; its number is not used again."""
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
        scores_N = self.scores(query)
        sharing = np.flatnonzero(scores_N)
        places, scores = best(scores_N[sharing], count)
        return [int(sharing[place]) for place in places], scores

    def _weigh(self, term: str) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        if term not in self.terms:
            return None
        texts_P, counts_P = (np.array(values) for values in self.terms[term])
        if self.removed:
            there_P = ~np.isin(texts_P, list(self.removed))
            texts_P, counts_P = texts_P[there_P], counts_P[there_P]
        alive = len(self.lengths) - len(self.removed)
        rarity = math.log(1 + (alive - len(texts_P) + 0.5) / (len(texts_P) + 0.5))
        added_P = (rarity * counts_P / (counts_P + self._norms()[texts_P])).astype(np.float32)
        self._weighed[term] = (texts_P, added_P)
        return self._weighed[term]

    def _norms(self) -> NDArray[np.float32]:
        """How much its length counts against each text."""
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
