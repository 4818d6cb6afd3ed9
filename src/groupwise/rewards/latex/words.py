"""Answers as words: spelling, names, units."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache

from groupwise.rewards.latex.tokens import Malformed, clean

UNITS = {
    name: kind
    for kind, names in {
        "cm": "cm cms centimeter centimeters centimetre centimetres",
        "mm": "mm millimeter millimeters",
        "m": "m meter meters metre metres",
        "km": "km kilometer kilometers kilometre kilometres",
        "in": "inch inches",
        "ft": "ft foot feet",
        "yd": "yard yards",
        "mi": "mi mile miles",
        "s": "sec secs second seconds",
        "min": "min mins minute minutes",
        "h": "hr hrs hour hours",
        "day": "day days",
        "week": "week weeks",
        "year": "year years",
        "dollar": "dollar dollars usd",
        "cent": "cent cents",
        "g": "gram grams",
        "kg": "kg kilogram kilograms",
        "pound": "pound pounds",
        "square": "square sq",
        "cubic": "cubic",
        "degree": "degree degrees",
        "radian": "radian radians",
        "am": "am",
        "pm": "pm",
    }.items()
    for name in names.split()
}


def same_text(one: str, other: str) -> bool:
    """Tell whether two answers are spelled alike, spacing and case aside; `1 2` is not `12`."""
    spelled = spelling(one)
    return bool(spelled) and spelled == spelling(other)


@lru_cache(maxsize=4096)  # the answers of a group are much alike, and the true one is the same
def spelling(text: str) -> str:
    with suppress(Malformed):
        text = clean(text)
    text = re.sub(r"(?<=[0-9.])\s+(?=[0-9.])", "␣", text)
    return re.sub(r"\s+", "", text).casefold()


def same_words(one: str, other: str) -> bool:
    """Compare as words: `\\text{(A)}`, `(A)` and `A` are one; lists of letters in any order."""
    ours, theirs = words_of(one), words_of(other)
    if all(len(word) == 1 for word in (*ours, *theirs)):
        ours, theirs = sorted(ours), sorted(theirs)
    return bool(theirs) and ours == theirs


def words_of(text: str) -> list[str]:
    text = re.sub(
        r"\\(?:text[a-z]*|mbox|hbox|emph|math[a-z]+|left|right|operatorname|quad)(?![a-z])", " ", text
    )
    text = re.sub(r"\b(?:and|or)\b", " ", text)
    text = re.sub(r"\\[!,;: ]|[{}$~]", "", text).casefold().replace("p.m.", "pm").replace("a.m.", "am")
    return re.findall(r"[^\W_]+(?:'\w+)?|[-+*/^_=<>|]", text)


def units_in(said: Iterable[str]) -> frozenset[str]:
    """Return the units that words name, one name for each kind."""
    return frozenset(UNITS[word] for phrase in said for word in words_of(phrase) if word in UNITS)
