"""Countdown: write an equation that uses each given number once and equals the target.

First the task, then the puzzles: how they are solved, drawn, and worked out for a warm start.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any, NamedTuple

from groupwise.config.coerce import between, finite
from groupwise.errors import ConfigError
from groupwise.records import Example, Message, Rollout
from groupwise.rewards.extraction import END_THINK, evaluate_expression, final_answer, is_well_formed
from groupwise.tasks.examples import Column
from groupwise.tasks.task import Task

SYSTEM = (
    "You are a helpful assistant. You first think about the reasoning process in your mind "
    "and then provide the user with the answer."
)
USER = (
    "Using each number in this list only once ({numbers}), create an equation that equals {target}. "
    "You can use basic arithmetic operations (+, -, *, /) and each number can only be used once. "
    "Show your work in <think> </think> tags. And return the final equation and answer in "
    "<answer> </answer> tags, for example <answer>(1 + 2) / 3</answer>."
)
PREFILL = "Let me solve this step by step.\n<think>"

LEVELS = {1: 3, 2: 4, 3: 5, 4: 6}
"""Number of numbers in a puzzle, by level."""
HELD_OUT_ONE_IN = 8
MAX_DRAWS = 20_000
"""Number of failed draws after which the settings count as unsatisfiable."""


def countdown(
    *,
    level: int | None = None,
    numbers: int | Sequence[int] | None = None,
    largest: int = 99,
    targets: Sequence[int] = (10, 100),
    patience: Sequence[float] = (1, 1, 1, 1),
    insight: float = 0.3,
) -> Task:
    """Reach a target from given numbers by + − × ÷. The puzzles are endless and all solvable.

    `level`: 1 to 4, for 3 to 6 numbers; or `numbers`: how many, or a range, by default (3, 4). Numbers lie
    between 1 and `largest`; `targets`: smallest and largest target. The worked answers of a warm start make
    several attempts: `patience` weights how many, and each succeeds with probability `insight`.
    """
    if level is not None:
        if numbers is not None:
            raise ConfigError("countdown: level and numbers exclude each other; set one of them")
        numbers = LEVELS[pair("level", [level, level], low=1, high=len(LEVELS))[0]]
    numbers = (3, 4) if numbers is None else numbers
    puzzles = PuzzleStream(
        counts=pair("numbers", [numbers, numbers] if isinstance(numbers, int) else numbers, low=2, high=6),
        largest=pair("largest", [largest, largest], low=1, high=10**6)[1],
        targets=pair("targets", targets, low=1, high=10**9),
    )
    weights = weighed(patience)
    finite("task.options.insight", insight)
    between("task.options.insight", insight, 0.0, 1.0)

    def worked(example: Example, rng: random.Random) -> str | None:
        return worked_answer(rng, *numbers_and_target(example), patience=weights, insight=insight)

    puzzles.train(0, seed=0)  # fail here on unsatisfiable settings, not in the middle of a run
    return Task(
        name="countdown",
        examples=puzzles,
        prompt=countdown_prompt,
        rewards={"format": format_reward, "equation": equation_reward},
        key=example_key,
        accuracy="equation",
        format="format",
        columns={
            "numbers": Column(read=whole_numbers, names=("numbers", "nums")),
            "target": Column(read=whole_number),
        },
        predicted=final_answer,
        ends_thinking=END_THINK,
        difficulty=difficulty,
        gold=gold_completion,
        worked=worked,
        perfect=2.0,
    )


def weighed(patience: object) -> list[float]:
    """Return the weights of one attempt, two attempts, …; raise ConfigError if they are invalid."""
    if isinstance(patience, Sequence) and all(isinstance(w, int | float) and w >= 0 for w in patience):
        weights = [float(weight) for weight in patience]
        if sum(weights) > 0:
            return weights
    raise ConfigError(
        f"countdown: patience must be a list of non-negative weights, as in [2, 1]; got {patience!r}"
    )


def whole_number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("expected an integer")
    return value


def whole_numbers(value: Any) -> list[int]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ValueError("expected a list of integers")
    return [whole_number(number) for number in value]


def difficulty(example: Example) -> str:
    """Return how many numbers there are, and which operations a known solution uses."""
    numbers, _ = numbers_and_target(example)
    operations = "".join(sorted(set(str(example.get("solution", ""))) & set("+-*/")))
    return f"{len(numbers)} numbers {operations}".rstrip()


def gold_completion(example: Example) -> str:
    """Solve the puzzle and answer in the format that the prompt requests."""
    numbers, target = numbers_and_target(example)
    known = example.get("solution")
    solution = known or next((solved.expression for solved in solutions(numbers, target)), None)
    if solution is None:
        raise ConfigError(f"countdown: {numbers} cannot make {target}")
    return f"I try {solution}.</think>\n<answer>{solution}</answer>"


def pair(option: str, values: object, *, low: int, high: int) -> tuple[int, int]:
    """Return two integers in order; raise ConfigError if the option is invalid."""
    match values:
        case [int(least), int(most)] if low <= least <= most <= high:
            return least, most
    raise ConfigError(
        f"countdown: {option} must be integers from {low} to {high}, the smaller first; got {values!r}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PuzzleStream:
    """An `ExampleStream` of puzzles.

    A hash of the puzzle, independent of the order of its numbers, decides whether it is held out. Training
    and evaluation therefore never share one.
    """

    counts: tuple[int, int]
    largest: int
    targets: tuple[int, int]

    def train(self, index: int, *, seed: int) -> Example:
        rng = random.Random(f"train {seed} {index}")
        count = self.draw_count(rng)
        for _ in range(MAX_DRAWS):
            puzzle = draw_puzzle(rng, count=count, largest=self.largest, targets=self.targets)
            if puzzle is not None and not is_held_out(puzzle):
                return as_example(puzzle)
        raise ConfigError(
            f"countdown: no puzzle found with numbers={self.counts}, largest={self.largest}, "
            f"targets={self.targets}; widen one of them"
        )

    def held_out(self, count: int) -> list[Example]:
        """Return up to `count` distinct puzzles; fewer if the settings do not allow that many."""
        rng = random.Random("held out")
        puzzles: dict[str, Example] = {}
        for _ in range(count):
            numbers = self.draw_count(rng)
            for _ in range(MAX_DRAWS):
                puzzle = draw_puzzle(rng, count=numbers, largest=self.largest, targets=self.targets)
                if puzzle is not None and is_held_out(puzzle) and key(puzzle) not in puzzles:
                    puzzles[key(puzzle)] = as_example(puzzle)
                    break
            else:
                break
        return list(puzzles.values())

    def draw_count(self, rng: random.Random) -> int:
        """Draw how many numbers a puzzle has, independently of whether the numbers can be used."""
        least, most = self.counts
        return least + int(rng.random() * (most - least + 1))


def key(puzzle: Puzzle) -> str:
    """Return a key that is equal for puzzles that differ only in the order of their numbers."""
    return key_of(puzzle.numbers, puzzle.target)


def example_key(example: Example) -> str:
    return key_of(*numbers_and_target(example))


def key_of(numbers: Sequence[int], target: int) -> str:
    return f"{sorted(numbers)} {target}"


def is_held_out(puzzle: Puzzle) -> bool:
    return hashlib.sha256(key(puzzle).encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def as_example(puzzle: Puzzle) -> Example:
    return Example({"numbers": list(puzzle.numbers), "target": puzzle.target, "solution": puzzle.solution})


def numbers_and_target(example: Example) -> tuple[list[int], int]:
    """Read a puzzle from an example; data files may name the numbers `nums`."""
    try:
        numbers = example["numbers"] if "numbers" in example else example["nums"]
        return [int(number) for number in numbers], int(example["target"])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            "a countdown example requires integers in `numbers` (or `nums`) and in `target`; "
            f"got {str(dict(example))[:120]}"
        ) from None


def countdown_prompt(example: Example) -> list[Message]:
    """Return the prompt, with a prefill that opens the thinking."""
    numbers, target = numbers_and_target(example)
    user = USER.format(numbers=", ".join(map(str, numbers)), target=target)
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": user},
        {"role": "assistant", "content": PREFILL},
    ]


def format_reward(rollout: Rollout, example: Example) -> float:
    """Return 1 for thinking followed by one answer block and nothing else, else 0."""
    return float(is_well_formed(rollout.text))


def equation_reward(rollout: Rollout, example: Example) -> float:
    """Return 1 for an answer that uses exactly the given numbers and equals the target, else 0."""
    numbers, target = numbers_and_target(example)
    answer = final_answer(rollout.text)
    return float(answer is not None and solves(answer, numbers=numbers, target=target))


def solves(answer: str, *, numbers: Sequence[int], target: int) -> bool:
    """Return whether an answer such as "(1 + 2) * 8", or "(1 + 2) * 8 = 24", is right."""
    expression, equals, claimed = answer.partition("=")
    if equals and claimed.strip() != str(target):
        return False
    result = evaluate_expression(expression)
    return result is not None and result.value == target and list(result.numbers) == sorted(numbers)


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
