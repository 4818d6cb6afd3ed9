"""Reading the one number that an answer states: `72`, `$1,080`, `72.0`, `-5`, `72 clips`, `48 + 24 = 72`."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from groupwise.rewards.arithmetic import evaluate_expression

MAX_CHARACTERS = 200
MAX_DIGITS = 50

TYPOGRAPHIC = str.maketrans({"−": "-", "–": "-", "—": "-", "×": "*", "÷": "/", "\u00a0": " ", "\u202f": " "})
NUMBER = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")
SIGN = re.compile(r"(?:^|[^\w)\]])([-+])\s*[$€£¥]?\s*$|(?:^|[^\w)\]])[$€£¥]\s*([-+])\s*$")
AROUND = re.compile(r"(?:[^\W\d]|[\s.,:;!?'\"()\[\]%$€£¥°*_`/\\{}-])*")
"""What may stand beside the number: words and units, never what would change it (`<`, `~`, `^`, `+` …)."""
SUPERSCRIPTS = tuple("⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
NAME = re.compile(r"(?:[^\W\d]|\s)*")


@lru_cache(maxsize=4096)  # several rewards read the same answer
def stated_number(text: str) -> Fraction | None:
    """Return the number that a short text states; None when it states none, or several.

    Thousands commas, currency, units, words and a decimal point are read over. Two numbers are no
    answer, unless they are the sides of a true equation or of a fraction in lowest terms.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = text.translate(TYPOGRAPHIC).strip()
    if "=" in text:
        return equation_value(text.split("="))
    found = list(NUMBER.finditer(text))
    if len(found) == 2 and text[found[0].end() : found[1].start()].strip() == "/":
        return fraction(text, *found)
    if len(found) != 1:
        return None
    return signed(text, found[0])


def signed(text: str, number: re.Match[str]) -> Fraction | None:
    """Return the value of the only number in a text, with the sign before it."""
    before, after = text[: number.start()], text[number.end() :]
    digits = number[0].replace(",", "")
    if len(digits) > MAX_DIGITS:
        return None
    value = Fraction(digits)
    sign = SIGN.search(before)
    if sign is not None:
        group = 1 if sign[1] else 2
        value = -value if sign[group] == "-" else value
        before = before[: sign.start(group)]
    if before.rstrip().endswith("-") or after.startswith(SUPERSCRIPTS):
        return None  # "x-5", "twenty-5", "--5", "7²": part of something else
    return value if AROUND.fullmatch(before) and AROUND.fullmatch(after) else None


def fraction(text: str, above: re.Match[str], below: re.Match[str]) -> Fraction | None:
    """Return a/b in lowest terms: `144/2` is arithmetic that was not finished."""
    numerator = signed(text[: above.end()], above)
    if numerator is None or not AROUND.fullmatch(text[below.end() :]) or len(below[0]) > MAX_DIGITS:
        return None
    denominator = Fraction(below[0].replace(",", ""))
    if denominator.denominator != 1 or numerator.denominator != 1 or denominator < 2:
        return None
    value = numerator / denominator
    return value if value.denominator == denominator else None


def equation_value(sides: list[str]) -> Fraction | None:
    """Return what every side of a chain is worth, if they agree and one of them is a plain number.

    A side without digits is a name: `x = 72`, `Total cost = 48 + 24 = 72`.
    """
    plain: set[Fraction] = set()
    worked: set[Fraction] = set()
    for side in sides:
        if NAME.fullmatch(side):
            continue
        if (number := stated_number(side)) is not None:
            plain.add(number)
        elif (result := evaluate_expression(re.sub(r"[$€£¥,]", "", side))) is not None:
            worked.add(result.value)
        else:
            return None
    return plain.pop() if len(plain) == 1 and len(plain | worked) == 1 else None
