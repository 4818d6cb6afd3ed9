"""Medical questions over an index of pages: think, search once, answer from the search results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.config.coerce import between, convert
from groupwise.records import Example, Message
from groupwise.rewards.llm_judge import judged
from groupwise.rewards.text_rewards import (
    cites_well,
    mrr,
    rare_word_f1,
    rarity_of,
    recall,
    rouge_l,
    searches_once,
    shares_words,
    similar,
    thinks_every_turn,
    token_f1,
    unrelated,
)
from groupwise.rollout.tools import ToolResult
from groupwise.tasks.task import Task

if TYPE_CHECKING:
    from groupwise.retrieval.search_index import Hit

SYSTEM = """### Role
You are an assistant that only answers questions about the medical document store.

### Instructions
- Use the search tool once and only once to find what the question needs, then answer from what it returned.
- Plan and reason step by step every time, before using the tool and before giving the response.

### Planning and Reasoning Format
Every response begins with your reasoning between <think> and </think>, then the answer or the tool call."""
PREFILL = "<think>\n"
CLOSE_ENOUGH = 0.3
"""Rarity-weighted F1 with a gold answer from which an answer counts as right."""
LONGEST_ANSWER = 450
"""Number of characters of a gold answer that a worked answer repeats."""
COPIED = 50
"""Number of leading characters of a gold answer that the search results must contain."""
KINDS = {"index": str, "results": int, "shown": int, "think": bool, "judge": str | None, "judge_model": str}
"""Type of each option."""


def medquad(
    *,
    index: str = "index",
    results: int = 3,
    shown: int = 900,
    think: bool = True,
    judge: str | None = None,
    judge_model: str = "gpt-4o-mini",
) -> Task:
    """Answer medical questions by searching an index that `groupwise index build` built from MedQuAD.

    `index`: folder of the index; `results`: chunks per search; `shown`: characters of each chunk in the
    prompt; `think`: open the thinking in each turn; `judge`: base URL of an OpenAI-compatible server that
    grades answers, with the model `judge_model`.
    """
    check_options(
        index=index, results=results, shown=shown, think=think, judge=judge, judge_model=judge_model
    )
    from groupwise.retrieval.index_storage import own_questions
    from groupwise.retrieval.search_index import Index, QueryBatcher

    folder = Path(index).expanduser()
    opened = Index.open(folder)
    train, held_out = ([as_row(q) for q in own_questions(folder, held_out=side)] for side in (False, True))
    search_index = QueryBatcher(lambda queries: opened.search_all(queries, results))

    def search(query: str) -> ToolResult:
        """Search the medical document store.

        query: what to look for
        """
        return as_found(search_index(query), shown=shown)

    baseline = unrelated([row["answers"][0] for row in far_apart(train)], opened.embed)
    rewards: dict[str, Callable[..., Any]] = {
        "close": close_enough([row["answers"][0] for row in train]),
        "mrr": mrr(needed=gold_documents),
        "recall": recall(needed=gold_documents, at=results),
        "f1": shares_words(golds=gold_answers, measure=token_f1),
        "rouge_l": shares_words(golds=gold_answers, measure=rouge_l),
        "similarity": similar(golds=gold_answers, embed=opened.embed, baseline=baseline),
        "format": thinks_every_turn,
        "once": searches_once,
        "citation": cites_well,
    }
    if judge is not None:
        rewards["judge"] = judged(url=judge, model=judge_model, golds=gold_answers)
    return Task(
        name="medquad",
        examples=train,
        held_out=held_out,
        prompt=lambda example: medical_prompt(example, think=think),
        rewards=rewards,
        weights={"close": 0.0, "recall": 0.0, "rouge_l": 0.0, "format": 0.5, "once": 0.5, "citation": 0.0},
        accuracy="close",
        gold=lambda example: f"I know.</think>\n{example['answers'][0]}",
        worked=lambda example, rng: worked_search(example, search, think=think),
        tools=[search],
    )


def check_options(**options: object) -> None:
    """Raise ConfigError for an option of the wrong type, before the index is read."""
    for name, value in options.items():
        read = convert(value, to=KINDS[name], setting=f"task.options.{name}")
        if KINDS[name] is int:
            between(f"task.options.{name}", read, 1)


def far_apart(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every n-th row: adjacent rows come from one page, distant rows are unrelated."""
    return rows[:: max(1, len(rows) // 256)]


def as_found(hits: Sequence[Hit], *, shown: int) -> ToolResult:
    """Format search results: the name of each page and the beginning of the chunk."""
    parts = [f"[{hit.chunk.document}] {hit.chunk.text[:shown]}" for hit in hits]
    return ToolResult("\n\n".join(parts) or "Nothing found.", tuple(hit.chunk.document for hit in hits))


def as_row(question: Any) -> dict[str, Any]:
    return {
        "question": question.text,
        "documents": list(question.documents),
        "answers": list(question.answers),
    }


def medical_prompt(example: Example, *, think: bool) -> list[Message]:
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": example["question"]},
    ]
    return [*messages, {"role": "assistant", "content": PREFILL}] if think else messages


def worked_search(
    example: Example, search: Callable[[str], ToolResult], *, think: bool
) -> list[Message] | None:
    """Return a search for the question, then the beginning of a gold answer that the results contain.

    None if the results contain no gold answer: the policy should answer from what it reads.
    """
    query = example["question"].rstrip("? ")
    read = search(query).text
    answer = next((a for a in map(beginning, example["answers"]) if a[:COPIED] in read), None)
    if answer is None:
        return None
    begun = "" if think else PREFILL  # the prompt opens the thinking of every turn, or the turn itself does
    call = {"function": {"name": "search", "arguments": {"query": query}}}
    return [
        {"role": "assistant", "content": f"{begun}I look for {query}.\n</think>\n", "tool_calls": [call]},
        {"role": "tool", "name": "search", "content": read},
        {"role": "assistant", "content": f"{begun}The documents answer this.\n</think>\n{answer}"},
    ]


def beginning(answer: str) -> str:
    """Return the first sentences of an answer."""
    cut = answer[:LONGEST_ANSWER]
    stop = max(cut.rfind(". "), cut.rfind(".\n"))
    return cut[: stop + 1] if len(answer) > LONGEST_ANSWER and stop > COPIED else cut


def gold_documents(example: Example) -> list[tuple[str, ...]]:
    """Return the pages that carry the question; any one of them suffices."""
    return [tuple(example["documents"])]


def gold_answers(example: Example) -> Sequence[str]:
    answers: Sequence[str] = example["answers"]
    return answers


def close_enough(answers: Sequence[str]) -> Callable[[Any, Example], float]:
    """Make the accuracy reward: 1 for an answer that shares enough rare words with a gold answer, else 0.

    Common words of `answers` count for nothing.
    """
    overlap = shares_words(golds=gold_answers, measure=rare_word_f1(rarity_of(answers)))

    def close(rollout: Any, example: Example) -> float:
        return float(overlap(rollout, example) >= CLOSE_ENOUGH)

    return close
