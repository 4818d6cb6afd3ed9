"""Exact arithmetic on untrusted text: integers, + - * / and parentheses, nothing else."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

# The length is checked before parsing. Without powers a value has no more digits than its text, so this
# limit also bounds the size of numbers and the run time.
MAX_CHARACTERS = 200
MAX_DEPTH = 20

TYPOGRAPHIC = str.maketrans({"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-"})
ALLOWED = frozenset("0123456789+-*/() ")
TWO_SIGNS = re.compile(r"(?:^|[-+*/(]) *- *-")
"""Two signs in a row, as in `--5`; `-(-5)` has one for the number and one for the parenthesis."""
Exact = int | Fraction
"""A Fraction only after a division: integer arithmetic is ten times faster."""
OPERATIONS: dict[type[ast.operator], Callable[[Exact, Exact], Exact]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: Fraction,
}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The value of an expression and the integers written in it, smallest first."""

    value: Fraction
    numbers: tuple[int, ...]


@lru_cache(maxsize=4096)  # the answers of a group often repeat
def evaluate_expression(text: str) -> Arithmetic | None:
    """Evaluate an expression exactly; return None for anything but plain arithmetic.

    Example: "(1 + 2) / 4" -> Arithmetic(value=Fraction(3, 4), numbers=(1, 2, 4))

    A number or a parenthesis may have one minus sign. Returns None for powers, `//`, decimals, names,
    non-ASCII digits, division by zero, more than MAX_CHARACTERS and nesting beyond MAX_DEPTH.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = " ".join(text.translate(TYPOGRAPHIC).split())
    if not text or not ALLOWED.issuperset(text) or is_too_deep(text) or TWO_SIGNS.search(text):
        return None
    try:
        tree = ast.parse(text, mode="eval")
        numbers: list[int] = []
        value = Fraction(evaluate(tree.body, numbers))
    except (SyntaxError, ArithmeticError):
        return None
    return Arithmetic(value, tuple(sorted(numbers)))


def is_too_deep(text: str) -> bool:
    """Return whether parentheses are nested more than MAX_DEPTH levels."""
    if text.count("(") <= MAX_DEPTH:  # fast path: a scan of the text is slow
        return False
    return max(accumulate((character == "(") - (character == ")") for character in text)) > MAX_DEPTH


def evaluate(node: ast.expr, numbers: list[int]) -> Exact:
    """Return the value of a syntax tree and append its literals to `numbers`."""
    # `match` is four times slower here.
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        numbers.append(node.value)
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](evaluate(node.left, numbers), evaluate(node.right, numbers))
    if isinstance(node, ast.UnaryOp) and type(node.op) is ast.USub:
        return -evaluate(node.operand, numbers)
    raise ArithmeticError(f"{type(node).__name__} is not plain arithmetic")
