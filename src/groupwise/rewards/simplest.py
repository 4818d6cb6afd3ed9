r"""Telling a value that was worked out from one that was not: `2484` from `54 \cdot 46`."""

from __future__ import annotations

from math import gcd

from groupwise.rewards.latex.expressions import Node, int_of
from groupwise.rewards.latex.parse import parse_answer
from groupwise.rewards.latex.tokens import Malformed, Unfamiliar


def is_simplest(predicted: str) -> bool:
    r"""Tell whether nothing is left to work out in an answer.

    True for numbers, fractions in lowest terms, mixed numbers, roots with the smallest number under them,
    expanded polynomials with like terms collected, and pairs, sets and lists of these. The last side of an
    equation counts: `x = \frac{6}{2} = 3`.
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
    """Tell whether this is a fraction of whole numbers in lowest terms."""
    if node[0] != "/":
        return False
    above = int_of(node[1][1] if node[1][0] == "negative" else node[1])
    below = int_of(node[2])
    return above is not None and below is not None and below > 1 and gcd(above, below) == 1


def is_surd(node: Node) -> bool:
    r"""Tell whether this is `a\sqrt{b}` with no square left in b."""
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
    """Tell whether this is a sum of powers of names, each power once, as in `x^2 + 5x + 6`."""
    powers = [power_in(term) for term in terms(node)]
    return None not in powers and any(powers) and len(set(powers)) == len(powers)


def terms(node: Node) -> list[Node]:
    found: list[Node] = []
    while node[0] in ("+", "-"):
        found.append(node[2])
        node = node[1]
    return [*found, node]


def power_in(term: Node) -> tuple[object, ...] | None:
    """Return which power a term has, () for a number; None for what is no term, or not worked out."""
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
