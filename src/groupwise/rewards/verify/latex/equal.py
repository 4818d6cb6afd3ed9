"""Compare two parsed answers.

Strict about the order in tuples, the kind of brackets, signs, exact values and known units. Lenient about
spacing, styling, currency, omitted units, the order in sets and lists, and equivalent notation of an
expression, an equation or an interval.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from groupwise.rewards.verify.latex.expressions import Node
from groupwise.rewards.verify.latex.latex_lexer import (
    THOUSANDS,
    Malformed,
    is_phrase,
    same_phrase,
    same_text,
    same_words,
    says_more,
    units_in,
    words_of,
)
from groupwise.rewards.verify.latex.latex_parser import FLIPPED, ParsedItem, parse_answer
from groupwise.rewards.verify.latex.values import (
    POINTS,
    Undefined,
    Value,
    close,
    divide,
    inexact,
    subtract,
    value_at,
)

INTEGER = re.compile(r"[-+]?\d{1,50}", re.ASCII)
MAX_SHARE = 10
"""Largest plain number that a percentage may equal: 150 % is 1.5, but 5000 % is not accepted for 50."""


def same_answer(predicted: str, truth: str) -> bool:
    """Return whether two answers are equal. Raise Unfamiliar if one of them cannot be parsed."""
    if INTEGER.fullmatch(predicted) and INTEGER.fullmatch(truth):
        return int(predicted) == int(truth)
    if same_text(predicted, truth):
        return True
    if "?" in predicted and "?" not in truth:
        return False
    if is_phrase(truth):
        return same_phrase(predicted, truth)
    try:
        return same_reading(predicted, truth)
    except RecursionError:  # a sum of hundreds of terms is not an answer
        return False


def same_reading(predicted: str, truth: str) -> bool:
    try:
        theirs = read(truth)
    except Malformed:
        theirs = []  # a truth that is not a formula (`\\text{A5}_{11}`) is compared as words
    if all(item.node is None for item in theirs):
        return same_words(predicted, truth)
    if len(theirs) > 1 and THOUSANDS.fullmatch(predicted.strip()):
        predicted = predicted.replace(",", ", ")  # `81,256` for the list `81, 256`
    try:
        ours = read(predicted)
    except Malformed:
        return False
    return not other_currency(predicted, ours, truth, theirs) and same_items(ours, theirs)


def other_currency(predicted: str, ours: list[ParsedItem], truth: str, theirs: list[ParsedItem]) -> bool:
    r"""Return whether one answer is in dollars by its sign, and the other in another unit or a percentage."""
    for text, items in ((truth, ours), (predicted, theirs)):
        if r"\$" in text and any(units_of(item) - {"dollar"} or is_percent(item) for item in items):
            return True
    return False


def is_percent(item: ParsedItem) -> bool:
    return item.node is not None and item.node[0] == "percent"


@lru_cache(maxsize=4096)
def read(text: str) -> list[ParsedItem]:
    return parse_answer(text)


def same_items(ours: list[ParsedItem], theirs: list[ParsedItem]) -> bool:
    """Compare two lists of items in any order; a set is the list of its members."""
    ours, theirs = expand_set(ours), expand_set(theirs)
    if len(theirs) == 1 and len(ours) > 1 and (pair := named_pair(ours, theirs[0])) is not None:
        ours = [pair]  # `x = 1, y = 2` equals (1, 2)
    if len(theirs) == 1 and len(ours) > 1 and all(item.node and item.node[0] == "chain" for item in ours):
        theirs = union_parts(theirs[0])  # `x < 2 or x > 3` equals a union
    if len(ours) != len(theirs):
        return False
    return match_one_to_one(ours, theirs, same_item)


def expand_set(items: list[ParsedItem]) -> list[ParsedItem]:
    if len(items) == 1 and items[0].node is not None:
        node = members(items[0].node)
        if node is not None:
            return [ParsedItem(member, items[0].words) for member in node]
    return items


def named_pair(ours: list[ParsedItem], theirs: ParsedItem) -> ParsedItem | None:
    """Return the tuple that `x = 1, y = 2` describes, ordered by name."""
    if theirs.node is None or theirs.node[:3] != ("tuple", "(", ")"):
        return None
    values: dict[str, Node] = {}
    for item in ours:
        node = item.node
        if node is None or node[0] != "chain" or node[2] != ("=",) or node[1][0][0] != "name":
            return None
        values[node[1][0][1]] = node[1][1]
    if len(values) != len(ours):
        return None
    words = tuple(word for item in ours for word in item.words)
    return ParsedItem(("tuple", "(", ")", *(values[name] for name in sorted(values))), words)


def union_parts(item: ParsedItem) -> list[ParsedItem]:
    """Return the parts of a union."""
    node = item.node
    return [ParsedItem(part) for part in node[1:]] if node is not None and node[0] == "union" else [item]


def members(node: Node) -> tuple[Node, ...] | None:
    r"""Return the members of a set, of `x \in \{…\}` and of `x = \{…\}`."""
    if node[0] == "chain" and node[2] in (("∈",), ("=",)) and node[1][1][0] == "set" and is_named(node[1][0]):
        node = node[1][1]
    return node[1:] if node[0] == "set" and len(node) > 1 else None


def match_one_to_one(
    ours: list[Any] | tuple[Any, ...], theirs: list[Any] | tuple[Any, ...], same: Any
) -> bool:
    """Return whether there is a one-to-one match between two sequences."""
    left = list(theirs)
    for one in ours:
        match = next((index for index, other in enumerate(left) if same(one, other)), None)
        if match is None:
            return False
        left.pop(match)
    return not left


def same_item(ours: ParsedItem, theirs: ParsedItem) -> bool:
    if ours.node is None or theirs.node is None:
        our_words, their_words = as_words(ours), as_words(theirs)
        return our_words is not None and our_words == their_words
    if says_more(ours.words, theirs.words):
        return False
    return same_units(ours, theirs) and same_node(ours.node, theirs.node)


def as_words(item: ParsedItem) -> str | None:
    """Return an item as words: `Monday`, or a name such as `A`."""
    if item.node is None:
        return " ".join(words_of(" ".join(item.words)))
    return str(item.node[1]).casefold() if item.node[0] == "name" else None


def same_units(ours: ParsedItem, theirs: ParsedItem) -> bool:
    """Return whether units agree. Either side may omit them."""
    our_units, their_units = units_of(ours), units_of(theirs)
    if (our_units and is_percent(theirs)) or (their_units and is_percent(ours)):
        return False
    return not our_units or not their_units or our_units == their_units


def units_of(item: ParsedItem) -> frozenset[str]:
    units = units_in(item.words)
    return units | {"degree"} if item.node is not None and item.node[0] == "degrees" else units


def same_node(one: Node, other: Node) -> bool:
    """Return whether two expression trees are equivalent."""
    one, other = plain(one), plain(other)
    kinds = {one[0], other[0]}
    if one[0] != other[0] and kinds & {"chain"}:
        return same_chain_and_other(*((one, other) if one[0] == "chain" else (other, one)))
    if kinds & STRUCTURES:
        return bool(one[0] == other[0] and STRUCTURES_SAME[one[0]](one, other))
    if kinds & {"percent"}:
        return same_percent(one, other)
    if kinds & {"based"}:
        return same_based(one, other)
    if kinds & {"infinity"}:
        return one == other
    return same_value(one, other)


def plain(node: Node) -> Node:
    """Strip degree signs and the `x ∈` of `x ∈ {…}`."""
    while True:
        if node[0] == "degrees":
            node = node[1]
        elif node[0] == "chain" and node[2] == ("∈",) and is_named(node[1][0]) and is_collection(node[1][1]):
            node = node[1][1]
        elif node[0] == "negative" and node[1][0] == "degrees":
            node = ("negative", node[1][1])
        else:
            return node


def is_collection(node: Node) -> bool:
    return node[0] in ("set", "tuple", "union")


def same_tuple(one: Node, other: Node) -> bool:
    return one[1:3] == other[1:3] and same_sequence(one[3:], other[3:])


def same_sequence(ours: tuple[Node, ...], theirs: tuple[Node, ...]) -> bool:
    return len(ours) == len(theirs) and all(same_node(a, b) for a, b in zip(ours, theirs, strict=True))


def same_members(one: Node, other: Node) -> bool:
    return len(one) == len(other) and match_one_to_one(one[1:], other[1:], same_node)


def same_matrix(one: Node, other: Node) -> bool:
    return len(one) == len(other) and all(
        same_sequence(a, b) for a, b in zip(one[1:], other[1:], strict=True)
    )


def same_chain(one: Node, other: Node) -> bool:
    """Compare relations as written, reversed, or, for a single equation, up to rearrangement and scale."""
    (_, ours, relations), (_, theirs, their_relations) = one, other
    if relations == their_relations and same_sequence(ours, theirs):
        return True
    if all(relation in FLIPPED for relation in relations):
        flipped = tuple(FLIPPED[relation] for relation in reversed(relations))
        if flipped == their_relations and same_sequence(tuple(reversed(ours)), theirs):
            return True
    return relations == their_relations == ("=",) and same_equation(ours, theirs)


STRUCTURES_SAME = {
    "tuple": same_tuple,
    "set": same_members,
    "union": same_members,
    "both": same_members,
    "matrix": same_matrix,
    "determinant": same_matrix,
    "chain": same_chain,
}
STRUCTURES = frozenset(STRUCTURES_SAME)


def same_equation(ours: tuple[Node, ...], theirs: tuple[Node, ...]) -> bool:
    """Return whether the differences of the sides are proportional, with at least two variables involved.

    With one variable, `2x = 6` and `x = 3` are equivalent, but only the second is solved.
    """
    if len(names(ours)) < 2 or names(ours) != names(theirs):
        return False
    ratios: dict[int, Value] = {}
    for point in range(POINTS):
        try:
            our_value = subtract(value_at(ours[0], point), value_at(ours[1], point))
            their_value = subtract(value_at(theirs[0], point), value_at(theirs[1], point))
            ratios[point] = divide(our_value, their_value)
        except Undefined:
            continue
    first, *others = ratios.values() or [Fraction(0)]
    if not others or not first or not all(close(ratio, first) for ratio in others):
        return False
    if all(isinstance(ratio, Fraction) for ratio in ratios.values()):
        return True
    from groupwise.rewards.verify.latex.values import precisely_proportional

    return precisely_proportional(("-", *ours), ("-", *theirs), list(ratios))


def names(part: Any) -> frozenset[str]:
    if isinstance(part, tuple):
        if len(part) == 2 and part[0] == "name":
            return frozenset({part[1]})
        return frozenset().union(*map(names, part)) if part else frozenset()
    return frozenset()


def same_chain_and_other(chain: Node, other: Node) -> bool:
    """Compare `x = 5` with 5, `48 + 24 = 72` with 72, `0 ≤ x < 1` with [0, 1)."""
    _, parts, relations = chain
    if set(relations) <= {"=", "≈"}:
        if is_named(parts[-1]) and not is_named(parts[0]):
            parts, relations = parts[::-1], relations[::-1]
        if is_named(parts[0]):
            parts, relations = parts[1:], relations[1:]
        return not names(parts) - names(other) and same_rounded(parts, relations, other)
    interval = as_interval(parts, relations)
    return bool(interval is not None and other[0] == "tuple" and same_node(interval, other))


def same_rounded(parts: tuple[Node, ...], relations: tuple[str, ...], other: Node) -> bool:
    """Return whether every part equals the other value; parts next to a `≈` may be roundings of it."""
    exact = [same_node(part, other) for part in parts]
    rounded = [
        "≈" in relations[max(0, index - 1) : index + 1] and is_rounding(part, other)
        for index, part in enumerate(parts)
    ]
    return any(exact) and all(map(any, zip(exact, rounded, strict=True)))


def is_rounding(node: Node, other: Node) -> bool:
    """Return whether a decimal is another value rounded to the decimal's number of places."""
    if node[0] == "negative":
        return is_rounding(node[1], ("negative", other))
    if node[0] != "number" or names(other):
        return False
    places = next((places for places in range(16) if (node[1] * 10**places).denominator == 1), 16)
    try:
        off = inexact(subtract(value_at(other, 0), node[1]))
    except Undefined:
        return False
    return abs(off) <= 0.5000001 * 10.0**-places


def is_named(node: Node) -> bool:
    """Return whether this only names something: `x`, `AB`, `f(x)`, `(x, y)`."""
    if node[0] == "tuple":
        return all(part[0] == "name" for part in node[3:])
    return bool(node[0] == "name" or (node[0] == "*" and node[1][0] == "name" and node[2][0] == "name"))


def as_interval(parts: tuple[Node, ...], relations: tuple[str, ...]) -> Node | None:
    """Return the interval that `a ≤ x < b`, `x > a` or `x ≤ b` describes."""
    if set(relations) <= {">", "≥"}:
        parts, relations = parts[::-1], tuple(FLIPPED[relation] for relation in reversed(relations))
    if not set(relations) <= {"<", "≤"}:
        return None
    endless: Node = ("infinity",)
    if len(parts) == 3 and parts[1][0] == "name":
        opening, closing = "(["[relations[0] == "≤"], ")]"[relations[1] == "≤"]
        return ("tuple", opening, closing, parts[0], parts[2])
    if len(parts) == 2 and parts[0][0] == "name":
        return ("tuple", "(", ")]"[relations[0] == "≤"], ("negative", endless), parts[1])
    if len(parts) == 2 and parts[1][0] == "name":
        return ("tuple", "(["[relations[0] == "≤"], ")", parts[0], endless)
    return None


def same_percent(one: Node, other: Node) -> bool:
    """Compare percentages: 50 % equals 50 % and 0.5, and 50 if the question asked for a percentage.

    The magnitude of a plain truth decides which: 0.5 is not a percentage, and 50 is not a fraction of one.
    """
    if one[0] == other[0]:
        return same_value(one[1], other[1])
    percent, number = (one, other) if one[0] == "percent" else (other, one)
    as_share, as_percentage = same_value(percent, number), same_value(percent[1], number)
    if number is one:
        return as_share or as_percentage
    size = size_of(number)
    return (as_share and size <= MAX_SHARE) or (as_percentage and size >= 1)


def size_of(node: Node) -> float:
    try:
        return abs(inexact(value_at(node, 0)))
    except Undefined:
        return 0.0


def same_based(one: Node, other: Node) -> bool:
    """Compare numbers in a base. The answer may omit the base of the truth; the default is 10."""
    if one[0] == other[0]:
        return one[1:] == other[1:]
    based, number = (one, other) if one[0] == "based" else (other, one)
    if based[2] != 10 and based is one:
        return False  # the truth has no base, so it is a decimal number
    return bool(number[0] == "number" and number[1] == int(based[1]))


def same_value(one: Node, other: Node) -> bool:
    """Return whether two expressions agree at random assignments to their variables."""
    if one == other:
        return True
    tried = 0
    varies = bool(names(one) | names(other))
    for point in range(POINTS if varies else 1):
        try:
            our_value, their_value = value_at(one, point), value_at(other, point)
        except Undefined:
            continue
        if not close(our_value, their_value):
            return False
        if not (isinstance(our_value, Fraction) and isinstance(their_value, Fraction)) and not are_equal(
            one, other, point
        ):
            return False
        tried += 1
    return tried > varies


def are_equal(one: Node, other: Node, point: int) -> bool:
    from groupwise.rewards.verify.latex.values import precisely_equal

    return precisely_equal(one, other, point)
