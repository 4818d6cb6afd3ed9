"""GSM8K word problems, from the dataset or generated without end, with graded or strict rewards.

Every intermediate result of a generated problem is a positive integer.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeVar

from groupwise.config.coerce import finite, one_of
from groupwise.errors import ConfigError
from groupwise.records import Example, Message, Rollout
from groupwise.rewards.extraction import (
    END,
    END_SOLUTION,
    SOLUTION,
    START,
    TAGS,
    has_tags,
    is_exact,
    solution_of,
    stated_number,
    tags_once,
)
from groupwise.rewards.runner import RewardFunction
from groupwise.tasks.examples import question_and_answer, text
from groupwise.tasks.task import Task, question_key

NAMES = ("Ana", "Ben", "Chen", "Dara", "Elif", "Femi", "Gita", "Hugo", "Ines", "Jonas", "Kofi", "Lena")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "tickets")
HELD_OUT_ONE_IN = 8
MAX_DRAWS = 20_000
"""Number of draws without a new held-out problem after which there are assumed to be no more."""

T = TypeVar("T")


@dataclass(slots=True)
class ProblemBuilder:
    """A problem under construction: its sentences, its solution steps and the current total."""

    name: str
    things: str
    sentences: list[str]
    solution: list[str]
    total: int

    def work(self, operator: str, other: int, result: int) -> None:
        self.solution.append(f"{self.total} {operator} {other} = {result}")
        self.total = result


def start(rng: random.Random, largest: int) -> ProblemBuilder:
    name, things = pick(rng, NAMES), pick(rng, THINGS)
    count = between(rng, 2, largest)
    return ProblemBuilder(name, things, [f"{name} has {count} {things}."], [], count)


def gain(problem: ProblemBuilder, rng: random.Random, largest: int) -> None:
    more = between(rng, 2, largest)
    problem.sentences.append(f"{problem.name} gets {more} more from a friend.")
    problem.work("+", more, problem.total + more)


def loss(problem: ProblemBuilder, rng: random.Random, largest: int) -> None:
    fewer = between(rng, 1, min(largest, problem.total - 1))
    problem.sentences.append(f"Then {problem.name} gives {fewer} away.")
    problem.work("-", fewer, problem.total - fewer)


def growth(problem: ProblemBuilder, rng: random.Random, largest: int) -> None:
    times = between(rng, 2, 4)
    problem.sentences.append(f"A week later there are {times} times as many.")
    problem.work("*", times, problem.total * times)


def sharing(problem: ProblemBuilder, rng: random.Random, largest: int) -> None:
    parts = pick(rng, [d for d in range(2, problem.total) if problem.total % d == 0])
    problem.sentences.append(f"{problem.name} puts them into {parts} equal boxes and keeps one of the boxes.")
    problem.work("/", parts, problem.total // parts)


Event = Callable[[ProblemBuilder, random.Random, int], None]


def possible(problem: ProblemBuilder) -> list[Event]:
    """Return the possible next events: every result stays a positive integer."""
    events: list[Event] = [gain]
    if problem.total > 2:
        events.append(loss)
    if problem.total <= 200:
        events.append(growth)
    if any(problem.total % d == 0 for d in range(2, problem.total)):
        events.append(sharing)
    return events


def draw_problem(rng: random.Random, *, steps: int, largest: int) -> Example:
    """Draw a problem with this many steps; the solution ends in `####` and the answer, as in GSM8K."""
    problem = start(rng, largest)
    for _ in range(steps):
        pick(rng, possible(problem))(problem, rng, largest)
    question = f"{' '.join(problem.sentences)} How many {problem.things} does {problem.name} have now?"
    solution = "\n".join([*problem.solution, f"#### {problem.total}"])
    return Example({"question": question, "answer": str(problem.total), "solution": solution})


@dataclass(frozen=True, slots=True, kw_only=True)
class WordProblems:
    """An `ExampleStream` of problems. A hash of the question decides whether it is held out."""

    steps: tuple[int, int]
    largest: int

    def train(self, index: int, *, seed: int) -> Example:
        rng = random.Random(f"word problem {seed} {index}")
        while is_held_out(example := self.draw(rng)):
            pass
        return example

    def held_out(self, count: int) -> Sequence[Example]:
        rng = random.Random("held-out word problems")
        problems: dict[str, Example] = {}
        failed_draws = 0
        while len(problems) < count:
            example = self.draw(rng)
            failed_draws += 1
            if is_held_out(example) and example["question"] not in problems:
                problems[example["question"]] = example
                failed_draws = 0
            if failed_draws > MAX_DRAWS:
                raise ConfigError(
                    f"gsm8k: steps={self.steps} and largest={self.largest} allow only about {len(problems)} "
                    f"held-out problems, not {count}; lower task.held_out, or raise steps or largest"
                )
        return list(problems.values())

    def draw(self, rng: random.Random) -> Example:
        return draw_problem(rng, steps=between(rng, *self.steps), largest=self.largest)


def is_held_out(example: Example) -> bool:
    return hashlib.sha256(example["question"].encode()).digest()[0] % HELD_OUT_ONE_IN == 0


# Python guarantees only `random()` to be reproducible across versions.


def between(rng: random.Random, least: int, most: int) -> int:
    return least + int(rng.random() * (most - least + 1))


def pick(rng: random.Random, choices: Sequence[T]) -> T:
    return choices[int(rng.random() * len(choices))]


SYSTEM = (
    "You are a mathematical reasoning assistant.\n"
    "When given a math problem:\n"
    f"1. Show your step-by-step work between {START} and {END}\n"
    f"2. Provide your final numerical answer between {SOLUTION} and {END_SOLUTION}\n"
    "3. Be precise and show all calculation steps clearly."
)
LEAST_WORKING = 8
"""Minimum number of non-space characters in the working out: `12+3=15.` has eight."""
TENTH, FIFTH = Fraction(1, 10), Fraction(1, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gsm8kScores:
    """Scores of the four rewards."""

    format: float
    """For the exact format."""
    tag: float
    """For each tag that occurs exactly once; minus this for each other tag."""
    right: float
    within_10: float
    """For an answer within 10 % of the right one."""
    within_20: float
    wrong: float
    number: float
    """For the right number in the solution block, regardless of the text around the block."""

    def __post_init__(self) -> None:
        for score in fields(self):
            finite(f"gsm8k: {score.name}", getattr(self, score.name))


def gsm8k(
    *,
    scoring: str = "graded",
    format: float = 3.0,
    tag: float = 0.5,
    right: float = 3.0,
    within_10: float = 1.5,
    within_20: float = 0.5,
    wrong: float = -0.5,
    number: float = 1.5,
    steps: int | Sequence[int] = (2, 4),
    largest: int = 40,
) -> Task:
    """Solve word problems: `--data openai/gsm8k:main`, a file, or generated ones without end.

    `scoring`: `graded` sums four rewards with configurable scores; `strict` gives 1 for a right answer in
    the exact format, else 0. `steps` and `largest` control the generated problems.
    """
    one_of("task.options.scoring", scoring, ("graded", "strict"))
    scores = Gsm8kScores(
        format=format,
        tag=tag,
        right=right,
        within_10=within_10,
        within_20=within_20,
        wrong=wrong,
        number=number,
    )
    strict = scoring == "strict"
    perfect = scores.format + len(TAGS) * scores.tag + scores.right + scores.number
    return Task(
        name="gsm8k",
        examples=WordProblems(steps=step_range(steps), largest=whole("largest", largest, low=4)),
        prompt=gsm8k_prompt,
        rewards=strict_rewards() if strict else graded_rewards(scores),
        # `correct` only measures accuracy; the policy learns from the graded scores.
        weights={"format": 0.0} if strict else {"correct": 0.0},
        key=question_key,
        accuracy="correct",
        format="format",
        columns=question_and_answer(gold_answer),
        predicted=solution_of,
        alike=same_number,
        ends_thinking=END,
        difficulty=difficulty,
        gold=gold_completion,
        perfect=1.0 if strict else perfect,
    )


def step_range(steps: int | Sequence[int]) -> tuple[int, int]:
    match [steps, steps] if isinstance(steps, int) else steps:
        case [int(least), int(most)] if 1 <= least <= most <= 12:
            return least, most
    raise ConfigError(f"gsm8k: steps must be integers from 1 to 12, the smaller first; got {steps!r}")


def whole(option: str, value: object, *, low: int) -> int:
    if isinstance(value, int) and value >= low:
        return value
    raise ConfigError(f"gsm8k: {option} must be an integer of at least {low}; got {value!r}")


def gold_answer(value: Any) -> str:
    """Read the number after `####`, or the whole text."""
    stated = text(value).rpartition("####")[2].strip()
    if stated_number(stated) is None:
        raise ValueError("expected one number, or a solution that ends in `#### number`")
    return stated


def gold_of(example: Example) -> Fraction:
    """Return the gold answer of an example as a number."""
    try:
        return gold_number(text(example["answer"]))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"a gsm8k example requires a number in `answer`: {error.args[0]}") from None


@lru_cache(maxsize=4096)
def gold_number(answer: str) -> Fraction:
    number = stated_number(gold_answer(answer))
    assert number is not None
    return number


def gsm8k_prompt(example: Example) -> list[Message]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": example["question"]}]


def difficulty(example: Example) -> str | None:
    """Return the number of lines of a known solution, without the one with the answer."""
    solution = str(example.get("solution") or example["answer"])
    return f"{solution.strip().count(chr(10))} steps" if "####" in solution else None


def gold_completion(example: Example) -> str:
    """Write the answer in the format that the system prompt requests."""
    working = str(example.get("solution") or f"The answer is {example['answer']}.")
    return f"{START}\n{working}\n{END}\n\n{SOLUTION}\n{example['answer']}\n{END_SOLUTION}"


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """The parts of a completion that the rewards need, independent of the gold answer."""

    exact: bool
    """Whether the completion has the exact format."""
    tags_once: int
    number: Fraction | None
    """The number that the only solution block states."""


PLAIN = ParsedAnswer(exact=False, tags_once=0, number=None)
"""The result for a completion without tags, which is what an untrained policy mostly writes."""


@lru_cache(maxsize=4096)
def read(completion: str, question: str = "") -> ParsedAnswer:
    """Parse a completion, once for all rewards. Words of the question may accompany the number."""
    if not has_tags(completion):
        return PLAIN
    exact = is_exact(completion, least_working=LEAST_WORKING)
    return ParsedAnswer(
        exact=exact,
        tags_once=len(TAGS) if exact else tags_once(completion),
        number=stated_number(solution_of(completion) or "", question),
    )


def question_of(example: Example) -> str:
    return str(example.get("question") or example.get("problem") or "")


def graded_rewards(scores: Gsm8kScores) -> dict[str, RewardFunction]:
    """Make the four graded rewards, and `correct` for accuracy."""

    def format(rollout: Rollout, example: Example) -> float:
        return scores.format if read(rollout.text, question_of(example)).exact else 0.0

    def tags(rollout: Rollout, example: Example) -> float:
        once = read(rollout.text, question_of(example)).tags_once
        return scores.tag * (once - (len(TAGS) - once))

    def answer(rollout: Rollout, example: Example) -> float:
        parsed = read(rollout.text, question_of(example))
        return answer_score(parsed.number, gold_of(example), scores) if parsed.exact else 0.0

    def number(rollout: Rollout, example: Example) -> float:
        return scores.number if is_right(rollout, example) else 0.0

    def correct(rollout: Rollout, example: Example) -> float:
        return float(is_right(rollout, example))

    return named(format, tags, answer, number, correct)


def strict_rewards() -> dict[str, RewardFunction]:
    """Make the reward of 0 or 1, and the format as a metric."""

    def correct(rollout: Rollout, example: Example) -> float:
        return float(read(rollout.text, question_of(example)).exact and is_right(rollout, example))

    def format(rollout: Rollout, example: Example) -> float:
        return float(read(rollout.text, question_of(example)).exact)

    return named(correct, format)


def named(*functions: Callable[[Rollout, Example], float]) -> dict[str, RewardFunction]:
    return {function.__name__: function for function in functions}


def is_right(rollout: Rollout, example: Example) -> bool:
    """Return whether the only solution block states the right number."""
    stated, gold = read(rollout.text, question_of(example)).number, gold_of(example)
    return stated is not None and stated == gold


def same_number(one: str, other: str) -> bool:
    """Return whether two solutions state the same number, or else are the same text."""
    number = stated_number(one)
    return one == other if number is None else number == stated_number(other)


def answer_score(stated: Fraction | None, gold: Fraction, scores: Gsm8kScores) -> float:
    """Grade an answer by its relative error. A gold answer of 0 has no near misses."""
    if stated is None:
        return scores.wrong
    if stated == gold:
        return scores.right
    off = abs(stated / gold - 1) if gold else None
    if off is None or off > FIFTH:
        return scores.wrong
    return scores.within_10 if off <= TENTH else scores.within_20
