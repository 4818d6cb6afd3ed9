"""Build, search and evaluate an index. Each function returns a report, which `groupwise index` prints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError
from groupwise.retrieval.documents import (
    RetrievalQuestion,
    read_documents,
    read_qa_set,
    read_questions,
    read_rows,
    url_of,
)
from groupwise.retrieval.embed import LSA
from groupwise.retrieval.fetch import FetchPolicy, PageCache, fetch_pages
from groupwise.retrieval.index_storage import (
    OFFLINE_WEIGHTS,
    WEIGHTS,
    Manifest,
    check_new,
    own_questions,
    write_questions,
)
from groupwise.retrieval.search_index import Index, Progress, measure, silent

HUB_SET = "lavita/MedQuAD"


def build(
    output: Path,
    *,
    documents: Path | None,
    data: str | None,
    fetch: bool,
    pages: Path,
    skip_existing: bool,
    manners: FetchPolicy,
    progress: Progress = silent,
    **settings: Any,
) -> dict[str, Any]:
    """Build an index of documents, or of the answers or pages of a question-answer dataset."""
    if (documents is None) == (data is None):
        raise ConfigError("give either --documents FILE.jsonl or --data with a question-answer dataset")
    check_new(output)
    started = time.perf_counter()
    chosen = {name: value for name, value in settings.items() if value is not None}
    dense, sparse = OFFLINE_WEIGHTS if chosen.get("embedding", LSA) == LSA else WEIGHTS
    manifest = Manifest(
        **{"dense_weight": dense, "sparse_weight": sparse, **chosen, "source": str(documents or data)}
    )
    report: dict[str, Any] = {"index": str(output)}
    questions: tuple[RetrievalQuestion, ...] = ()
    if documents is not None:
        contents = read_documents(documents)
    else:
        path = local_rows(str(data))
        texts: Mapping[str, str] | None = None
        if fetch:
            urls = [url for row in read_rows(path) if row.get("answer") and (url := url_of(row))]
            result = fetch_pages(
                urls,
                PageCache(pages),
                manners,
                skip_existing=skip_existing,
                on_page=partial(progress, "pages"),
            )
            result.check()
            report["pages"], texts = result.summary(), result.texts
        qa_set = read_qa_set(path, pages=texts)
        contents, questions = list(qa_set.documents), qa_set.questions
    index = Index.build(
        output,
        contents,
        manifest,
        questions=questions,
        choose=not {"dense_weight", "sparse_weight"} & chosen.keys(),
        progress=progress,
    )
    questions = index.following(questions)
    if questions:
        write_questions(output / "questions.jsonl", questions)
    return report | {
        "documents": len(index.documents),
        "chunks": len(index),
        "questions": len(questions),
        "held_out": sum(question.held_out for question in questions),
        "seconds": round(time.perf_counter() - started, 2),
    }


def local_rows(data: str) -> Path:
    """Return the path of a local data file; a Hugging Face dataset is downloaded into one."""
    path = Path(data).expanduser()
    if path.suffix in (".jsonl", ".gz", ".parquet") or path.exists():
        return path
    import tempfile

    import datasets

    try:
        rows = datasets.load_dataset(data, split="train")
    except Exception as error:
        raise ConfigError(
            f"--data {data} is not a file, and loading it as a Hugging Face dataset failed: {error}"
        ) from error
    path = Path(tempfile.mkdtemp()) / "rows.parquet"
    rows.to_parquet(path)
    return path


def search(index: Path, query: str, *, count: int, **weights: Any) -> dict[str, Any]:
    hits = Index.open(index).search(query, count, **without_none(weights))
    return {
        "query": query,
        "results": [
            {
                "rank": rank,
                "document": hit.chunk.document,
                "chunk": hit.chunk.id,
                "score": round(hit.score, 6),
                "dense_rank": hit.dense_rank,
                "sparse_rank": hit.sparse_rank,
                "text": hit.chunk.text,
            }
            for rank, hit in enumerate(hits, start=1)
        ],
    }


def evaluate(index: Path, *, questions: Path | None, count: int, **weights: Any) -> dict[str, Any]:
    opened = Index.open(index)
    if questions is not None:
        queries = list(opened.following(read_questions(questions)))
    else:
        queries = own_questions(index, instead=", or pass questions with --questions FILE.jsonl")
    if not queries:
        raise ConfigError(f"{questions or index} has no questions; pass some with --questions FILE.jsonl")
    expected = dict.fromkeys(name for question in queries for name in question.documents)
    indexed = set(opened.documents)
    started = time.perf_counter()
    report = measure(opened, queries, count=count, **without_none(weights))
    return report | {
        "index": str(index),
        "missing": [name for name in expected if name not in indexed],
        "seconds": round(time.perf_counter() - started, 2),
    }


def without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
