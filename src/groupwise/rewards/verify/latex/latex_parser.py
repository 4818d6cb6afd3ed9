"""Parse tokens into whole answers: values, tuples, intervals, sets, relations, matrices and words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from groupwise.rewards.verify.latex.expressions import CLOSES, RELATIONS, Expressions, Node
from groupwise.rewards.verify.latex.latex_lexer import Malformed, Unfamiliar, clean, tokenize

FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "=": "=", "≠": "≠", "≈": "≈"}
MATRICES = frozenset("matrix pmatrix bmatrix Bmatrix vmatrix Vmatrix smallmatrix array".split())  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class ParsedItem:
    """One item of an answer: its expression and the words beside it."""

    node: Node | None
    """None for words without an expression."""
    words: tuple[str, ...] = ()


def parse_answer(text: str) -> list[ParsedItem]:
    """Parse an answer into a list of items, most often one.

    Raises Malformed for invalid answers and Unfamiliar for unsupported notation.
    """
    parser = AnswerParser(tokenize(clean(text)))
    items, joined = [parser.item()], set()
    while separator := parser.separator():
        joined.add(separator)
        items.append(parser.item())
    left_over = parser.next
    if left_over is not None:
        if left_over.kind == "command" and left_over.text[1:].isalpha():
            raise Unfamiliar(left_over.text)
        raise Malformed(f"unexpected {left_over.text!r}")
    if "and" in joined and all(is_inequality(item.node) for item in items):
        items = [both(items)]
    if not parser.either_sign:
        return items
    return [ParsedItem(signed(item.node, sign), item.words) for item in items for sign in signs(item.node)]


def is_inequality(node: Node | None) -> bool:
    return node is not None and node[0] == "chain" and set(node[2]) <= {"<", "≤", ">", "≥"}


def both(items: list[ParsedItem]) -> ParsedItem:
    """Join inequalities that hold simultaneously: `x > 2 and x < 3` is `2 < x < 3`."""
    words = tuple(word for item in items for word in item.words)
    bounds = dict(bound for item in items if (bound := bound_of(item.node)) is not None)
    if len(items) == 2 and len(bounds) == 2 and bounds["low"][0] == bounds["high"][0]:
        name, low, left = bounds["low"]
        _, high, right = bounds["high"]
        return ParsedItem(("chain", (low, name, high), (left, right)), words)
    return ParsedItem(("both", *(item.node for item in items)), words)


def bound_of(node: Node | None) -> tuple[str, tuple[Node, Node, str]] | None:
    """Return which bound an inequality sets: `x < 5` gives ("high", (x, 5, "<"))."""
    if node is None or len(node[1]) != 2:
        return None
    (left, right), (relation,) = node[1:]
    if right[0] == "name":
        left, right, relation = right, left, FLIPPED[relation]
    if left[0] != "name":
        return None
    return (
        ("high", (left, right, relation)) if relation in "<≤" else ("low", (left, right, FLIPPED[relation]))
    )


def signs(node: Any) -> str:
    """Return both signs for a node that contains `±`, else one."""
    if isinstance(node, tuple):
        return "+-" if "±" in node or any(len(signs(part)) == 2 for part in node) else "+"
    return "+"


def signed(node: Any, sign: str) -> Any:
    if isinstance(node, tuple):
        return tuple(sign if part == "±" else signed(part, sign) for part in node)
    return node


class AnswerParser(Expressions):
    """Parses whole answers: lists of relations between expressions."""

    def item(self) -> ParsedItem:
        """Parse words, a chain of relations, and words: `≈ 8.24 mph`."""
        self.seen_words = []
        self.words()
        self.take(r"\approx", "=")
        if self.next is None or self.sees(",", ";", "and", "or", ")", "]", r"\}"):
            if self.seen_words:
                return ParsedItem(None, tuple(self.seen_words))
            raise Malformed("empty item")
        node = self.chain()
        self.words()
        return ParsedItem(node, tuple(self.seen_words))

    def separator(self) -> str | None:
        """Consume the separator of two items: a comma, `and`, `or`, or a comma and one of them."""
        separator = self.take(",", ";", "and", "or")
        return self.take(",", "and", "or") or separator if separator in (",", ";") else separator

    def chain(self) -> Node:
        """Parse `a`, `a = b` or `a < x ≤ b`: ("chain", (a, x, b), ("<", "≤"))."""
        parts, relations = [self.union()], []
        self.words()
        while self.next is not None and self.next.kind != "words" and self.next.text in RELATIONS:
            relations.append(RELATIONS[self.next.text])
            self.position += 1
            parts.append(self.union())
        return ("chain", tuple(parts), tuple(relations)) if relations else parts[0]

    def union(self) -> Node:
        parts = [self.sum()]
        while self.take(r"\cup"):
            parts.append(self.sum())
        return ("union", *parts) if len(parts) > 1 else parts[0]

    def group(self, opening: str) -> Node:
        """Parse parentheses around one value, or brackets around several: a tuple, an interval, a set."""
        is_set = opening in (r"\{", r"\lbrace")
        if is_set and self.take(r"\}", r"\rbrace"):
            return ("set",)
        items = [self.chain()]
        self.words()
        while separator := self.separator():
            if separator == "or" and not is_set:
                raise Malformed("a choice in brackets")
            items.append(self.chain())
            self.words()
        closing = self.take(")", "]", CLOSES[opening], "}" if opening == "{" else CLOSES[opening])
        if (
            closing is None
            or ((opening == "{") != (closing == "}"))
            or (is_set != (closing in (r"\}", r"\rbrace")))
        ):
            raise Malformed("brackets do not match")
        if is_set:
            return ("set", *items)
        if len(items) == 1 and closing == CLOSES[opening]:
            return items[0]
        if opening == "{":
            raise Malformed("a list in braces")
        return ("tuple", opening, closing, *items)

    def matrix(self) -> Node:
        name = self.environment()
        if name not in MATRICES:
            raise Unfamiliar(name)
        if name == "array" and self.take("{"):
            while self.next is not None and not self.take("}"):
                self.position += 1
        rows: list[tuple[Node, ...]] = []
        while not self.sees(r"\end"):
            row = [self.chain()]
            while self.take("&"):
                row.append(self.chain())
            rows.append(tuple(row))
            if not self.take(r"\\"):
                break
        self.need(r"\end")
        if self.environment() != name:
            raise Malformed(r"\begin and \end do not match")
        return ("determinant" if name in ("vmatrix", "Vmatrix") else "matrix", *rows)

    def environment(self) -> str:
        self.need("{")
        name = ""
        while self.next is not None and not self.sees("}"):
            name += self.next.text
            self.position += 1
        self.need("}")
        return name
