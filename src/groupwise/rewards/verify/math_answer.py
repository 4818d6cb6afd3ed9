"""Judge the boxed answer of a completion against the ground truth, and score it.

`is_restated` and `is_simplest` detect answers that are not worked out: to "Compute $54 \\cdot 46$" the
answer `54 \\cdot 46` has the right value and answers nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import gcd
from typing import Any

from groupwise.config.coerce import finite
from groupwise.errors import ConfigError, RolloutError
from groupwise.rewards.extraction import last_box
from groupwise.rewards.verify.latex.equal import same_answer
from groupwise.rewards.verify.latex.expressions import Node, int_of
from groupwise.rewards.verify.latex.latex_lexer import (
    MAX_CHARACTERS,
    Malformed,
    Unfamiliar,
    same_text,
    says_more,
)
from groupwise.rewards.verify.latex.latex_parser import ParsedItem, parse_answer
from groupwise.rewards.verify.math_verify_process import comparer

LITERALS = frozenset(
    {"number", "name", "constant", "percent", "degrees", "based", "infinity", "tuple", "set"}
)


def is_restated(predicted: str, *, question: str, truth: str) -> bool:
    """Return whether an answer only repeats an unevaluated expression of the question.

    The truth itself may occur in the question, and so may numbers, fractions and pairs.
    """
    if same_text(predicted, truth):
        return False
    copied = compact(predicted)
    return len(copied) > 2 and copied in compact(question) and is_unfinished(predicted)


def compact(text: str) -> str:
    return re.sub(r"\\left|\\right|\\[,;:! ]|[\s$]", "", re.sub(r"\\[dt]frac", r"\\frac", text))


def is_unfinished(predicted: str) -> bool:
    """Return whether the answer has any operation besides a sign or a fraction of numbers."""
    try:
        items: list[ParsedItem] = parse_answer(predicted)
    except Unfamiliar:
        return True
    except Malformed:
        return False
    return any(item.node is not None and not is_literal(item.node) for item in items)


def is_literal(node: Node) -> bool:
    kind, *parts = node
    if kind == "negative":
        return is_literal(parts[0])
    if kind == "/":
        return all(part[0] in ("number", "negative") for part in parts)
    return kind in LITERALS


def is_simplest(predicted: str) -> bool:
    r"""Return whether an answer is fully worked out.

    True for numbers, fractions in lowest terms, mixed numbers, simplified roots, expanded polynomials with
    like terms collected, and tuples, sets and lists of these. The last side of an equation counts:
    `x = \frac{6}{2} = 3`.
    """
    try:
        items = parse_answer(predicted)
    except (Malformed, Unfamiliar):
        return False
    return all(item.node is None or is_worked_out(item.node) for item in items)


def is_worked_out(node: Node) -> bool:
    kind, *parts = node
    if kind == "chain":
        return set(parts[1]) <= {"="} and is_worked_out(parts[0][-1])
    if kind in ("set", "tuple"):
        return all(is_worked_out(part) for part in parts if isinstance(part, tuple))
    return is_number(node) or is_surd(node) or is_polynomial(node)


def is_number(node: Node) -> bool:
    if node[0] == "negative":
        return is_number(node[1]) and node[1][0] != "negative"
    if node[0] == "mixed":
        return is_fraction(node[2])
    return node[0] == "number" or is_fraction(node)


def is_fraction(node: Node) -> bool:
    """Return whether this is a fraction of integers in lowest terms."""
    if node[0] != "/":
        return False
    above = int_of(node[1][1] if node[1][0] == "negative" else node[1])
    below = int_of(node[2])
    return above is not None and below is not None and below > 1 and gcd(above, below) == 1


def is_surd(node: Node) -> bool:
    r"""Return whether this is `a\sqrt{b}` with b square-free."""
    if node[0] == "negative":
        return is_surd(node[1]) and node[1][0] != "negative"
    if node[0] == "*":
        return any(int_of(one) is not None and is_root(other) for one, other in (node[1:], node[:0:-1]))
    return is_root(node)


def is_root(node: Node) -> bool:
    if node[0] != "root" or int_of(node[1]) != 2:
        return False
    inside = int_of(node[2])
    if inside is None or not 1 < inside <= 10**6:
        return False
    return all(inside % (factor * factor) for factor in range(2, int(inside**0.5) + 1))


def is_polynomial(node: Node) -> bool:
    """Return whether this is a sum of powers of variables, each power once, as in `x^2 + 5x + 6`."""
    powers = [power_in(term) for term in terms(node)]
    return None not in powers and any(powers) and len(set(powers)) == len(powers)


def terms(node: Node) -> list[Node]:
    collected: list[Node] = []
    while node[0] in ("+", "-"):
        collected.append(node[2])
        node = node[1]
    return [*collected, node]


def power_in(term: Node) -> tuple[object, ...] | None:
    """Return the variable and exponent of a term, () for a number; None for anything else."""
    if term[0] == "negative":
        return power_in(term[1]) if term[1][0] != "negative" else None
    if term[0] == "*":
        return power_in(term[2]) or None if is_number(term[1]) and term[1][1] != 0 else None
    if term[0] == "name":
        return (term[1], 1)
    if term[0] == "^" and term[1][0] == "name":
        exponent = int_of(term[2])
        return (term[1][1], exponent) if exponent is not None and exponent > 1 else None
    return () if is_number(term) and term[1] != 0 else None


COMMAND = re.compile(r"\\[a-zA-Z]+")
TEXT = re.compile(r"\\text\{([^{}]*)\}")
NAMED_SIDE = re.compile(r"\s*[a-zA-Z]\s*")
UNREAD = re.compile(r"[<>~?&;,]|(?<![\\a-zA-Z])[a-zA-Z]{3,}")
READ_BY_MATH_VERIFY = frozenset(
    rf"\{name}"
    for name in """
    sum prod int lfloor rfloor lceil rceil left right frac dfrac tfrac sqrt cdot times div pi infty binom
    sin cos tan cot sec csc log ln exp arcsin arccos arctan circ displaystyle
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MathScores:
    """Rewards for a right answer, a wrong answer and no answer.

    By default no answer scores the same as a wrong one, so that not answering never pays.
    """

    right: float = 1.0
    wrong: float = -1.0
    no_answer: float = -1.0

    def __post_init__(self) -> None:
        for name, score in asdict(self).items():
            finite(f"math: {name}", score)


LENIENT = MathScores(no_answer=-0.5)
"""No answer costs less than a wrong one. This teaches caution, but also not answering hard questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of comparing a completion with the ground truth."""

    predicted: str | None
    """Content of the box. None: no answer."""
    ground_truth: str
    correct: bool
    error: str | None = None
    """Why the comparison failed."""

    @property
    def has_answer(self) -> bool:
        return self.predicted is not None


def truth_of(answer: str) -> str:
    """Return the ground truth, unboxed if it is given in a box."""
    return last_box(answer) or answer


@lru_cache(maxsize=4096)
def verify_boxed(completion: str, answer: str) -> Verdict:
    """Judge a completion. Never raises, whatever the completion contains."""
    truth = truth_of(answer)
    predicted = last_box(completion)
    if predicted is None:
        return Verdict(predicted=None, ground_truth=truth, correct=False)
    try:
        correct = equivalent(predicted, truth)
    except RolloutError as error:
        return Verdict(predicted=predicted, ground_truth=truth, correct=False, error=str(error))
    return Verdict(predicted=predicted, ground_truth=truth, correct=correct)


def equivalent(predicted: str, truth: str) -> bool:
    """Return whether two answers are equal: by our own parser if it reads both, else by `math-verify`."""
    if len(predicted) > MAX_CHARACTERS:
        return predicted == truth
    try:
        return same_answer(predicted, truth)
    except Unfamiliar:
        predicted = without_harmless_text(predicted)
        sides = sides_of(predicted)
        if len(sides) > 1:
            return all(equivalent(side, truth) for side in sides)
        return may_be_read(predicted, truth) and comparer.equal(predicted, truth)


def without_harmless_text(predicted: str) -> str:
    return TEXT.sub(lambda text: " " if not says_more([text[1]], []) else text[0], predicted)


def sides_of(predicted: str) -> list[str]:
    r"""Return the sides of an equation, of which `math-verify` would compare only the last.

    An `=` in braces is part of an expression: `\sum_{k=1}^3 k`. A variable alone on the left is dropped.
    """
    depth, sides = 0, [""]
    for character in predicted.replace(r"\{", "(").replace(r"\}", ")"):
        depth += (character == "{") - (character == "}")
        if character == "=" and not depth:
            sides.append("")
        else:
            sides[-1] += character
    return sides[1:] if len(sides) > 1 and NAMED_SIDE.fullmatch(sides[0]) else sides


def may_be_read(predicted: str, truth: str) -> bool:
    r"""Return whether `math-verify` can read every command: it silently drops those it does not know.

    Commands, relations and words that occur in the truth are allowed; others are not.
    """
    commands = READ_BY_MATH_VERIFY.union(COMMAND.findall(truth))
    return commands.issuperset(COMMAND.findall(predicted)) and set(UNREAD.findall(truth)).issuperset(
        UNREAD.findall(predicted)
    )


def score_boxed(
    completion: str, answer: str, scores: MathScores | None = None
) -> tuple[float, dict[str, Any]]:
    """Return the reward and a dict of predicted, ground_truth, correct and has_answer."""
    verdict = verify_boxed(completion, answer)
    if verdict.error is not None:
        raise RolloutError(verdict.error)
    info = {
        "predicted": verdict.predicted,
        "ground_truth": verdict.ground_truth,
        "correct": verdict.correct,
        "has_answer": verdict.has_answer,
    }
    return reward_of(verdict, scores or MathScores()), info


def reward_of(verdict: Verdict, scores: MathScores) -> float:
    if not verdict.has_answer:
        return scores.no_answer
    return scores.right if verdict.correct else scores.wrong


def score_boxed_batch(
    completions: Sequence[str], answers: Sequence[str], scores: MathScores | None = None
) -> list[tuple[float, dict[str, Any]]]:
    """Score each completion against its own answer."""
    if len(completions) != len(answers):
        raise ConfigError(f"got {len(completions)} completions but {len(answers)} answers")
    return [score_boxed(c, a, scores) for c, a in zip(completions, answers, strict=True)]
