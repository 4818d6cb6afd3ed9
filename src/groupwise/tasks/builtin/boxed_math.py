r"""Math problems with answers in `\boxed{}`: from a dataset with MATH's columns, or generated without end.

Generated problems ask for fractions, roots, pairs and polynomials in simplest form.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import Any

from groupwise.config.coerce import one_of
from groupwise.errors import RolloutError
from groupwise.records import Example, Message, Rollout
from groupwise.rewards.extraction import last_box
from groupwise.rewards.verify import math_verify_process
from groupwise.rewards.verify.latex.equal import same_answer
from groupwise.rewards.verify.latex.latex_lexer import Unfamiliar
from groupwise.rewards.verify.math_answer import (
    LENIENT,
    MathScores,
    Verdict,
    is_restated,
    is_simplest,
    reward_of,
    truth_of,
    verify_boxed,
)
from groupwise.tasks.builtin.gsm8k import between, pick
from groupwise.tasks.examples import question_and_answer, text
from groupwise.tasks.task import Task, question_key

HELD_OUT_ONE_IN = 8


def latex(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    if value.denominator == 1:
        return str(value.numerator)
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def fractions(rng: random.Random) -> tuple[str, str]:
    one, other = (Fraction(between(rng, 1, 9), between(rng, 2, 12)) for _ in range(2))
    return f"Compute ${latex(one)} + {latex(other)}$ in lowest terms.", latex(one + other)


def linear(rng: random.Random) -> tuple[str, str]:
    factor, shift, result = between(rng, 2, 9), between(rng, 1, 30), between(rng, 1, 60)
    question = f"Find $x$ if ${factor}x + {shift} = {result}$."
    return question, latex(Fraction(result - shift, factor))


def surd(rng: random.Random) -> tuple[str, str]:
    outside, inside = between(rng, 2, 9), pick(rng, (2, 3, 5, 6, 7, 10))
    return (
        rf"Write $\sqrt{{{outside * outside * inside}}}$ with the smallest possible number under the root.",
        rf"{outside}\sqrt{{{inside}}}",
    )


def product(rng: random.Random) -> tuple[str, str]:
    one, other = between(rng, 1, 9), between(rng, 1, 9)
    return f"Expand $(x + {one})(x + {other})$.", f"x^2 + {one + other}x + {one * other}"


def midpoint(rng: random.Random) -> tuple[str, str]:
    x1, y1, x2, y2 = (between(rng, -9, 9) for _ in range(4))
    middle = f"({latex(Fraction(x1 + x2, 2))}, {latex(Fraction(y1 + y2, 2))})"
    return f"What is the midpoint of the segment from $({x1}, {y1})$ to $({x2}, {y2})$?", middle


def divisors(rng: random.Random) -> tuple[str, str]:
    number = between(rng, 6, 200)
    return (
        f"What is the greatest divisor of ${number}$ that is smaller than ${number}$?",
        str(number // next(d for d in range(2, number + 1) if number % d == 0)),
    )


def percentage(rng: random.Random) -> tuple[str, str]:
    share, total = 5 * between(rng, 1, 19), 20 * between(rng, 1, 20)
    value = Fraction(share * total, 100)
    return rf"What is ${share}\%$ of ${total}$?", latex(value) if value.denominator > 1 else str(value)


def roots(rng: random.Random) -> tuple[str, str]:
    one, other = between(rng, 1, 9), between(rng, 1, 9)
    answer = str(one) if one == other else f"{min(one, other)}, {max(one, other)}"
    return f"Find every $x$ with $x^2 - {one + other}x + {one * other} = 0$, separated by commas.", answer


KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    fractions, linear, surd, product, midpoint, divisors, percentage, roots,
)  # fmt: skip
SUBJECTS = frozenset(kind.__name__ for kind in KINDS)


@dataclass(frozen=True, slots=True)
class MathProblems:
    """An `ExampleStream` of problems. A hash of the question decides whether it is held out."""

    def train(self, index: int, *, seed: int) -> Example:
        rng = random.Random(f"latex problem {seed} {index}")
        while is_held_out(example := draw(rng)):
            pass
        return example

    def held_out(self, count: int) -> Sequence[Example]:
        rng = random.Random("held-out latex problems")
        problems: dict[str, Example] = {}
        for _ in range(ceil(count * 20 * HELD_OUT_ONE_IN)):
            if len(problems) == count:
                break
            if is_held_out(example := draw(rng)):
                problems[example["question"]] = example
        return list(problems.values())


def draw(rng: random.Random) -> Example:
    make = pick(rng, KINDS)
    question, answer = make(rng)
    return Example({"question": question, "answer": answer, "subject": make.__name__})


def is_generated(example: Example) -> bool:
    """Return whether a problem was generated here and therefore asks for the simplest form."""
    return example.get("subject") in SUBJECTS


def is_held_out(example: Example) -> bool:
    return hashlib.sha256(example["question"].encode()).digest()[0] % HELD_OUT_ONE_IN == 0


SYSTEM = (
    "You are a mathematical reasoning assistant. Solve problems using step-by-step reasoning with clear "
    r"explanations. Always provide your final answer in \boxed{} format."
)
REQUEST = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LONGEST_ANSWER = 500
"""Longest gold answer, in characters. Longer ones are solutions without a box."""
SCORINGS = {"strict": MathScores(), "lenient": LENIENT}


def math(
    *,
    scoring: str = "strict",
    right: float | None = None,
    wrong: float | None = None,
    no_answer: float | None = None,
) -> Task:
    r"""Solve problems with answers in `\boxed{}`: from `--data` with MATH's columns, or generated ones.

    `scoring`: `strict` gives +1 for right, -1 for wrong and -1 for no answer; `lenient` gives -0.5 for no
    answer. `right`, `wrong` and `no_answer` override each score.
    """
    one_of("task.options.scoring", scoring, tuple(SCORINGS))
    math_verify_process.require()
    preset = SCORINGS[scoring]
    scores = MathScores(
        right=preset.right if right is None else right,
        wrong=preset.wrong if wrong is None else wrong,
        no_answer=preset.no_answer if no_answer is None else no_answer,
    )

    def answer(rollout: Rollout, example: Example) -> float:
        return reward_of(judge(rollout, example), scores)

    return Task(
        name="math",
        examples=MathProblems(),
        prompt=math_prompt,
        rewards={"answer": answer, "correct": correct, "boxed": boxed},
        weights={"correct": 0.0, "boxed": 0.0},
        key=question_key,
        accuracy="correct",
        format="boxed",
        columns=question_and_answer(gold_answer),
        predicted=last_box,
        alike=alike,
        difficulty=difficulty,
        gold=lambda example: rf"\boxed{{{example['answer']}}}",
        perfect=scores.right,
    )


def gold_answer(value: Any) -> str:
    """Read the gold answer: plain, in a box, at the end of a solution, or after GSM8K's `####`."""
    whole = text(value)
    answer = truth_of(whole)
    if answer == whole:  # without a box
        answer = whole.rpartition("####")[2].strip() or whole
    if len(answer) > LONGEST_ANSWER:
        raise ValueError(r"expected an answer, or a solution that ends in \boxed{answer}")
    return answer


def difficulty(example: Example) -> str | None:
    """Return the level and the subject, as far as the row has them."""
    named = [str(example[column]) for column in ("level", "subject") if example.get(column) is not None]
    return " ".join(named) or None


def math_prompt(example: Example) -> list[Message]:
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{example['question']}{REQUEST}"},
    ]


def judge(rollout: Rollout, example: Example) -> Verdict:
    """Judge the answer. Raise RolloutError if the comparison fails."""
    question, answer = str(example.get("question", "")), str(example["answer"])
    return judged(rollout.text, answer, question, is_generated(example))


@lru_cache(maxsize=4096)  # two rewards ask for the verdict of the same answer; failures are not kept
def judged(completion: str, answer: str, question: str, simplest: bool) -> Verdict:
    """Judge a completion. An answer that only repeats an expression of the question is wrong.

    `simplest`: the right value in a form that is not the simplest is wrong, too, as in generated problems.
    """
    verdict = verify_boxed(completion, answer)
    if verdict.error is not None:
        raise RolloutError(verdict.error)
    predicted, truth = verdict.predicted, verdict.ground_truth
    if not verdict.correct or not predicted:
        return verdict
    unfinished = is_restated(predicted, question=question, truth=truth)
    if unfinished or (simplest and not is_simplest(predicted)):
        return replace(verdict, correct=False)
    return verdict


def correct(rollout: Rollout, example: Example) -> float:
    return float(judge(rollout, example).correct)


def alike(one: str, other: str) -> bool:
    """Return whether two answers are equal by our own parser, or as text if it cannot read them."""
    try:
        return same_answer(one, other)
    except Unfamiliar:
        return one == other


def boxed(rollout: Rollout, example: Example) -> float:
    """Return 1 for any answer in a box, else 0."""
    return float(verify_boxed(rollout.text, str(example["answer"])).has_answer)
