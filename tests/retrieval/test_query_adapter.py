"""What training questions teach an index, and what they must not see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from groupwise.retrieval.documents import Document, RetrievalQuestion
from groupwise.retrieval.embed import unit
from groupwise.retrieval.index_storage import Manifest
from groupwise.retrieval.ranking import (
    SHARPNESS,
    BM25Index,
    adapt_queries,
    contrastive_loss,
    split_questions,
    train_adapter,
)
from groupwise.retrieval.search_index import Index


def test_held_out_questions_take_no_part_and_no_document_is_on_both_sides():
    questions = [RetrievalQuestion(f"q{n}", (f"d{n % 50}",), held_out=n % 7 == 0) for n in range(300)]
    numbers = {f"d{n}": [n] for n in range(49)}  # d49 is not in the index
    learned_from, chosen_by = split_questions(questions, numbers)
    assert learned_from
    assert chosen_by
    assert not any(question.held_out for question in learned_from + chosen_by)
    sides = [{name for question in side for name in question.documents} for side in (learned_from, chosen_by)]
    assert not sides[0] & sides[1]
    assert "d49" not in sides[0] | sides[1]


def test_the_contrast_is_over_the_passages_of_the_whole_batch():
    questions = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    passages = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])  # two candidates of each
    right = torch.tensor([[True, False], [True, False]])
    loss = contrastive_loss(questions, torch.zeros(2, 2), passages, right)
    # Each right passage has score 20; of the three others one has it too.
    expected = np.log(2 + 2 * np.exp(-SHARPNESS))
    assert float(loss) == pytest.approx(expected, abs=1e-5)


def test_a_turn_that_questions_share_is_learned_and_holds_for_others():
    rng = np.random.default_rng(0)
    passages = unit(rng.standard_normal((400, 16)).astype(np.float32))
    rotation, _ = np.linalg.qr(rng.standard_normal((16, 16)))
    asked = unit((passages @ rotation + 0.1 * rng.standard_normal((400, 16))).astype(np.float32))
    words = BM25Index.of([f"w{n}" for n in range(400)])
    questions = [RetrievalQuestion(f"w{n}", (f"d{n}",)) for n in range(300)]
    numbers = {f"d{n}": [n] for n in range(400)}
    matrix = train_adapter(questions, asked[:300], passages, words, numbers)

    def closeness(vectors: np.ndarray) -> float:
        return float((vectors * passages[300:]).sum(1).mean())

    assert closeness(adapt_queries(asked[300:], matrix)) > closeness(asked[300:]) + 0.02


def test_an_index_with_questions_remembers_what_it_learned(tmp_path):
    documents = [Document(f"d{n}", f"Topic{n} is about thing{n % 9} and part{n % 13}.") for n in range(300)]
    questions = [RetrievalQuestion(f"what is topic{n}", (f"d{n}",)) for n in range(300)]
    index = Index.build(tmp_path / "i", documents, Manifest(store="files"), questions=questions)
    assert index.manifest.learned
    assert index.manifest.dense_weight + index.manifest.sparse_weight == pytest.approx(1.0)
    again = Index.open(tmp_path / "i")
    assert again.search("what is topic7") == index.search("what is topic7")
    kept = Index.build(tmp_path / "j", documents, Manifest(store="files"), questions=questions, choose=False)
    assert (kept.manifest.dense_weight, kept.manifest.sparse_weight) == (0.8, 0.2)
