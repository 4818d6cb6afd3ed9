"""Telling an answer from the question: `54 \\cdot 46` is worth what it asks for, and answers nothing."""

from __future__ import annotations

import re

from groupwise.rewards.latex.expressions import Node
from groupwise.rewards.latex.parse import Item, parse_answer
from groupwise.rewards.latex.tokens import Malformed, Unfamiliar
from groupwise.rewards.latex.words import same_text

LITERALS = frozenset(
    {"number", "name", "constant", "percent", "degrees", "based", "infinity", "tuple", "set"}
)


def is_restated(predicted: str, *, question: str, truth: str) -> bool:
    """Tell whether an answer only repeats an expression of the question that was to be worked out.

    The truth itself may well stand in the question, and so may numbers, fractions and pairs.
    """
    if same_text(predicted, truth):
        return False
    copied = compact(predicted)
    return len(copied) > 2 and copied in compact(question) and is_unfinished(predicted)


def compact(text: str) -> str:
    return re.sub(r"\\left|\\right|\\[,;:! ]|[\s$]", "", re.sub(r"\\[dt]frac", r"\\frac", text))


def is_unfinished(predicted: str) -> bool:
    """Tell whether there is something left to work out: any operation but a sign or a fraction of numbers."""
    try:
        items: list[Item] = parse_answer(predicted)
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
