"""What the document index finds and how fast: dense, sparse and fused, on held-out questions.

    python benchmarks/retrieval.py --data medquad.jsonl.gz [--embedding lsa] [--store chroma]
    python benchmarks/retrieval.py --data math_train.jsonl.gz --columns id problem solution --embedding minilm

The second form takes other columns of the data for the page, the question and the answer: here the documents
are solutions, and a problem must find its own.

Builds an index in a temporary folder, asks its held-out questions on each side, times batches of them, and
adds and deletes one document. Prints one JSON object; whether a figure is met is said in it, not asserted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from machine import machine

from groupwise.commands.index import build_index
from groupwise.retrieval.documents import Document, located_rows
from groupwise.retrieval.fetch import FetchPolicy
from groupwise.retrieval.index_storage import own_questions
from groupwise.retrieval.search_index import SIDES, Index, measure

ROUNDS = 3
BUILD_SECONDS = 300.0
QUERIES_A_SECOND = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--embedding", default="lsa")
    parser.add_argument("--store", default="chroma")
    parser.add_argument("--columns", nargs=3, default=("doc", "question", "answer"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "index"
        data = arguments.data
        if tuple(arguments.columns) != ("doc", "question", "answer"):
            data = renamed(Path(data), arguments.columns, Path(folder) / "data.jsonl")
        report = build_index(
            output,
            documents=None,
            data=str(data),
            fetch=False,
            pages=Path(folder),
            skip_existing=True,
            policy=FetchPolicy(),
            embedding=arguments.embedding,
            store=arguments.store,
        )
        started = time.perf_counter()
        index = Index.open(output)
        report["open_seconds"] = time.perf_counter() - started
        questions = own_questions(output)
        report["found"] = measure(index, questions)
        report["seed_weights"] = measure(index, questions, dense_weight=0.8, sparse_weight=0.2)["fused"]
        report["chosen"] = [index.manifest.dense_weight, index.manifest.sparse_weight]
        asked = [question.text for question in questions]
        report["speed"] = {side: speed(index, asked, side) for side in SIDES}
        report["one_document"] = one_document(index)
        report["figures"] = figures(report)
        report["machine"] = machine(threads=torch.get_num_threads(), torch=torch.__version__)
    print(json.dumps(report, indent=1))


def renamed(data: Path, columns: Sequence[str], to: Path) -> Path:
    """Write the rows with three of their columns as `doc`, `question` and `answer`."""
    with to.open("w", encoding="utf-8") as file:
        for number, (_, row) in enumerate(located_rows(data)):
            values = [row.get(column, number) for column in columns]
            file.write(json.dumps(dict(zip(("doc", "question", "answer"), values, strict=True))) + "\n")
    return to


def figures(report: dict[str, Any]) -> dict[str, bool]:
    found, sides = report["found"], ("dense", "sparse")
    above = {
        f"fused {name} above both sides": all(found["fused"][name] > found[side][name] for side in sides)
        for name in ("mrr@5", "recall@5")
    }
    return {
        f"built in < {BUILD_SECONDS:g} s": report["seconds"] < BUILD_SECONDS,
        f"≥ {QUERIES_A_SECOND:,} queries/s": report["speed"]["fused"]["queries_per_second"]
        >= QUERIES_A_SECOND,
        **above,
    }


def speed(index: Index, queries: list[str], side: str) -> dict[str, float]:
    """Queries a second in batches, embedding included, and the CPU time of one; the best of a few rounds."""
    times, busy = [], []
    for _ in range(ROUNDS):
        started, worked = time.perf_counter(), time.process_time()
        index.search_all(queries, 5, side=side)
        times.append(time.perf_counter() - started)
        busy.append(time.process_time() - worked)
    return {
        "queries_per_second": round(len(queries) / min(times)),
        "cpu_ms_per_query": round(1000 * min(busy) / len(queries), 3),
    }


def one_document(index: Index) -> dict[str, float]:
    """Seconds to add a document, to find it, and to delete it again."""
    text = "A page about nothing that was there before: the groupwise fever of benchmarks. " * 10
    times = {}
    for name, act in {
        "add": lambda: index.add([Document("new page", text)]),
        "find": lambda: index.search("groupwise fever of benchmarks"),
        "delete": lambda: index.delete(["new page"]),
    }.items():
        started = time.perf_counter()
        act()
        times[name] = round(time.perf_counter() - started, 4)
    return times


if __name__ == "__main__":
    main()
