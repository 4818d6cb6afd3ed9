r"""Answers that are nearly right: off by one, turned round, a sign or a digit changed, several at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

from rewritings import (
    BASED,
    CIRCLE,
    DECIMAL,
    DEGREES,
    INTEGER,
    INTERVAL,
    MATRIX,
    PAIR,
    PERCENT,
    POLYNOMIAL,
    SOLVED,
    UNIT,
    WORD,
    Rule,
    fraction_parts,
    is_list,
    plain,
    shown,
    surd_parts,
)

OTHER_UNITS = {
    "cm": "m",
    "inches": "feet",
    "feet": "inches",
    "miles": "feet",
    "hours": "minutes",
    "days": "hours",
}


def integer(gold: str) -> Iterator[str]:
    if not INTEGER.fullmatch(gold):
        return
    number = int(gold)
    yield str(number + 1)
    yield str(number - 1)
    yield f"{number}.1"
    yield f"{number}.0001"
    yield f"{number}, {number + 1}"
    yield rf"{number} \text{{ or }} {number + 1}"
    yield f"{number} {number}"
    yield rf"\{{{number}, {number + 7}\}}"
    yield f"({number}, {number})"
    yield f"x > {number}"
    yield rf"{number} \pm 1"
    yield f"{number} = {number + 1}"
    yield r"\text{not } x"
    if number:
        yield str(-number)
        yield f"{number}x"
        yield f"{number}0"
        yield rf"\frac{{1}}{{{number}}}" if abs(number) > 1 else f"{number}1"
        yield rf"{number}\pi"
        yield rf"{number}i"
        yield f"{number}_{{7}}" if abs(number) > 6 else f"{number}2"
    if len(gold) > 1 and gold[-1] != gold[-2] and gold[-2] != "-":
        yield gold[:-2] + gold[-1] + gold[-2]
    if len(gold.lstrip("-")) > 1:
        yield f"{gold[:-1]} {gold[-1]}"
        yield f"({gold[:-1]})({gold[-1]})"
        yield f"{gold[:-1]}.{gold[-1]}"
        yield gold[:-1]


def decimal(gold: str) -> Iterator[str]:
    if DECIMAL.fullmatch(gold):
        value = Fraction(gold)
        yield f"{gold}1"
        yield gold.replace(".", "")
        yield f"-{gold}" if not gold.startswith("-") else gold[1:]
        yield shown(value + Fraction(1, 1000))
        yield gold.replace(".", ",")


def fraction(gold: str) -> Iterator[str]:
    if (parts := fraction_parts(gold)) is None:
        return
    sign, above, below = parts
    value = Fraction(above, below)
    yield rf"{sign}\frac{{{above + 1}}}{{{below}}}"
    yield rf"{sign}\frac{{{above}}}{{{below + 1}}}"
    yield rf"{'' if sign else '-'}\frac{{{above}}}{{{below}}}"
    yield f"{sign}{above}, {below}"
    yield f"{sign}{above} {below}"
    yield f"{sign}{above}{below}"
    if above != below:
        yield rf"{sign}\frac{{{below}}}{{{above}}}"
    if any(value.denominator % prime == 0 for prime in (3, 7, 11, 13)):
        yield f"{sign}{float(value):.3f}"
        yield f"{sign}{float(value):.6f}"


def surd(gold: str) -> Iterator[str]:
    if (parts := surd_parts(gold)) is None:
        return
    sign, outside, inside = parts
    yield rf"{sign}{outside + 1}\sqrt{{{inside}}}"
    yield rf"{sign}{outside}\sqrt{{{inside + 1}}}"
    yield rf"{'' if sign else '-'}{outside}\sqrt{{{inside}}}"
    yield rf"{sign}{outside}\sqrt[3]{{{inside}}}"
    yield rf"\pm {outside}\sqrt{{{inside}}}"
    yield f"{sign}{outside * inside**0.5:.4f}" if round(inside**0.5) ** 2 != inside else f"{outside}.5"
    yield rf"{sign}\sqrt{{{outside + inside}}}" if outside + inside != outside**2 * inside else f"{outside}.5"


def circle(gold: str) -> Iterator[str]:
    if found := CIRCLE.fullmatch(gold):
        yield rf"{found[1]}{int(found[2]) + 1}\pi"
        yield f"{found[1]}{found[2]}"
        yield f"{found[1]}{int(found[2]) * 3.14:g}"
        yield rf"{found[1]}{found[2]}\pi^2"


def sequence(gold: str) -> Iterator[str]:
    ordered = bool(PAIR.fullmatch(plain(gold)))
    listed = is_list(gold)
    if not (ordered or listed):
        return
    parts = [part.strip() for part in (plain(gold)[1:-1] if ordered else gold).split(",")]
    opening, closing = ("(", ")") if ordered else ("", "")

    def joined(items: list[str]) -> str:
        return f"{opening}{', '.join(items)}{closing}"

    yield joined([*parts, "99"])
    yield joined([*parts[:-1], "99"]) if parts[-1] != "99" else joined(["98", *parts[1:]])
    if len(parts) > 2 or listed:
        yield joined(parts[:-1])
    if ordered and parts != parts[::-1]:
        yield joined(parts[::-1])
        yield f"[{', '.join(parts)}]"
        yield rf"\{{{', '.join(parts)}\}}"


def interval(gold: str) -> Iterator[str]:
    found = INTERVAL.fullmatch(plain(gold))
    if found and (r"\infty" in gold or {found[1], found[4]} != {"(", ")"}):
        other = {"(": "[", "[": "(", ")": "]", "]": ")"}
        if found[3].strip() != r"\infty":
            yield f"{found[1]}{found[2]},{found[3]}{other[found[4]]}"
        if found[2].strip() != r"-\infty":
            yield f"{other[found[1]]}{found[2]},{found[3]}{found[4]}"
        yield f"{found[2]},{found[3]}"


def union(gold: str) -> Iterator[str]:
    if r"\cup" in gold:
        parts = plain(gold).split(r"\cup")
        yield parts[0].strip()
        yield r"\cup".join(parts[:-1]) if len(parts) > 2 else parts[1].strip()
        yield ", ".join(parts).replace("[", "(").replace("]", ")")


def measured(gold: str) -> Iterator[str]:
    if found := UNIT.fullmatch(gold):
        yield rf"{float(found[1]) + 1:g}\text{{{found[2]}}}"
        if other := OTHER_UNITS.get(found[2].strip()):
            yield rf"{found[1]}\text{{ {other}}}"
    if found := DEGREES.fullmatch(gold):
        yield rf"{float(found[1]) + 1:g}^\circ"
        yield rf"{float(found[1]) * 10:g}^\circ"
    if found := PERCENT.fullmatch(gold):
        yield rf"{float(found[1]) + 1:g}\%"
        yield rf"{float(found[1]) / 100:g}\%"
        yield f"{float(found[1]) * 100:g}"
    if found := BASED.fullmatch(gold):
        yield f"{found[1]}_{{{int(found[2]) + 1}}}"
        yield f"{int(found[1]) + 1}_{{{found[2]}}}"
        if int(found[2]) != 10 and len(found[1]) > 1:
            yield str(int(found[1], int(found[2])))


def worded(gold: str) -> Iterator[str]:
    if found := WORD.fullmatch(gold):
        other = "B" if found[1].upper() != "B" else "C"
        yield rf"\text{{{other}}}"
        yield rf"\text{{{found[1]} or {other}}}"
        yield rf"\text{{not {found[1]}}}"
        yield rf"\text{{{found[1]}, {other}}}"


def expression(gold: str) -> Iterator[str]:
    if POLYNOMIAL.fullmatch(gold) and re.search(r"\d", gold):
        for number in re.finditer(r"\d+", gold):
            yield f"{gold[: number.start()]}{int(number[0]) + 1}{gold[number.end() :]}"
        yield f"{gold} + 1"
        yield f"-({gold})"
        name = re.search(r"[a-z]", gold)
        if name and "w" not in gold and name[0] not in "ei":
            yield gold.replace(name[0], "w")


def solved(gold: str) -> Iterator[str]:
    if found := SOLVED.fullmatch(gold):
        yield f"{found[1]} = {found[2]}1" if found[2][-1] != "}" else f"{found[1]} = 77"
        yield f"w = {found[2]}" if found[1] != "w" else f"v = {found[2]}"
        yield f"{found[1]} > {found[2]}"


def matrix(gold: str) -> Iterator[str]:
    if MATRIX.fullmatch(gold):
        for number in list(re.finditer(r"\d+", gold))[:3]:
            yield f"{gold[: number.start()]}{int(number[0]) + 1}{gold[number.end() :]}"
        rows = MATRIX.fullmatch(gold)[1].split(r"\\")  # type: ignore[index]
        if len(rows) > 1 and rows[0].strip() != rows[-1].strip():
            turned = r"\\".join(rows[::-1])
            yield rf"\begin{{pmatrix}}{turned}\end{{pmatrix}}"


NEAR_MISSES: tuple[Rule, ...] = (
    integer, decimal, fraction, surd, circle, sequence, interval, union, measured, worded, expression, solved,
    matrix,
)  # fmt: skip


def near_misses(gold: str) -> Iterator[tuple[str, str]]:
    """Yield (rule, answer that is not the gold one)."""
    for rule in NEAR_MISSES:
        for other in dict.fromkeys(rule(gold)):
            if other != gold:
                yield rule.__name__, other
