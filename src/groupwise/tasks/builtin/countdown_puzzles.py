"""Generate and solve countdown puzzles: reach a target with + - * / using each number once."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import NamedTuple

Number = int | Fraction
"""Integral values are always an int."""

Tree = int | tuple[str, "Tree", "Tree"]
"""A number, or (operator, left, right)."""


class SolutionStep(NamedTuple):
    """One line of a worked solution: 3 * 4 = 12."""

    left: Number
    operator: str
    right: Number
    result: Number


@dataclass(frozen=True, slots=True)
class Solution:
    """An expression that reaches the target, and the steps that evaluate it, in order."""

    expression: str
    steps: tuple[SolutionStep, ...]

    @property
    def whole(self) -> bool:
        """Whether every intermediate result is a positive integer."""
        return all(isinstance(step.result, int) and step.result > 0 for step in self.steps)


class Term(NamedTuple):
    """A value and the expression tree that produced it."""

    value: Number
    tree: Tree


def solutions(numbers: Sequence[int], target: int) -> Iterator[Solution]:
    """Yield every textually distinct solution for two or more numbers, in exact fractions.

    Example: solutions([2, 3, 4], 20) yields "(2 + 3) * 4", whose steps are 2 + 3 = 5 and 5 * 4 = 20.

    Combines every pair of values in every way, recursively: about 4,000 ways for four numbers.
    """
    seen: set[str] = set()
    for tree, steps in search([Term(number, number) for number in numbers], target, ()):
        expression = render(tree)
        if expression not in seen:
            seen.add(expression)
            yield Solution(expression, steps)


def search(
    pool: list[Term], target: int, steps: tuple[SolutionStep, ...]
) -> Iterator[tuple[Tree, tuple[SolutionStep, ...]]]:
    for first, second in combinations(range(len(pool)), 2):
        one, other = pool[first], pool[second]
        if len(pool) == 2:
            for operator, left, right in last_steps(one, other, target):
                step = SolutionStep(left.value, operator, right.value, target)
                yield (operator, left.tree, right.tree), (*steps, step)
            return
        rest = [term for index, term in enumerate(pool) if index not in (first, second)]
        for operator, left, right, result in all_steps(one, other):
            step = SolutionStep(left.value, operator, right.value, result)
            term = Term(result, (operator, left.tree, right.tree))
            yield from search([*rest, term], target, (*steps, step))


def all_steps(one: Term, other: Term) -> Iterator[tuple[str, Term, Term, Number]]:
    """Yield every operation on two values, in both orders where the order matters."""
    a, b = one.value, other.value
    yield "+", one, other, simplest(a + b)
    yield "*", one, other, simplest(a * b)
    yield "-", one, other, simplest(a - b)
    yield "-", other, one, simplest(b - a)
    if b:
        yield "/", one, other, divided(a, b)
    if a:
        yield "/", other, one, divided(b, a)


def last_steps(one: Term, other: Term, target: int) -> Iterator[tuple[str, Term, Term]]:
    """Yield the operations on two values that give the target: faster than `all_steps`, without division."""
    a, b = one.value, other.value
    if a + b == target:
        yield "+", one, other
    if a * b == target:
        yield "*", one, other
    if a - b == target:
        yield "-", one, other
    if b - a == target:
        yield "-", other, one
    if b and a == target * b:
        yield "/", one, other
    if a and b == target * a:
        yield "/", other, one


def divided(dividend: Number, divisor: Number) -> Number:
    # Integral quotients are the common case, and an int is many times cheaper than a Fraction.
    if isinstance(dividend, int) and isinstance(divisor, int) and dividend % divisor == 0:
        return dividend // divisor
    return simplest(Fraction(dividend) / divisor)


def simplest(value: Number) -> Number:
    return value if isinstance(value, int) or value.denominator != 1 else value.numerator


def render(tree: Tree) -> str:
    """Write an expression with the fewest parentheses."""
    return rendered(tree)[0]


def rendered(tree: Tree) -> tuple[str, int]:
    """Return the text and its precedence: 1 for + and -, 2 for * and /, 3 for a number."""
    if isinstance(tree, int):
        return str(tree), 3
    operator, left_tree, right_tree = tree
    (left, left_binds), (right, right_binds) = rendered(left_tree), rendered(right_tree)
    binds = 1 if operator in "+-" else 2
    if left_binds < binds:
        left = f"({left})"
    if right_binds < binds or (right_binds == binds and operator in "-/"):
        right = f"({right})"
    return f"{left} {operator} {right}", binds


class Puzzle(NamedTuple):
    """Numbers, the target, and one solution."""

    numbers: tuple[int, ...]
    target: int
    solution: str


def draw_puzzle(rng: random.Random, *, count: int, largest: int, targets: tuple[int, int]) -> Puzzle | None:
    """Draw numbers and combine them at random; return None if the result is outside the range of targets.

    Every intermediate result is a positive integer.
    """
    numbers = tuple(1 + int(rng.random() * largest) for _ in range(count))
    pool: list[tuple[int, Tree]] = [(number, number) for number in numbers]
    while len(pool) > 1:
        one = pool.pop(int(rng.random() * len(pool)))
        other = pool.pop(int(rng.random() * len(pool)))
        (a, larger), (b, smaller) = (one, other) if one[0] > other[0] else (other, one)
        results: list[tuple[int, Tree]] = [(a + b, ("+", one[1], other[1])), (a * b, ("*", one[1], other[1]))]
        if a > b:
            results.append((a - b, ("-", larger, smaller)))
        if a % b == 0:
            results.append((a // b, ("/", larger, smaller)))
        if not pool:
            results = [result for result in results if targets[0] <= result[0] <= targets[1]]
            if not results:
                return None
        pool.append(results[int(rng.random() * len(results))])
    target, tree = pool[0]
    return Puzzle(numbers, target, render(tree))


HIGHEST = 200
"""Largest intermediate result. Larger ones rarely lead to a target of at most 100."""

MOST_DRAWS = 3000
"""Number of random attempts after which a puzzle counts as unsolvable within `HIGHEST`."""


class Attempt(NamedTuple):
    """One way to combine the numbers: its steps, its expression and its value."""

    thought: str
    expression: str
    value: int


def attempt(rng: random.Random, numbers: Sequence[int]) -> Attempt:
    """Combine the numbers at random, with every result an integer from 1 to `HIGHEST` if possible."""
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
    """Return a completion that tries several attempts and answers with the last one, right or wrong.

    `patience` weights the maximum number of attempts, all distinct. Each attempt succeeds with probability
    `insight`, and a success ends the search. None for a puzzle without a solution within `HIGHEST`.
    """
    most = rng.choices(range(1, len(patience) + 1), patience)[0]
    tried: dict[str, Attempt] = {}
    succeeds = False
    while not succeeds and len(tried) < most:
        succeeds = rng.random() < insight
        drawn = (attempt(rng, numbers) for _ in range(MOST_DRAWS))
        chosen = next((a for a in drawn if (a.value == target) == succeeds and a.thought not in tried), None)
        if chosen is None:
            return None
        tried[chosen.thought] = chosen
    ways = sorted(tried.values(), key=lambda way: (way.value == target, way.thought))
    thoughts = "\n".join(way.thought for way in ways)
    return f"{thoughts}</think>\n<answer>{ways[-1].expression}</answer>"
