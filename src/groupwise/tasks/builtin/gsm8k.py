"""Word problems without end: short stories whose answer is worked out in whole, positive steps."""

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
from groupwise.tasks.examples import Column, text
from groupwise.tasks.task import Task, same_question

NAMES = ("Ana", "Ben", "Chen", "Dara", "Elif", "Femi", "Gita", "Hugo", "Ines", "Jonas", "Kofi", "Lena")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "tickets")
HELD_OUT_ONE_IN = 8
MAX_DRAWS = 20_000
"""Draws without a new held-out problem after which there are taken to be no more."""

T = TypeVar("T")


@dataclass(slots=True)
class ProblemBuilder:
    """A problem as it grows: what was told, what was worked out, how many there are now."""

    name: str
    things: str
    told: list[str]
    worked: list[str]
    total: int

    def work(self, operator: str, other: int, result: int) -> None:
        self.worked.append(f"{self.total} {operator} {other} = {result}")
        self.total = result


def start(rng: random.Random, largest: int) -> ProblemBuilder:
    name, things = pick(rng, NAMES), pick(rng, THINGS)
    count = between(rng, 2, largest)
    return ProblemBuilder(name, things, [f"{name} has {count} {things}."], [], count)


def gain(story: ProblemBuilder, rng: random.Random, largest: int) -> None:
    more = between(rng, 2, largest)
    story.told.append(f"{story.name} gets {more} more from a friend.")
    story.work("+", more, story.total + more)


def loss(story: ProblemBuilder, rng: random.Random, largest: int) -> None:
    fewer = between(rng, 1, min(largest, story.total - 1))
    story.told.append(f"Then {story.name} gives {fewer} away.")
    story.work("-", fewer, story.total - fewer)


def growth(story: ProblemBuilder, rng: random.Random, largest: int) -> None:
    times = between(rng, 2, 4)
    story.told.append(f"A week later there are {times} times as many.")
    story.work("*", times, story.total * times)


def sharing(story: ProblemBuilder, rng: random.Random, largest: int) -> None:
    parts = pick(rng, [d for d in range(2, story.total) if story.total % d == 0])
    story.told.append(f"{story.name} puts them into {parts} equal boxes and keeps one of the boxes.")
    story.work("/", parts, story.total // parts)


Event = Callable[[ProblemBuilder, random.Random, int], None]


def possible(story: ProblemBuilder) -> list[Event]:
    """Return what may happen next: every result stays a whole number above 0."""
    events: list[Event] = [gain]
    if story.total > 2:
        events.append(loss)
    if story.total <= 200:
        events.append(growth)
    if any(story.total % d == 0 for d in range(2, story.total)):
        events.append(sharing)
    return events


def draw_problem(rng: random.Random, *, steps: int, largest: int) -> Example:
    """Draw a story of so many steps; the solution is written as GSM8K writes it, with `####`."""
    story = start(rng, largest)
    for _ in range(steps):
        pick(rng, possible(story))(story, rng, largest)
    question = f"{' '.join(story.told)} How many {story.things} does {story.name} have now?"
    solution = "\n".join([*story.worked, f"#### {story.total}"])
    return Example({"question": question, "answer": str(story.total), "solution": solution})


@dataclass(frozen=True, slots=True, kw_only=True)
class WordProblems:
    """A `Stream` of problems; which side one is on is decided by its text."""

    steps: tuple[int, int]
    largest: int

    def train(self, index: int, *, seed: int) -> Example:
        rng = random.Random(f"word problem {seed} {index}")
        while is_held_out(example := self.draw(rng)):
            pass
        return example

    def held_out(self, count: int) -> Sequence[Example]:
        rng = random.Random("held-out word problems")
        found: dict[str, Example] = {}
        in_vain = 0
        while len(found) < count:
            example = self.draw(rng)
            in_vain += 1
            if is_held_out(example) and example["question"] not in found:
                found[example["question"]] = example
                in_vain = 0
            if in_vain > MAX_DRAWS:
                raise ConfigError(
                    f"gsm8k: steps={self.steps} and largest={self.largest} make about {len(found)} held-out "
                    f"problems, not {count}; lower task.held_out, or raise steps or largest"
                )
        return list(found.values())

    def draw(self, rng: random.Random) -> Example:
        return draw_problem(rng, steps=between(rng, *self.steps), largest=self.largest)


def is_held_out(example: Example) -> bool:
    return hashlib.sha256(example["question"].encode()).digest()[0] % HELD_OUT_ONE_IN == 0


# Only `random()` is promised to stay the same from one Python version to the next.


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
"""Characters, besides spaces, below which nothing was worked out: `12+3=15.` has eight."""
TENTH, FIFTH = Fraction(1, 10), Fraction(1, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gsm8kScores:
    """What each of the four rewards pays."""

    format: float
    """The exact format."""
    tag: float
    """Each tag that stands exactly once, and minus this for each that does not."""
    right: float
    within_10: float
    """An answer less than 10 % off; 0 leaves only right and wrong."""
    within_20: float
    wrong: float
    number: float
    """The right number in the solution block, whatever stands around the block."""

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
    """Word problems: `--data openai/gsm8k:main`, a file, or generated ones without end.

    `scoring`: `graded` sums four rewards, each with a score of its own; `strict` pays 1 for a right answer in
    the exact format, else 0. `steps` and `largest` shape the generated problems.
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
        # Accuracy is read from `correct` alone; the graded scores are what is learned from.
        weights={"format": 0.0} if strict else {"correct": 0.0},
        key=same_question,
        accuracy="correct",
        format="format",
        columns={
            "question": Column(read=text, names=("question", "problem"), judges=False),
            "answer": Column(read=gold_answer, names=("answer", "ground_truth", "solution")),
        },
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
    raise ConfigError(f"gsm8k: steps must be whole numbers from 1 to 12, the smaller first; got {steps!r}")


def whole(option: str, value: object, *, low: int) -> int:
    if isinstance(value, int) and value >= low:
        return value
    raise ConfigError(f"gsm8k: {option} must be a whole number of at least {low}; got {value!r}")


def gold_answer(value: Any) -> str:
    """Read the number after `####`, or the whole text."""
    stated = text(value).rpartition("####")[2].strip()
    if stated_number(stated) is None:
        raise ValueError("expected one number, or a solution that ends in `#### number`")
    return stated


def gold_of(example: Example) -> Fraction:
    """Return the number that is right for an example."""
    try:
        return gold_number(text(example["answer"]))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"a gsm8k example needs a number in `answer`: {error.args[0]}") from None


@lru_cache(maxsize=4096)
def gold_number(answer: str) -> Fraction:
    number = stated_number(gold_answer(answer))
    assert number is not None
    return number


def gsm8k_prompt(example: Example) -> list[Message]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": example["question"]}]


def difficulty(example: Example) -> str | None:
    """How many lines a known solution has, less the one with the answer."""
    solution = str(example.get("solution") or example["answer"])
    return f"{solution.strip().count(chr(10))} steps" if "####" in solution else None


def gold_completion(example: Example) -> str:
    """Write the answer as the system prompt asks for it."""
    working = str(example.get("solution") or f"The answer is {example['answer']}.")
    return f"{START}\n{working}\n{END}\n\n{SOLUTION}\n{example['answer']}\n{END_SOLUTION}"


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """What there is to see in a completion, whatever the question."""

    exact: bool
    """Whether it is in the exact format."""
    tags_once: int
    number: Fraction | None
    """The one number that its one solution block states."""


PLAIN = ParsedAnswer(exact=False, tags_once=0, number=None)
"""What there is to see without any tag: most of what an untrained policy writes."""


@lru_cache(maxsize=4096)
def read(completion: str, question: str = "") -> ParsedAnswer:
    """Read a completion, once for all rewards; the question's own words may stand beside the number."""
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
    """Make the four rewards and the verdict beside them."""

    def format(rollout: Rollout, example: Example) -> float:
        return scores.format if read(rollout.text, question_of(example)).exact else 0.0

    def tags(rollout: Rollout, example: Example) -> float:
        once = read(rollout.text, question_of(example)).tags_once
        return scores.tag * (once - (len(TAGS) - once))

    def answer(rollout: Rollout, example: Example) -> float:
        found = read(rollout.text, question_of(example))
        return answer_score(found.number, gold_of(example), scores) if found.exact else 0.0

    def number(rollout: Rollout, example: Example) -> float:
        return scores.number if is_right(rollout, example) else 0.0

    def correct(rollout: Rollout, example: Example) -> float:
        return float(is_right(rollout, example))

    return named(format, tags, answer, number, correct)


def strict_rewards() -> dict[str, RewardFunction]:
    """Make the one reward of 0 or 1, and the format as a mere metric."""

    def correct(rollout: Rollout, example: Example) -> float:
        return float(read(rollout.text, question_of(example)).exact and is_right(rollout, example))

    def format(rollout: Rollout, example: Example) -> float:
        return float(read(rollout.text, question_of(example)).exact)

    return named(correct, format)


def named(*functions: Callable[[Rollout, Example], float]) -> dict[str, RewardFunction]:
    return {function.__name__: function for function in functions}


def is_right(rollout: Rollout, example: Example) -> bool:
    """Tell whether the one solution block states the one right number."""
    stated, gold = read(rollout.text, question_of(example)).number, gold_of(example)
    return stated is not None and stated == gold


def same_number(one: str, other: str) -> bool:
    """Tell whether two solutions state the same number, or the same text without one."""
    number = stated_number(one)
    return one == other if number is None else number == stated_number(other)


def answer_score(stated: Fraction | None, gold: Fraction, scores: Gsm8kScores) -> float:
    """Grade a formatted answer by how far off it is, sign included; 0 has no near misses."""
    if stated is None:
        return scores.wrong
    if stated == gold:
        return scores.right
    off = abs(stated / gold - 1) if gold else None
    if off is None or off > FIFTH:
        return scores.wrong
    return scores.within_10 if off <= TENTH else scores.within_20
