r"""Short problems without end whose answers are written in LaTeX: fractions, roots, pairs, polynomials."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from groupwise.records import Example
from groupwise.tasks.word_problems import between, pick

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
class LatexProblems:
    """A `Stream` of problems; which side one is on is decided by its text."""

    def train(self, index: int, *, seed: int) -> Example:
        rng = random.Random(f"latex problem {seed} {index}")
        while is_held_out(example := draw(rng)):
            pass
        return example

    def held_out(self, count: int) -> Sequence[Example]:
        rng = random.Random("held-out latex problems")
        found: dict[str, Example] = {}
        for _ in range(ceil(count * 20 * HELD_OUT_ONE_IN)):
            if len(found) == count:
                break
            if is_held_out(example := draw(rng)):
                found[example["question"]] = example
        return list(found.values())


def draw(rng: random.Random) -> Example:
    make = pick(rng, KINDS)
    question, answer = make(rng)
    return Example({"question": question, "answer": answer, "subject": make.__name__})


def is_generated(example: Example) -> bool:
    """Tell a problem of this module, which asks for a value in simplest form, from a published one."""
    return example.get("subject") in SUBJECTS


def is_held_out(example: Example) -> bool:
    return hashlib.sha256(example["question"].encode()).digest()[0] % HELD_OUT_ONE_IN == 0
