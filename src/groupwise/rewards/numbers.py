"""Reading the one number that an answer states: `72`, `$1,080`, `72.0`, `-5`, `72 clips`, `48 + 24 = 72`."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from groupwise.rewards.arithmetic import evaluate_expression
from groupwise.rewards.vocabulary import CHANGING, HARMLESS, SIGN_WORDS

MAX_CHARACTERS = 200
MAX_DIGITS = 50

INVISIBLE = dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", "")
TYPOGRAPHIC = str.maketrans(
    {"−": "-", "–": "-", "—": "-", "×": "*", "÷": "/", "\u00a0": " ", "\u202f": " ", "’": "'", **INVISIBLE}
)
NUMBER = re.compile(r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")
CURRENCY = "[$€£¥₹]"
SIGN = re.compile(rf"([-+])(\s*)(?:\\?{CURRENCY})?\s*$|{CURRENCY}\s*([-+])(\s*)$")
SIGN_MAY_FOLLOW = re.compile(r"(?:^|[:.,;(\[{\"'=$€£¥₹#]|\n)\s*$")
EMPHASIS = re.compile(r"(?<![\w*)])(\*{1,3}|_{1,3}|`)(?=[^\s*_`])([^*_`]+)(?<=\S)\1(?![\w*(])")
LETTER = "[^\\W\\d_²³¹⁰-⁹₀-₉¼-¾⅐-⅞]"
WORD = re.compile(rf"{LETTER}+(?:'{LETTER}+)?")
BESIDE_WORDS = re.compile(rf"(?:w|\s|[.,:;'\"()\[\]{{}}#°\\]|{CURRENCY}|(?<=w)[-/](?=w)|(?<=w)[²³!])*")
"""What may stand between words, each written as a w: nothing that changes a number (`<`, `~`, `^`, `+` …)."""
DIRECTLY_AFTER = re.compile(r"\s*(?:\\?%)?(?!\s*[!%²³*^/]|\.\.)")
"""The end of a number: no factorial, power or fraction goes on from here."""
RATE = re.compile(r"\s*/\s*(?=[^\W\d_])")
HYPHEN = re.compile(r"-(?=[^\W\d_])")
ASKED = re.compile(r"\bhow (?:many|much)((?: [^\W\d_]+){1,2})", re.IGNORECASE)
LATEX_WORDS = frozenset(("boxed", "text", "mathrm", "textbf", "mathbf", "percent"))


@lru_cache(maxsize=4096)  # several rewards read the same answer
def stated_number(text: str, question: str = "") -> Fraction | None:
    """Return the number that a short text states; None when it states none, or several.

    Thousands commas, currency, units, harmless words and the question's words are read over. Any other word,
    and any that changes a number, makes it none. Two numbers are no answer, unless they are the sides of
    a true equation or of a fraction in lowest terms.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = EMPHASIS.sub(r"\2", EMPHASIS.sub(r"\2", text.translate(TYPOGRAPHIC).strip()))
    if "=" in text:
        return equation_value(text.split("="), question)
    found = list(NUMBER.finditer(text))
    if len(found) == 2 and text[found[0].end() : found[1].start()].strip() == "/":
        return fraction(text, found[0], found[1], question)
    if len(found) != 1:
        return None
    return only_number(text, found[0], question)


def only_number(text: str, number: re.Match[str], question: str) -> Fraction | None:
    """Return the value of the only number in a text."""
    value = signed(text[: number.start()], number[0], question)
    return value if value is not None and says_nothing_more(text[number.end() :], question) else None


def signed(before: str, digits: str, question: str) -> Fraction | None:
    """Return a number with the sign before it; None where more than that and harmless words stand there."""
    digits = digits.replace(",", "")
    if len(digits) > MAX_DIGITS:
        return None
    value = Fraction(digits)
    words = WORD.findall(before)
    if sign := SIGN.search(before):
        group = 1 if sign[1] else 3
        rest = before[: sign.start(group)]
        # "x - 5" takes 5 away from x: after a word, only a sign that stands by its number is one.
        after_word = bool(rest[-1:].isspace() and not sign[group + 1] and words)
        if not (SIGN_MAY_FOLLOW.search(rest) or after_word) or rest.rstrip().endswith(("+", "-")):
            return None
        value = -value if sign[group] == "-" else value
        before = rest
    elif words and words[-1].casefold() in SIGN_WORDS:
        value = -value
        before = before[: before.rindex(words[-1])]
    if before.endswith(",") or before[-1:].isalpha() or not is_harmless(before, question):
        return None  # "5,72", "x72"
    return value


def says_nothing_more(after: str, question: str) -> bool:
    """Tell whether what follows a number leaves it as it is."""
    if rate := RATE.match(after):
        return is_harmless(after[rate.end() :], question)
    end = DIRECTLY_AFTER.match(after)
    if end is None:
        return False
    rest = after[end.end() :]
    return is_harmless(rest[1:] if HYPHEN.match(rest) else rest, question)


def is_harmless(beside: str, question: str) -> bool:
    """Tell whether words and marks beside a number do not change it."""
    if not beside or beside.isspace():
        return True
    allowed, asked = words_of_question(question)
    for word in WORD.findall(beside):
        word = word.casefold()
        if word in CHANGING and word not in asked:
            return False
        if word not in HARMLESS and word not in LATEX_WORDS and word.removesuffix("'s") not in allowed:
            return False
    return bool(BESIDE_WORDS.fullmatch(WORD.sub("w", beside)))


@lru_cache(maxsize=4096)
def words_of_question(question: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the words of a question, and what it asks how many of: `How many dozen eggs …`."""
    words = {word.casefold() for word in WORD.findall(question) if len(word) > 1}
    words |= {word.removesuffix("'s") for word in words}
    asked = {word.casefold() for found in ASKED.findall(question) for word in found.split()}
    return frozenset(words), frozenset(asked - SIGN_WORDS)


def fraction(text: str, above: re.Match[str], below: re.Match[str], question: str) -> Fraction | None:
    """Return a/b in lowest terms: `144/2` is arithmetic that was not finished."""
    numerator = signed(text[: above.start()], above[0], question)
    if (
        numerator is None
        or len(below[0]) > MAX_DIGITS
        or not says_nothing_more(text[below.end() :], question)
    ):
        return None
    denominator = Fraction(below[0].replace(",", ""))
    if denominator.denominator != 1 or numerator.denominator != 1 or denominator < 2:
        return None
    value = numerator / denominator
    return value if value.denominator == denominator else None


def equation_value(sides: list[str], question: str) -> Fraction | None:
    """Return what every side of a chain is worth, if they agree and one of them is a plain number.

    A side without digits is a name: `x = 72`, `Total cost = 48 + 24 = 72`.
    """
    plain: set[Fraction] = set()
    worked: set[Fraction] = set()
    for side in sides:
        if is_name(side):
            continue
        if (number := stated_number(side, question)) is not None:
            plain.add(number)
        elif (result := evaluate_expression(re.sub(rf"\\?{CURRENCY}|,", "", side))) is not None:
            worked.add(result.value)
        else:
            return None
    return plain.pop() if len(plain) == 1 and len(plain | worked) == 1 else None


def is_name(side: str) -> bool:
    """Tell whether this only names something: letters, and no word that computes."""
    words = side.casefold().replace("'", "").split()
    return all(word.isalpha() and word not in CHANGING for word in words)
