"""Learning from training questions how a question of this corpus is put, and how far to trust each side.

The dense side gets a matrix that turns a question's vector towards the passages that answer such questions,
by a softmax over what it must tell apart: the passages that share its words, and those of the questions
beside it. Passages stay as they are. Weights of the fusion are chosen on questions left out of that.

Axes: Q questions, C candidates of one, D dimensions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from groupwise.retrieval.bm25 import BM25Index
from groupwise.retrieval.documents import RetrievalQuestion
from groupwise.retrieval.embed import Vectors, unit
from groupwise.retrieval.ranking import best

CANDIDATES = 8
EPOCHS, BATCH, RATE, SHARPNESS = 3, 128, 1e-3, 20.0
DECAY = 0.01
"""Of the squared entries, in the loss: what such a matrix learns by heart is worth nothing elsewhere."""
LEFT_OUT_ONE_IN = 10
FEWEST = 200
"""Questions below which nothing is learned."""
GRID = tuple(step / 20 for step in range(1, 20))
"""Dense weights to choose from; the sparse one is the rest to 1."""


def divided(
    questions: Sequence[RetrievalQuestion], numbers: dict[str, list[int]]
) -> tuple[list[RetrievalQuestion], list[RetrievalQuestion]]:
    """Return the questions to learn from and those to choose weights by; held-out ones are in neither.

    No document is on both sides: weights are to be right for pages that nothing was learned from.
    """
    usable = [q for q in questions if not q.held_out and all(name in numbers for name in q.documents)]
    chosen_by = [question for question in usable if is_left_out(question.documents[0])]
    seen = {name for question in chosen_by for name in question.documents}
    return [question for question in usable if seen.isdisjoint(question.documents)], chosen_by


def is_left_out(document: str) -> bool:
    return hashlib.sha256(document.encode()).digest()[0] % LEFT_OUT_ONE_IN == 0


def learn_questions(
    questions: Sequence[RetrievalQuestion],
    questions_QD: Vectors,
    passages_ND: Vectors,
    sparse: BM25Index,
    numbers: dict[str, list[int]],
) -> Vectors:
    """Return the matrix_DD to add to the identity; `numbers` are the passages of each document."""
    import torch

    candidates, right = candidates_of(questions, sparse, numbers)
    asked_QD, stored_ND = torch.from_numpy(questions_QD), torch.from_numpy(passages_ND)
    candidates_QC, right_QC = torch.tensor(candidates), torch.tensor(right)
    size = stored_ND.shape[1]
    matrix_DD = torch.zeros(size, size, requires_grad=True)
    optimizer = torch.optim.AdamW([matrix_DD], lr=RATE, weight_decay=0.0)
    order = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        shuffled_Q = torch.randperm(len(candidates), generator=order)
        for batch in torch.tensor_split(shuffled_Q, -(-len(candidates) // BATCH)):
            loss = contrast(
                asked_QD[batch], matrix_DD, stored_ND[candidates_QC[batch].reshape(-1)], right_QC[batch]
            )
            loss = loss + DECAY * matrix_DD.square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    learned: Vectors = matrix_DD.detach().numpy()
    return learned


def contrast(questions_QD: Any, matrix_DD: Any, passages_PD: Any, right_QC: Any) -> Any:
    """Return the mean of -log of the share that a question's own right passages get in the batch."""
    import torch

    turned_QD = torch.nn.functional.normalize(questions_QD + questions_QD @ matrix_DD, dim=-1)
    scores_QP = SHARPNESS * turned_QD @ passages_PD.T
    count, each = right_QC.shape
    own_QP = (torch.eye(count, dtype=torch.bool)[:, :, None] & right_QC[:, None, :]).view(count, count * each)
    good_Q = scores_QP.masked_fill(~own_QP, -torch.inf).logsumexp(1)
    return (scores_QP.logsumexp(1) - good_Q).mean()


def candidates_of(
    questions: Sequence[RetrievalQuestion], sparse: BM25Index, numbers: dict[str, list[int]]
) -> tuple[list[list[int]], list[list[bool]]]:
    """Return for each question the passages closest in words, a right one first, and which are right."""
    candidates, right = [], []
    for question in questions:
        scores_N = sparse.scores(question.text)
        gold = [number for name in question.documents for number in numbers[name]]
        first = max(gold, key=lambda number: (scores_N[number], -number))
        found = list(dict.fromkeys([first, *best(scores_N, CANDIDATES)[0]]))[:CANDIDATES]
        found += [found[-1]] * (CANDIDATES - len(found))
        candidates.append(found)
        right.append([number in set(gold) for number in found])
    return candidates, right


def turned(vectors_QD: Vectors, matrix_DD: Vectors) -> Vectors:
    moved: Vectors = vectors_QD + vectors_QD @ matrix_DD
    return unit(moved)
