"""`groupwise index`: build, search and evaluate a document index."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.config.coerce import between, finite, one_of

if TYPE_CHECKING:
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
    budget: Annotated[int, typer.Option(help="Maximum tokens per chunk, including its context.")] = 256,
    fusion: Fusion = None,
    dense_weight: Weight = None,
    sparse_weight: Weight = None,
    fetch: Annotated[
        bool, fetch_option("--fetch", help="Fetch and index the pages at the URLs instead of the answers.")
    ] = False,
    pages: Annotated[Path, fetch_option(help="Cache folder for fetched pages.")] = Path("document_content"),
    skip_existing: Annotated[bool, fetch_option(help="Use cached pages instead of fetching again.")] = True,
    allow_private: Annotated[
        bool, fetch_option("--allow-private", help="Allow fetching from private IP addresses.")
    ] = False,
    per_host: Annotated[int, fetch_option(help="Maximum concurrent requests per host.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Chunk, embed and store documents."""
    between("--budget", budget, 32)
    between("--per-host", per_host, 1)
    check_fusion(fusion, dense_weight, sparse_weight)
    from groupwise.commands import index_actions
    from groupwise.retrieval.fetch import FetchPolicy

    with progress_bars() as progress:
        report = index_actions.build(
            output,
            documents=documents,
            data=data,
            fetch=fetch,
            pages=pages,
            skip_existing=skip_existing,
            manners=FetchPolicy(allow_private=allow_private, per_host=per_host),
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
    from groupwise.commands import index_actions

    one_of("--side", side, ("fused", "dense", "sparse"))
    report = index_actions.search(
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
    from groupwise.commands import index_actions

    report = index_actions.evaluate(
        index,
        questions=questions,
        count=count,
        fusion=fusion,
        dense_weight=dense_weight,
        sparse_weight=sparse_weight,
    )
    show(report, as_json, measure_lines)


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
