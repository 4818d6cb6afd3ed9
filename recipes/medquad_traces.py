"""Conversations for the MedQuAD agent to imitate, made from training questions and an index.

    groupwise index build --data medquad.jsonl.gz --store files --output index
    python recipes/medquad_traces.py --index index --output traces.jsonl
    groupwise sft --data traces.jsonl --model smollm2

A trace is a question, a search with some of its words, what the index returns, and the beginning of a right
answer that stands there: the form of a conversation, and to answer from what was read. Words are left out of
the searches at random, so that there is something left to learn.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from groupwise.config.schema import TaskConfig, ToolsConfig
from groupwise.records import Example
from groupwise.retrieval.search_index import Index
from groupwise.rollout.collect import Tools
from groupwise.tasks import Task, load_task
from groupwise.tasks.builtin.medquad import COPIED, PREFILL, as_found, beginning

KEPT = 0.5
"""Share of a question's words in a search."""
ASKED_TOGETHER = 512
"""Searches of traces in one batch."""


def traces(task: Task, index: Index, *, results: int, shown: int, kept: float) -> Iterator[dict[str, Any]]:
    """Demonstrations without end, from training questions, in rows as `groupwise sft` reads them."""
    rng = random.Random("traces")
    tools = Tools.of(task.tools, ToolsConfig())
    assert tools is not None, "the task has a search"
    schemas = tools.toolbox.schemas
    examples = list(task.split(TaskConfig(held_out=0), seed=0).train)  # type: ignore[arg-type]
    while True:
        rng.shuffle(examples)
        for start in range(0, len(examples), ASKED_TOGETHER):
            some = examples[start : start + ASKED_TOGETHER]
            queries = [careless(rng, example["question"], kept=kept) for example in some]
            for example, query, hits in zip(some, queries, index.search_all(queries, results), strict=True):
                read = as_found(hits, shown=shown).text
                answer = next((a for a in map(beginning, example["answers"]) if a[:COPIED] in read), None)
                if answer is not None:
                    yield {"messages": conversation(task, example, query, read, answer), "tools": schemas}


def careless(rng: random.Random, question: str, *, kept: float) -> str:
    """Return some of a question's words, at least one."""
    words = question.rstrip("? ").split()
    return " ".join(word for word in words if rng.random() < kept) or rng.choice(words)


def conversation(task: Task, example: Example, query: str, read: str, answer: str) -> list[dict[str, str]]:
    system, user, _ = task.ask(example)
    call = json.dumps({"name": "search", "arguments": {"query": query}}, ensure_ascii=False)
    asks = f"{PREFILL}I look for {query}.\n</think>\n<tool_call>\n{call}\n</tool_call>"
    answers = f"{PREFILL}The documents answer this.\n</think>\n{answer}"
    return [
        dict(system),
        dict(user),
        {"role": "assistant", "content": asks},
        {"role": "tool", "name": "search", "content": read},
        {"role": "assistant", "content": answers},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--index", required=True)
    parser.add_argument("--output", type=Path, required=True, help="a JSONL file")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--results", type=int, default=3, help="chunks that a search returns")
    parser.add_argument("--shown", type=int, default=700, help="characters of each")
    parser.add_argument("--kept", type=float, default=KEPT, help="share of a question's words in a search")
    options = parser.parse_args()
    task = load_task(TaskConfig(name="medquad", options={"index": options.index}))
    made = traces(
        task, Index.open(Path(options.index)), results=options.results, shown=options.shown, kept=options.kept
    )
    with options.output.open("w", encoding="utf-8") as lines:
        for _ in range(options.count):
            lines.write(json.dumps(next(made), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
