"""Answers as words: spelling, names, units."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise

from groupwise.rewards.latex.tokens import Malformed, clean
from groupwise.rewards.vocabulary import HARMLESS, UNITS

WHOLE_TEXT = re.compile(
    r"\s*\\(?:text[a-z]*|mbox|hbox|emph|math[a-z]+|operatorname)\s*\{([^{}\\]*)\}\s*\.?\s*"
)
COMMAND = re.compile(r"(\\[a-zA-Z]+)")
PHRASE = re.compile(r"[A-Za-z]{2,}(?:[ '-][A-Za-z]+)*")
SHORT_WORDS = frozenset(("no", "up", "on", "do", "go", "it", "in", "at", "ab", "am", "my"))
NAMED_SIDE = re.compile(r"\s*[a-zA-Z]\s*=")
AND_OR = re.compile(r"\b(?:and|or)\b", re.IGNORECASE)
WITHIN_WORD = re.compile(r"(?<=\w)-(?=\w)")
LENGTHS = frozenset(("cm", "mm", "m", "km", "in", "ft", "yd", "mi", "unit"))


def same_text(one: str, other: str) -> bool:
    """Tell whether two answers are spelled alike, spacing and case aside; `1 2` is not `12`."""
    spelled = spelling(one)
    return bool(spelled) and spelled == spelling(other)


@lru_cache(maxsize=4096)  # the answers of a group are much alike, and the true one is the same
def spelling(text: str) -> str:
    with suppress(Malformed):
        text = clean(text)
    if whole := WHOLE_TEXT.fullmatch(text):
        text = whole[1].strip(" .")  # `yes` and `\\text{yes}` are spelled alike
    text = re.sub(r"(?<=[0-9.])\s+(?=[0-9.])", "␣", text)
    parts = COMMAND.split(re.sub(r"\s+", "", text))
    return "".join(part if part.startswith("\\") else part.casefold() for part in parts)


def is_phrase(text: str) -> bool:
    """Tell whether letters are a word or a label, in which their order counts, and not a product of names.

    A product is written in small letters and in alphabetical order: `xy`, `abc`, but not `DNE` or `odd`.
    """
    text = text.strip()
    if not PHRASE.fullmatch(text):
        return False
    if len(text) == 2:
        return text in SHORT_WORDS or not text.islower()
    return len(text) > 3 or not text.islower() or any(a >= b for a, b in pairwise(text))


def same_phrase(predicted: str, truth: str) -> bool:
    """Compare with a word or a phrase, harmless words round it aside: `The answer is DNE`."""
    theirs = words_of(truth)
    said = words_of(NAMED_SIDE.sub("", predicted, count=1))
    return said == theirs or [word for word in said if word in theirs or word not in HARMLESS] == theirs


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


def says_more(said: Iterable[str], truth: Iterable[str]) -> bool:
    """Tell whether words beside a value may change it: all but harmless ones and the truth's own."""
    said = list(said)
    ours = [word for phrase in said for word in words_of(WITHIN_WORD.sub(" ", phrase))]
    if not ours:
        return False
    truth = list(truth)
    if any(AND_OR.search(phrase) for phrase in said) and said != truth:
        return True
    known = {word for phrase in truth for word in words_of(phrase)}
    raised = any(UNITS.get(word) in ("square", "cubic") for word in ours)
    if raised and not known and not any(UNITS.get(word) in LENGTHS for word in ours):
        return True  # `5 square` is 25 to some
    return any(word not in HARMLESS and word not in known and word != "/" for word in ours)
