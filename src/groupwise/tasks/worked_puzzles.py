"""Worked answers to Countdown puzzles, for a warm start: thinking that tries a few ways, then an answer.

They teach format and arithmetic, not judgement: the answer is the last way tried, right or wrong. Ways that
fail are tried in alphabetical order, so that the last one tells what is left to try; a small model cannot
remember them all and would repeat itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

HIGHEST = 200
"""Results beyond this hardly ever lead to a target of at most 100, and are the hardest to work out."""

MOST_DRAWS = 3000
"""Random attempts after which a puzzle is taken to have no solution within `HIGHEST`."""


class Attempt(NamedTuple):
    """One way to combine the numbers: how it is worked out, as an expression, and what it gives."""

    thought: str
    expression: str
    value: int


def attempt(rng: random.Random, numbers: Sequence[int]) -> Attempt:
    """Combine the numbers at random, keeping every result a whole number from 1 to `HIGHEST`."""
    pool = [(number, str(number)) for number in numbers]
    lines = []
    while len(pool) > 1:
        a, left = pool.pop(rng.randrange(len(pool)))
        b, right = pool.pop(rng.randrange(len(pool)))
        if a < b:
            a, left, b, right = b, right, a, left
        results = {"+": a + b, "*": a * b, "-": a - b}
        if a % b == 0:
            results["/"] = a // b
        possible = [(o, value) for o, value in results.items() if 0 < value <= HIGHEST]
        operator, value = rng.choice(possible or [("+", a + b)])
        lines.append(f"{a}{operator}{b}={value}")
        pool.append((value, f"({left}{operator}{right})"))
    value, expression = pool[0]
    return Attempt(",".join(lines), expression[1:-1], value)


def worked_answer(
    rng: random.Random, numbers: Sequence[int], target: int, *, patience: Sequence[float], insight: float
) -> str | None:
    """Thinking that tries a few ways, then the last one as the answer: often right, often given up too early.

    `patience` weighs how many ways are tried at most, all different; each works with a chance of `insight`,
    and the one that works ends it. None for a puzzle that has no solution within `HIGHEST`.
    """
    most = rng.choices(range(1, len(patience) + 1), patience)[0]
    tried: dict[str, Attempt] = {}
    works = False
    while not works and len(tried) < most:
        works = rng.random() < insight
        drawn = (attempt(rng, numbers) for _ in range(MOST_DRAWS))
        found = next((a for a in drawn if (a.value == target) == works and a.thought not in tried), None)
        if found is None:
            return None
        tried[found.thought] = found
    ways = sorted(tried.values(), key=lambda way: (way.value == target, way.thought))
    thoughts = "\n".join(way.thought for way in ways)
    return f"{thoughts}</think>\n<answer>{ways[-1].expression}</answer>"
