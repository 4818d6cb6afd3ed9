"""Train a linear query adapter on the training questions of a corpus.

The adapter is a matrix that maps a query vector towards the passages that answer such questions. It is
trained by a contrastive loss against passages that share words with the question, and against those of the
other questions in the batch. Passage vectors do not change. The fusion weights are chosen on questions that
are left out of the training.

Axes: Q questions, C candidates of one, D dimensions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from groupwise.retrieval.documents import RetrievalQuestion
from groupwise.retrieval.embed import Vectors, unit
from groupwise.retrieval.ranking import BM25Index, top_k

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
