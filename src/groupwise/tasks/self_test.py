"""Test a task's rewards: on hand-written completions, on gold answers, or on pairs from a file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from groupwise.config.schema import TaskConfig
from groupwise.errors import ConfigError
from groupwise.records import Example, ExampleStream, Group, Rollout, Turn
from groupwise.rewards.extraction import END, END_SOLUTION, END_THINK, SOLUTION, START
from groupwise.rewards.runner import score_group
from groupwise.tasks.examples import Column, load_examples, renamed
from groupwise.tasks.registry import NEEDS_FIRST, TASKS, load_task
from groupwise.tasks.task import Prompt, Task


@dataclass(frozen=True, slots=True)
class Case:
    """A completion, the columns of its example, and the expected reward."""

    completion: str
    columns: Mapping[str, Any]
    expected: float


def puzzle(answer: str, expected: float, *, thinking: str = "1 + 2 is 3.") -> Case:
    text = f"{thinking}</think>\n<answer>{answer}</answer>"
    return Case(text, {"numbers": [1, 2, 8], "target": 24}, expected)


def worked(solution: str, gold: str, expected: float) -> Case:
    text = f"{START}48 + 24 = 72{END}{SOLUTION}{solution}{END_SOLUTION}"
    return Case(text, {"answer": gold}, expected)


def boxed(answer: str, truth: str, expected: float) -> Case:
    return Case(rf"The answer is \boxed{{{answer}}}", {"answer": truth}, expected)


def searched(answer: str, expected: float) -> Case:
    text = f"<think> flute</think>\n<answer> {answer}</answer>"
    return Case(text, {"answer": "flute", "documents": ["Mara Velk"]}, expected)


def summary(text: str, expected: float, *, thinking: str = f"short\n{END_THINK}\n") -> Case:
    return Case(thinking + text, {"text": "…", "answer": "Ada plays the flute."}, expected)


def program(code: str, expected: float, *, fence: str = "python") -> Case:
    tests = ["assert add(20, 22) == 42", "assert add(-1, 1) == 0"]
    columns = {"text": "Write add(a, b).", "tests": tests, "entry_point": "add"}
    return Case(f"```{fence}\n{code}\n```", columns, expected)


CASES: Mapping[str, tuple[Case, ...]] = {
    "code": (
        program("def add(a, b):\n    return a + b", 2.2),  # half the tests would be 0.7
        program("def add(a, b):\n    return abs(a) + abs(b)", 0.7),
        program("def add(a, b):\n    return 41", 0.2),
        program("def add(a, b) return a", 0.0),
        program("import os\nos._exit(0)", 0.2),
        program(
            "class Equal:\n    def __eq__(self, other):\n        return True\n\nadd = lambda a, b: Equal()",
            0.2,
        ),
        program("def add(a, b):\n    return a + b", 0.0, fence="rust"),
        Case("def add(a, b): return a + b", {"tests": ["assert add(1, 1) == 2"]}, 0.0),  # no block
    ),
    "countdown": (
        puzzle("(1 + 2) * 8", 2.0),
        puzzle("8 × (2 + 1) = 24", 2.0),
        puzzle("3 * 8", 1.0),  # wrong numbers
        puzzle("1 + 2 + 8", 1.0),  # wrong target
        puzzle("1 * 2 ** 8", 1.0),  # powers are not allowed
        puzzle("9**9**9", 1.0),
        puzzle("(1 + 2) * 8", 1.0, thinking=""),
        Case("24", {"numbers": [1, 2, 8], "target": 24}, 0.0),
    ),
    "gsm8k": (
        worked("72", "72", 9.5),
        worked("$1,080", "1080", 9.5),
        worked("72.0 clips", "72", 9.5),
        worked("79", "72", 6.5),  # within 10 %
        worked("86", "72", 5.5),  # within 20 %
        worked("-5", "5", 4.5),
        worked("72 or 73", "72", 4.5),
        Case(f"{SOLUTION}72{END_SOLUTION}", {"answer": "72"}, 1.5),
        Case("The answer is 72.", {"answer": "72"}, -2.0),
    ),
    "math": (
        boxed("42", "42", 1.0),
        boxed("3.14", "3.14", 1.0),
        boxed("1/2", "0.5", 1.0),
        boxed(r"x^2+2x+1", "(x+1)^2", 1.0),
        boxed(r"\{2,1\}", r"\{1,2\}", 1.0),
        boxed(r"5\text{ cm}", "5", 1.0),
        boxed("100", "200", -1.0),
        boxed("0.0005", "0", -1.0),
        boxed("1 2", "12", -1.0),
        boxed(r"\sqrt{9**9**9}", "3", -1.0),
        Case("I do not know.", {"answer": "42"}, -1.0),
    ),
    "search_qa": (
        searched("flute", 1.0),  # right, but without a search: MRR and format are 0
        searched("Flute", 1.0),
        searched("harp", 0.0),
        searched("flute</answer><answer> harp", 0.0),
    ),
    "tldr": (
        summary("Ada plays the flute.", 3.8),  # similarity 1 times 4, minus 4 / 20
        summary("ada plays the flute", 3.8),
        summary("", 0.0),
        summary("Ada plays the flute.", -96.0, thinking=""),  # it does not end its thinking
    ),
}


GOLD = "gold"
"""Expected result of a gold answer: any reward that counts as right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A completion and the result of scoring it."""

    completion: str
    truth: str
    predicted: str | None
    reward: float | None
    """None if scoring failed."""
    parts: dict[str, float]
    correct: bool
    seconds: float
    expected: float | str | None = None
    """The expected reward, GOLD, or None for no expectation."""
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
    """Score one completion as in training; `turns` and `state` are for tasks with tools."""
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
    """Return the prompt, or "" if the example lacks the columns for it, as pairs may."""
    try:
        return task.ask(example)
    except ConfigError:
        return ""


def truth_of(task: Task, example: Example) -> str:
    """Return the columns that rewards read, as a string."""
    judging = [name for name, column in task.columns.items() if column.judges] or ["answer"]
    return ", ".join(str(example[name]) for name in judging if name in example)


def check_cases(task: Task, *, seconds: float, cases: Iterable[Case] | None = None) -> list[Check]:
    """Check the hand-written cases of a built-in task; other tasks have none."""
    cases = CASES.get(task.name, ()) if cases is None else cases
    return [
        check(task, case.completion, Example(case.columns), seconds=seconds, expected=case.expected)
        for case in cases
    ]


def check_golds(task: Task, *, count: int, config: TaskConfig) -> list[Check]:
    """Check that the rewards accept the gold answers of the first examples."""
    return [
        check(task, gold_of(task, example), example, seconds=config.reward_seconds, expected=GOLD)
        for example in some_examples(task, count=count, config=config)
    ]


def some_examples(task: Task, *, count: int, config: TaskConfig) -> Iterable[Example]:
    if isinstance(task.examples, ExampleStream):
        return task.examples.held_out(count)
    split = task.split(replace(config, held_out=0), seed=0)
    assert isinstance(split.train, Sequence)
    return islice(split.train, count)


def gold_of(task: Task, example: Example) -> str:
    if task.gold is not None:
        return task.gold(example)
    if "answer" not in example:
        raise ConfigError(
            f"task {task.name} has no gold answers: set gold=…, a function from an example to a right "
            "completion, or add a column `answer` to its examples"
        )
    return str(example["answer"])


def check_pairs(task: Task, source: str, *, config: TaskConfig) -> Iterator[Check]:
    """Score rows of {completion, answer}. Columns that only the prompt reads may be missing."""
    judging = {name: column for name, column in task.columns.items() if column.judges}
    columns = {"completion": Column(read=any_text), **renamed(judging, config.columns, task=task.name)}
    for row in load_examples(source, columns=columns):
        yield check(task, row["completion"], row, seconds=config.reward_seconds)


def any_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {type(value).__name__}")
    return value


def table(checks: Sequence[Check]) -> Iterator[str]:
    """Format checks as a table, one line each."""
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
    """Return the text on one line, with its middle elided if too long: the answer is at the end."""
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    tail = (width - 1) * 2 // 3
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"


class ReportLine(NamedTuple):
    """A line to print; `ok` is False if it reports a failure."""

    text: str
    ok: bool = True


def self_test(
    config: TaskConfig | None, *, pairs: str | None, examples: int, as_json: bool
) -> Iterator[ReportLine]:
    """Test the rewards of one task, or of all built-in tasks."""
    if config is not None and pairs is not None:
        task = load_task(config)
        yield from report(list(check_pairs(task, pairs, config=config)), title=task.name, as_json=as_json)
    elif config is not None:
        yield from check_task(config, examples=examples, as_json=as_json)
    else:
        for name in TASKS:
            if name in NEEDS_FIRST:
                yield ReportLine(f"{name}: skipped; run {NEEDS_FIRST[name]} first")
                continue
            try:
                yield from check_task(TaskConfig(name=name), examples=examples, as_json=as_json)
            except ConfigError as error:  # a missing optional dependency
                yield ReportLine(f"{name}: skipped: {error}", ok=False)


def check_task(config: TaskConfig, *, examples: int, as_json: bool) -> Iterator[ReportLine]:
    task = load_task(config)
    # The cases assume the default scores of a task.
    cases = [] if config.options else check_cases(task, seconds=config.reward_seconds)
    golds = check_golds(task, count=examples, config=config)
    if as_json:
        yield from report([*cases, *golds], title=task.name, as_json=True)
        return
    if cases:
        yield from report(cases, title=task.name, as_json=False)
    rejected = [gold for gold in golds if not gold.passed]
    yield ReportLine(
        f"{task.name}: {len(golds) - len(rejected)} of {len(golds)} gold answers accepted", not rejected
    )
    if rejected:
        yield from (ReportLine(line) for line in table(rejected))
    yield ReportLine("")


def report(checks: Sequence[Check], *, title: str, as_json: bool) -> Iterator[ReportLine]:
    if as_json:
        yield from (
            ReportLine(json.dumps(check.as_json(), ensure_ascii=False), check.passed) for check in checks
        )
        return
    passed = sum(check.passed for check in checks)
    yield ReportLine(f"{title}: {passed} of {len(checks)} as expected", passed == len(checks))
    yield from (ReportLine(line) for line in table(checks))
    yield ReportLine("")
