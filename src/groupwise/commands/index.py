"""`groupwise index`: build, search and evaluate a document index."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.config.coerce import between, finite, one_of
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.retrieval.documents import RetrievalQuestion
    from groupwise.retrieval.fetch import FetchPolicy, FetchResult
    from groupwise.retrieval.search_index import Progress

index_app = typer.Typer(help="Build, search and evaluate a document index.", no_args_is_help=True)

NAMED = 5
"""Maximum number of missing documents to list by name."""
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON.")]
IndexFolder = Annotated[Path, typer.Argument(metavar="INDEX", help="Folder of the index.")]
Count = Annotated[int, typer.Option("--count", "-n", help="Number of chunks to return per search.")]
fetch_option = partial(typer.Option, rich_help_panel="Fetching")
fusion_option = partial(typer.Option, show_default=False, rich_help_panel="Fusion")
Fusion = Annotated[
    str | None, fusion_option(help="How to combine dense and sparse results: weighted, rrf or scores.")
]
Weight = Annotated[
    float | None, fusion_option(help="Weight in the fusion; by default, chosen when the index is built.")
]


@index_app.command()
def build(
    output: Annotated[Path, typer.Option(help="Folder of the new index.")] = Path("index"),
    documents: Annotated[
        Path | None,
        typer.Option(help="JSONL file with rows {id, text}; optional: category, group, synonyms."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Questions, answers and URLs: JSONL, Parquet or a Hugging Face dataset."),
    ] = None,
    embedding: Annotated[
        str, typer.Option(help="Embedding: lsa, minilm, or a sentence-transformers model.")
    ] = "lsa",
    store: Annotated[str, typer.Option(help="Vector store: chroma or files.")] = "chroma",
    budget: Annotated[
        int,
        typer.Option(help="Maximum tokens per chunk, including its line of context (category, group, …)."),
    ] = 256,
    fusion: Fusion = None,
    dense_weight: Weight = None,
    sparse_weight: Weight = None,
    fetch: Annotated[
        bool, fetch_option("--fetch", help="Fetch and index the pages at the URLs instead of the answers.")
    ] = False,
    pages: Annotated[Path, fetch_option(help="Cache folder for fetched pages.")] = Path("document_content"),
    skip_existing: Annotated[bool, fetch_option(help="Use cached pages instead of fetching again.")] = True,
    allow_private: Annotated[
        bool,
        fetch_option(
            "--allow-private",
            help="Allow fetching from private IP addresses, such as those of your own network.",
        ),
    ] = False,
    per_host: Annotated[int, fetch_option(help="Maximum concurrent requests per host.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Chunk, embed and store documents."""
    between("--budget", budget, 32)
    between("--per-host", per_host, 1)
    check_fusion(fusion, dense_weight, sparse_weight)
    from groupwise.retrieval.fetch import FetchPolicy

    with progress_bars() as progress:
        report = build_index(
            output,
            documents=documents,
            data=data,
            fetch=fetch,
            pages=pages,
            skip_existing=skip_existing,
            policy=FetchPolicy(allow_private=allow_private, per_host=per_host),
            progress=progress,
            embedding=embedding,
            store=store,
            budget=budget,
            fusion=fusion,
            dense_weight=dense_weight,
            sparse_weight=sparse_weight,
        )
    show(report, as_json, build_lines)


@index_app.command()
def search(
    index: IndexFolder,
    query: Annotated[str, typer.Argument(help="Search query.")],
    count: Count = 5,
    side: Annotated[str, typer.Option(help="Retriever: fused, dense or sparse.")] = "fused",
    fusion: Fusion = None,
    dense_weight: Weight = None,
    sparse_weight: Weight = None,
    as_json: AsJson = False,
) -> None:
    """Show the best chunks for a query, with scores and dense and sparse ranks."""
    between("--count", count, 1)
    check_fusion(fusion, dense_weight, sparse_weight)
    one_of("--side", side, ("fused", "dense", "sparse"))
    report = query_index(
        index,
        query,
        count=count,
        side=side,
        fusion=fusion,
        dense_weight=dense_weight,
        sparse_weight=sparse_weight,
    )
    show(report, as_json, search_lines)


@index_app.command(name="eval")
def evaluate(
    index: IndexFolder,
    questions: Annotated[
        Path | None,
        typer.Option(
            help="JSONL file with rows {question, documents}; by default, the index's held-out questions."
        ),
    ] = None,
    count: Count = 5,
    fusion: Fusion = None,
    dense_weight: Weight = None,
    sparse_weight: Weight = None,
    as_json: AsJson = False,
) -> None:
    """Measure MRR, recall and nDCG of dense, sparse and fused retrieval."""
    between("--count", count, 1)
    check_fusion(fusion, dense_weight, sparse_weight)
    report = measure_index(
        index,
        questions=questions,
        count=count,
        fusion=fusion,
        dense_weight=dense_weight,
        sparse_weight=sparse_weight,
    )
    show(report, as_json, measure_lines)


def build_index(
    output: Path,
    *,
    documents: Path | None,
    data: str | None,
    fetch: bool,
    pages: Path,
    skip_existing: bool,
    policy: FetchPolicy,
    progress: Progress | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Build an index of documents, or of the answers or pages of a question-answer dataset.

    Return a report of what was built, as `query_index` and `measure_index` do.
    """
    from groupwise.retrieval.documents import read_documents, read_qa_set
    from groupwise.retrieval.embed import LSA
    from groupwise.retrieval.index_storage import (
        OFFLINE_WEIGHTS,
        WEIGHTS,
        Manifest,
        check_new,
        write_questions,
    )
    from groupwise.retrieval.search_index import Index, silent

    if (documents is None) == (data is None):
        raise ConfigError("give either --documents FILE.jsonl or --data with a question-answer dataset")
    check_new(output)
    progress = progress or silent
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
            result = fetch_rows(path, pages, policy, skip_existing=skip_existing, progress=progress)
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


def fetch_rows(
    path: Path, pages: Path, policy: FetchPolicy, *, skip_existing: bool, progress: Progress
) -> FetchResult:
    """Fetch the pages at the URLs of a dataset's rows that have an answer."""
    from groupwise.retrieval.documents import read_rows, url_of
    from groupwise.retrieval.fetch import PageCache, fetch_pages

    urls = [url for row in read_rows(path) if row.get("answer") and (url := url_of(row))]
    on_page = partial(progress, "pages")
    result = fetch_pages(urls, PageCache(pages), policy, skip_existing=skip_existing, on_page=on_page)
    result.check()
    return result


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


def query_index(index: Path, query: str, *, count: int, **weights: Any) -> dict[str, Any]:
    from groupwise.retrieval.search_index import Index

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


def measure_index(index: Path, *, questions: Path | None, count: int, **weights: Any) -> dict[str, Any]:
    from groupwise.retrieval.documents import read_questions
    from groupwise.retrieval.index_storage import own_questions
    from groupwise.retrieval.search_index import Index, measure

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


def check_fusion(fusion: str | None, dense_weight: float | None, sparse_weight: float | None) -> None:
    """Validate the fusion options before anything is read or built."""
    from groupwise.retrieval.ranking import FUSIONS

    if fusion is not None:
        one_of("--fusion", fusion, tuple(FUSIONS))
    for option, weight in (("--dense-weight", dense_weight), ("--sparse-weight", sparse_weight)):
        if weight is not None:
            finite(option, weight)
            between(option, weight, 0)


def show(report: dict[str, Any], as_json: bool, lines: Any) -> None:
    for line in [json.dumps(report, ensure_ascii=False)] if as_json else lines(report):
        print(line)


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Show a progress bar for each stage, on a terminal only; the bars disappear at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task_ids: dict[str, Any] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in task_ids:
                task_ids[stage] = bars.add_task(stage, total=total)
            bars.update(task_ids[stage], completed=done)

        yield update


def build_lines(report: dict[str, Any]) -> Iterator[str]:
    if "pages" in report:
        yield f"{report['pages']['fetched']} pages fetched"
        for problem, count in report["pages"]["failed"].items():
            yield f"  {count} failed: {problem}"
    yield (
        f"{report['documents']} documents, {report['chunks']} chunks in {report['index']}, "
        f"{report['seconds']:.1f} s"
    )
    if report["questions"]:
        yield f"{report['questions']} questions, {report['held_out']} of them held out"


def search_lines(report: dict[str, Any]) -> Iterator[str]:
    from groupwise.retrieval.documents import words_of

    query_words = set(words_of(report["query"]))
    for hit in report["results"]:
        sides = f"dense {hit['dense_rank'] or '–'}, sparse {hit['sparse_rank'] or '–'}"
        yield f"{hit['rank']}. {hit['document']}  {hit['score']:.4f}  ({sides})"
        yield f"   {highlighted(' '.join(hit['text'].split())[:400], query_words)}"
    if not report["results"]:
        yield "no results"


def highlighted(text: str, query_words: set[str]) -> str:
    """Print the words of the query in bold, on a terminal."""
    from groupwise.retrieval.documents import words_of

    if not sys.stdout.isatty():
        return text
    return re.sub(
        r"[^\W_]+", lambda m: f"\033[1m{m[0]}\033[0m" if set(words_of(m[0])) & query_words else m[0], text
    )


def measure_lines(report: dict[str, Any]) -> Iterator[str]:
    names = list(report["fused"])
    yield f"{report['questions']} questions" + "".join(f"{name:>12}" for name in names)
    for side in ("dense", "sparse", "fused"):
        yield f"  {side:<{len(str(report['questions'])) + 8}}" + "".join(
            f"{report[side][name]:>12.4f}" for name in names
        )
    if missing := report["missing"]:
        named = ", ".join(missing[:NAMED]) + (", …" if len(missing) > NAMED else "")
        yield f"{len(missing)} of the expected documents are not in the index: {named}"
