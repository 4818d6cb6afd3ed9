"""GSM8K: word problems whose answer is one number, after worked steps in tags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import lru_cache
from typing import Any

from groupwise.config.checks import finite, one_of
from groupwise.errors import ConfigError
from groupwise.records import Example, Message, Rollout
from groupwise.rewards.numbers import stated_number
from groupwise.rewards.reward_call import RewardFunction
from groupwise.rewards.worked_solution import (
    END,
    END_SOLUTION,
    SOLUTION,
    START,
    TAGS,
    has_tags,
    is_exact,
    solution_of,
    tags_once,
)
from groupwise.tasks.columns import Column, text
from groupwise.tasks.task import Task, same_question
from groupwise.tasks.word_problems import WordProblems

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
class Scores:
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
    scores = Scores(
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
class Reading:
    """What there is to see in a completion, whatever the question."""

    exact: bool
    """Whether it is in the exact format."""
    tags_once: int
    number: Fraction | None
    """The one number that its one solution block states."""


PLAIN = Reading(exact=False, tags_once=0, number=None)
"""What there is to see without any tag: most of what an untrained policy writes."""


@lru_cache(maxsize=4096)
def read(completion: str, question: str = "") -> Reading:
    """Read a completion, once for all rewards; the question's own words may stand beside the number."""
    if not has_tags(completion):
        return PLAIN
    exact = is_exact(completion, least_working=LEAST_WORKING)
    return Reading(
        exact=exact,
        tags_once=len(TAGS) if exact else tags_once(completion),
        number=stated_number(solution_of(completion) or "", question),
    )


def question_of(example: Example) -> str:
    return str(example.get("question") or example.get("problem") or "")


def graded_rewards(scores: Scores) -> dict[str, RewardFunction]:
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


def answer_score(stated: Fraction | None, gold: Fraction, scores: Scores) -> float:
    """Grade a formatted answer by how far off it is, sign included; 0 has no near misses."""
    if stated is None:
        return scores.wrong
    if stated == gold:
        return scores.right
    off = abs(stated / gold - 1) if gold else None
    if off is None or off > FIFTH:
        return scores.wrong
    return scores.within_10 if off <= TENTH else scores.within_20
