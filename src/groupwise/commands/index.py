"""`groupwise index`: from a pile of pages to something a model can search."""

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

index_app = typer.Typer(help="Build, search and measure a document index.", no_args_is_help=True)

NAMED = 5
"""Documents that are named where there are many."""
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
IndexFolder = Annotated[Path, typer.Argument(metavar="INDEX", help="The folder of an index.")]
Count = Annotated[int, typer.Option("--count", "-n", help="Chunks that a search returns.")]
polite = partial(typer.Option, rich_help_panel="Fetching")
fusing = partial(typer.Option, show_default=False, rich_help_panel="Fusion")
Fusion = Annotated[str | None, fusing(help="weighted, rrf or scores.")]
Weight = Annotated[float | None, fusing(help="Of this side; by default what the index was built with.")]


@index_app.command()
def build(
    output: Annotated[Path, typer.Option(help="Folder of the new index.")] = Path("index"),
    documents: Annotated[
        Path | None, typer.Option(help="A JSONL file of {id, text}; also category, group, synonyms.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Questions, answers and pages: JSONL, Parquet or a Hugging Face name.")
    ] = None,
    embedding: Annotated[str, typer.Option(help="lsa, minilm, or a sentence-transformers model.")] = "lsa",
    store: Annotated[str, typer.Option(help="chroma or files.")] = "chroma",
    budget: Annotated[int, typer.Option(help="Most tokens of a chunk, its context included.")] = 256,
    fusion: Fusion = None,
    dense_weight: Weight = None,
    sparse_weight: Weight = None,
    fetch: Annotated[
        bool, polite("--fetch", help="Index the pages behind the URLs, not the answers.")
    ] = False,
    pages: Annotated[Path, polite(help="Where fetched pages are kept.")] = Path("document_content"),
    skip_existing: Annotated[bool, polite(help="Use pages that are there already.")] = True,
    allow_private: Annotated[
        bool, polite("--allow-private", help="Also fetch from private addresses.")
    ] = False,
    per_host: Annotated[int, polite(help="Requests at one host at a time.")] = 2,
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
    query: Annotated[str, typer.Argument(help="What to look for.")],
    count: Count = 5,
    side: Annotated[str, typer.Option(help="fused, dense or sparse.")] = "fused",
    fusion: Fusion = None,
    dense_weight: Weight = None,
    sparse_weight: Weight = None,
    as_json: AsJson = False,
) -> None:
    """Show the best chunks for a query, with scores and the rank on each side."""
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
        typer.Option(help="A JSONL file of {question, documents}; else the index's held-out ones."),
    ] = None,
    count: Count = 5,
    fusion: Fusion = None,
    dense_weight: Weight = None,
    sparse_weight: Weight = None,
    as_json: AsJson = False,
) -> None:
    """Measure MRR, recall and nDCG of the dense side, the sparse side and both."""
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
    """Refuse what no search could be made with, before anything is read or built."""
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
    """On a terminal, a bar for each kind of thing there is to do, which goes when everything is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        known: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in known:
                known[what] = bars.add_task(what, total=total)
            bars.update(known[what], completed=done)

        yield tell


def build_lines(report: dict[str, Any]) -> Iterator[str]:
    if "pages" in report:
        yield f"{report['pages']['fetched']} pages fetched"
        for problem, count in report["pages"]["failed"].items():
            yield f"  {count} not: {problem}"
    yield (
        f"{report['documents']} documents, {report['chunks']} chunks in {report['index']}, "
        f"{report['seconds']:.1f} s"
    )
    if report["questions"]:
        yield f"{report['questions']} questions, {report['held_out']} of them held out"


def search_lines(report: dict[str, Any]) -> Iterator[str]:
    from groupwise.retrieval.documents import words_of

    wanted = set(words_of(report["query"]))
    for hit in report["results"]:
        sides = f"dense {hit['dense_rank'] or '–'}, sparse {hit['sparse_rank'] or '–'}"
        yield f"{hit['rank']}. {hit['document']}  {hit['score']:.4f}  ({sides})"
        yield f"   {highlighted(' '.join(hit['text'].split())[:400], wanted)}"
    if not report["results"]:
        yield "nothing found"


def highlighted(text: str, wanted: set[str]) -> str:
    """Set the words that were asked for in bold, on a terminal."""
    from groupwise.retrieval.documents import words_of

    if not sys.stdout.isatty():
        return text
    return re.sub(
        r"[^\W_]+", lambda m: f"\033[1m{m[0]}\033[0m" if set(words_of(m[0])) & wanted else m[0], text
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
        yield f"{len(missing)} of the documents asked for are not in the index: {named}"
