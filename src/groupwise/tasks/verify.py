"""Testing a task's rewards: on cases written by hand, on its own gold answers, and on a user's pairs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from groupwise.config.sections import TaskConfig
from groupwise.errors import ConfigError
from groupwise.records import Example, Group, Rollout, Turn
from groupwise.rewards.score import score_group
from groupwise.tasks.cases import CASES, Case
from groupwise.tasks.columns import Column, renamed
from groupwise.tasks.examples import load_examples
from groupwise.tasks.split import Stream
from groupwise.tasks.task import Prompt, Task

GOLD = "gold"
"""Stands for the reward that is expected of a gold answer: whatever counts as right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A completion and what the rewards made of it."""

    completion: str
    truth: str
    predicted: str | None
    reward: float | None
    """None: it could not be scored."""
    parts: dict[str, float]
    correct: bool
    seconds: float
    expected: float | str | None = None
    """A reward, GOLD, or nothing in particular."""
    error: str | None = None

    @property
    def passed(self) -> bool:
        if self.expected is None:
            return self.error is None
        return self.correct if self.expected == GOLD else self.reward == self.expected

    def as_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {
            "reward": self.reward,
            "parts": self.parts,
            "predicted": self.predicted,
            "correct": self.correct,
            "seconds": round(self.seconds, 6),
        }
        if self.expected is not None:
            record |= {"completion": self.completion, "truth": self.truth, "expected": self.expected}
        return record | ({"error": self.error} if self.error is not None else {})


def check(
    task: Task,
    completion: str,
    example: Example,
    *,
    seconds: float,
    expected: float | str | None = None,
    turns: tuple[Turn, ...] = (),
    state: Any = None,
) -> Check:
    """Score one completion as training would; `turns` and `state` are those of a task with tools."""
    rollout = Rollout(
        prompt=prompt_for(task, example),
        text=completion,
        tokens=(0,),
        trained=(True,),
        logprobs=(0.0,),
        entropies=(0.0,),
        prompt_length=0,
        finish="end",
        turns=turns,
        state=state,
    )
    group = Group(example=example, rollouts=(rollout,))
    started = time.perf_counter()
    (scored,) = score_group(group, rewards=task.rewards, weights=task.weights, seconds=seconds).rollouts
    took = time.perf_counter() - started
    return Check(
        completion=completion,
        truth=truth_of(task, example),
        predicted=task.predicted(completion) if task.predicted else None,
        reward=scored.reward if scored.error is None else None,
        parts=dict(scored.rewards),
        correct=task.is_right(scored),
        seconds=took,
        expected=expected,
        error=scored.error,
    )


def prompt_for(task: Task, example: Example) -> Prompt:
    """Return the prompt; pairs may come without what it asks."""
    try:
        return task.ask(example)
    except ConfigError:
        return ""


def truth_of(task: Task, example: Example) -> str:
    """Return the columns that rewards read, as text."""
    judging = [name for name, column in task.columns.items() if column.judges] or ["answer"]
    return ", ".join(str(example[name]) for name in judging if name in example)


def check_cases(task: Task, *, seconds: float, cases: Iterable[Case] | None = None) -> list[Check]:
    """Check the cases written by hand for a built-in task; there are none for any other."""
    cases = CASES.get(task.name, ()) if cases is None else cases
    return [
        check(task, case.completion, Example(case.columns), seconds=seconds, expected=case.expected)
        for case in cases
    ]


def check_golds(task: Task, *, count: int, config: TaskConfig) -> list[Check]:
    """Check that the rewards accept the gold answers of a task's first examples."""
    return [
        check(task, gold_of(task, example), example, seconds=config.reward_seconds, expected=GOLD)
        for example in some_examples(task, count=count, config=config)
    ]


def some_examples(task: Task, *, count: int, config: TaskConfig) -> Iterable[Example]:
    if isinstance(task.examples, Stream):
        return task.examples.held_out(count)
    split = task.split(replace(config, held_out=0), seed=0)
    assert isinstance(split.train, Sequence)
    return islice(split.train, count)


def gold_of(task: Task, example: Example) -> str:
    if task.gold is not None:
        return task.gold(example)
    if "answer" not in example:
        raise ConfigError(
            f"task {task.name}: give it gold=…, a function from an example to a right completion, "
            "or its examples a column `answer`"
        )
    return str(example["answer"])


def check_pairs(task: Task, source: str, *, config: TaskConfig) -> Iterator[Check]:
    """Score {completion, answer} rows; columns that only the prompt needs may be missing."""
    judging = {name: column for name, column in task.columns.items() if column.judges}
    columns = {"completion": Column(read=any_text), **renamed(judging, config.columns, task=task.name)}
    for row in load_examples(source, columns=columns):
        yield check(task, row["completion"], row, seconds=config.reward_seconds)


def any_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {type(value).__name__}")
    return value


def table(checks: Sequence[Check]) -> Iterator[str]:
    """Write checks for people, one line each."""
    yield f"    {'generated':<46}{'truth':<18}{'predicted':<20}{'reward':>7}{'expected':>10}"
    for one in checks:
        reward = "failed" if one.reward is None else f"{one.reward:g}"
        expected = (
            "" if one.expected is None else "right" if isinstance(one.expected, str) else f"{one.expected:g}"
        )
        yield (
            f"  {'✓' if one.passed else '✗'} {shorten(one.completion, 45):<46}{shorten(one.truth, 17):<18}"
            f"{shorten(one.predicted or '–', 19):<20}{reward:>7}{expected:>10}"
        )
        if one.error is not None:
            yield f"      {one.error}"


def shorten(text: str, width: int) -> str:
    """Return the text on one line, its middle left out where it is too long: the answer is at the end."""
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    tail = (width - 1) * 2 // 3
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"
