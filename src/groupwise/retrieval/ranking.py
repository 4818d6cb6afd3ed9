"""Rank chunks: the BM25 index, top-k selection, fusion of dense and sparse rankings, and a query adapter.

The file of a BM25 index holds plain arrays, without pickled objects.

The query adapter is a matrix that maps a query vector towards the passages that answer such questions. It is
trained by a contrastive loss against passages that share words with the question, and against those of the
other questions in the batch. Passage vectors do not change. The fusion weights are chosen on questions that
are left out of the training.

Axes: N chunks, Q queries or questions, D dimensions, C candidates, P postings of one term.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from groupwise.errors import ConfigError
from groupwise.retrieval.documents import RetrievalQuestion, words_of
from groupwise.retrieval.embed import Vectors, unit

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


CANDIDATES = 8
EPOCHS, BATCH, RATE, SHARPNESS = 3, 128, 1e-3, 20.0
DECAY = 0.01
"""Weight of the squared entries in the loss, against overfitting."""
LEFT_OUT_ONE_IN = 10
FEWEST = 200
"""Minimum number of questions for training."""
GRID = tuple(step / 20 for step in range(1, 20))
"""Candidate dense weights; the sparse weight is 1 minus the dense one."""


def split_questions(
    questions: Sequence[RetrievalQuestion], numbers: dict[str, list[int]]
) -> tuple[list[RetrievalQuestion], list[RetrievalQuestion]]:
    """Return the questions to train on and those to choose fusion weights on; held-out ones are in neither.

    No document is on both sides: the weights must suit pages that were not trained on.
    """
    usable = [q for q in questions if not q.held_out and all(name in numbers for name in q.documents)]
    validation = [question for question in usable if is_left_out(question.documents[0])]
    seen = {name for question in validation for name in question.documents}
    return [question for question in usable if seen.isdisjoint(question.documents)], validation


def is_left_out(document: str) -> bool:
    return hashlib.sha256(document.encode()).digest()[0] % LEFT_OUT_ONE_IN == 0


def train_adapter(
    questions: Sequence[RetrievalQuestion],
    questions_QD: Vectors,
    passages_ND: Vectors,
    sparse: BM25Index,
    numbers: dict[str, list[int]],
) -> Vectors:
    """Return the adapter matrix_DD to add to the identity; `numbers` are the passages of each document."""
    import torch

    candidates, right = candidates_of(questions, sparse, numbers)
    queries_QD, stored_ND = torch.from_numpy(questions_QD), torch.from_numpy(passages_ND)
    candidates_QC, right_QC = torch.tensor(candidates), torch.tensor(right)
    size = stored_ND.shape[1]
    matrix_DD = torch.zeros(size, size, requires_grad=True)
    optimizer = torch.optim.AdamW([matrix_DD], lr=RATE, weight_decay=0.0)
    order = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        shuffled_Q = torch.randperm(len(candidates), generator=order)
        for batch in torch.tensor_split(shuffled_Q, -(-len(candidates) // BATCH)):
            loss = contrastive_loss(
                queries_QD[batch], matrix_DD, stored_ND[candidates_QC[batch].reshape(-1)], right_QC[batch]
            )
            loss = loss + DECAY * matrix_DD.square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    learned: Vectors = matrix_DD.detach().numpy()
    return learned


def contrastive_loss(questions_QD: Any, matrix_DD: Any, passages_PD: Any, right_QC: Any) -> Any:
    """Return the contrastive loss: mean -log of the softmax mass on each question's right passages."""
    import torch

    adapted_QD = torch.nn.functional.normalize(questions_QD + questions_QD @ matrix_DD, dim=-1)
    scores_QP = SHARPNESS * adapted_QD @ passages_PD.T
    count, each = right_QC.shape
    own_QP = (torch.eye(count, dtype=torch.bool)[:, :, None] & right_QC[:, None, :]).view(count, count * each)
    good_Q = scores_QP.masked_fill(~own_QP, -torch.inf).logsumexp(1)
    return (scores_QP.logsumexp(1) - good_Q).mean()


def candidates_of(
    questions: Sequence[RetrievalQuestion], sparse: BM25Index, numbers: dict[str, list[int]]
) -> tuple[list[list[int]], list[list[bool]]]:
    """Return the best sparse matches of each question, a right passage first, and which are right."""
    candidates, right = [], []
    for question in questions:
        scores_N = sparse.scores(question.text)
        gold = [number for name in question.documents for number in numbers[name]]
        first = max(gold, key=lambda number: (scores_N[number], -number))
        chosen = list(dict.fromkeys([first, *top_k(scores_N, CANDIDATES)[0]]))[:CANDIDATES]
        chosen += [chosen[-1]] * (CANDIDATES - len(chosen))
        candidates.append(chosen)
        right.append([number in set(gold) for number in chosen])
    return candidates, right


def adapt_queries(vectors_QD: Vectors, matrix_DD: Vectors) -> Vectors:
    adapted: Vectors = vectors_QD + vectors_QD @ matrix_DD
    return unit(adapted)
