"""From the text of an answer to tokens: spacing and styling gone, words and units set apart."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

MAX_CHARACTERS = 1000

Kind = Literal["number", "letter", "command", "words", "symbol", "separator"]


class Token(NamedTuple):
    """A piece of an answer; `glued`: no space stood before it."""

    kind: Kind
    text: str
    glued: bool = False


class Malformed(Exception):
    """Not an answer in any notation: it is wrong whatever the truth is."""


class Unfamiliar(Exception):
    """Notation that is not read here, though it may mean something."""


TYPOGRAPHIC = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "π": r"\pi ",
        "∞": r"\infty ", "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ",
        "∈": r"\in ", "²": "^2", "³": "^3", "½": r"\frac12 ", "±": r"\pm ", "\u00a0": " ", "√": r"\sqrt ",
        "θ": r"\theta ", "α": r"\alpha ", "≈": r"\approx ", "∅": r"\emptyset ",
    }
)  # fmt: skip
SPACING = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![a-zA-Z])\.?|\\quad|\\qquad"
)
GROUPED = re.compile(r"(?<=\d)(?:\\!)*(?:,(?:\\! ?)+|\{,\}|\\,)(?:\\!)*(?=\d{3}(?!\d))")
SPACE = re.compile(r"(\\\\)|\\[,;:> ]|~")
"""Spacing commands, but not the second half of the `\\\\` that ends a matrix row."""
HALF_OF_DAY = re.compile(r"\b([ap])\.\s?m\b\.?")
STYLED_WORDS = re.compile(r"\\(?:mathrm|operatorname|rm)\s*\{([a-zA-Z. ]{2,})\}")
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{(\d{1,30})\}")
BRACKETED_LIST = re.compile(r"(?:[(\[]|\\\{)[^()\[\]]*,")
STYLE = re.compile(
    r"\\(?:mathbf|mathrm|mathit|mathsf|mathbb|boldsymbol|bm|rm|bf|operatorname)(?![a-zA-Z])\*?"
)
FRACTION = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
PHANTOM = re.compile(r"\\[hv]?phantom(?![a-zA-Z])\s*(?:\{[^{}]*\}|\S)")
MATH_MODES = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
TOKEN = re.compile(
    r"\s*(?:"
    r"\\(?:text|mbox|hbox|textbf|textit|textrm|textsf|textnormal|emph)\s*\{(?P<words>[^{}]*)\}"
    r"|(?P<number>\d+\.\d+[eE][-+]?\d{1,3}|\d+[eE]\d{1,3}|\d+(?:\.\d+)?|\.\d+)"
    r"|(?P<run>[a-zA-Z]{2,})"
    r"|(?P<letter>[a-zA-Z])"
    r"|(?P<command>\\(?:[a-zA-Z]+|.))"
    r"|(?P<symbol>\*\*|<=|>=|!=|[-+*/^_=<>()\[\]{}|!,;:'%&])"
    r")",
    re.DOTALL | re.ASCII,
)
UNIT_WORDS = frozenset(
    """
    am pm cm cms mm km kg mg ml ft mi mph hr hrs min mins sec secs cent cents dollar dollars usd euros inch
    inches foot feet yard yards mile miles meter meters metre metres centimeter centimeters kilometer
    kilometers pound pounds gram grams liter liters gallons hour hours minute minutes second seconds day days
    week weeks months year years degree degrees radians unit units square sq cubic percent people ways
    """.split()  # noqa: SIM905
)
FUNCTION_NAMES = frozenset("sin cos tan cot sec csc log ln exp sqrt arcsin arccos arctan".split())  # noqa: SIM905
LETTERS = re.compile(r" *[a-zA-Z](?: *, *[a-zA-Z])+ *")
SEPARATING = re.compile(r"[\s,;]*\b(?:and|or)\b[\s,;]*")


def clean(text: str) -> str:
    """Return the text without styling, spacing, currency and thousands separators."""
    if len(text) > MAX_CHARACTERS:
        raise Malformed("longer than any answer")
    text = ungroup(text.translate(TYPOGRAPHIC))
    text = SPACE.sub(lambda space: space[1] or " ", text)
    text = without_math_mode(trimmed(text))
    text = STYLED_WORDS.sub(r"\\text{\1}", HALF_OF_DAY.sub(r"\1m", text))
    text = SPACING.sub("", PHANTOM.sub("", text))
    text = REPEATING.sub(repeating, FRACTION.sub(r"\\frac", STYLE.sub("", text)))
    text = text.replace(r"\$", "").replace("$", "").replace(r"\%", "%").replace(r"\#", "")
    if not BRACKETED_LIST.search(text):
        text = THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    return trimmed(text)


def repeating(decimal: re.Match[str]) -> str:
    r"""Write `0.1\overline{6}` as a fraction."""
    whole, fixed, period = decimal.groups()
    below = 10 ** len(fixed) * (10 ** len(period) - 1)
    above = int(f"{whole}{fixed}" or "0") * (10 ** len(period) - 1) + int(period)
    return rf"\frac{{{above}}}{{{below}}}"


def without_math_mode(text: str) -> str:
    r"""Take off one pair of `$…$` or `\(…\)` around the whole."""
    for opening, closing in MATH_MODES:
        inside = text.removeprefix(opening).removesuffix(closing)
        if len(text) - len(inside) == len(opening) + len(closing) and closing not in inside.replace(
            r"\$", ""
        ):
            return trimmed(inside)
    return text


def trimmed(text: str) -> str:
    """Drop space around the text and punctuation at its end."""
    return text.strip().rstrip(".,; \n")


def ungroup(text: str) -> str:
    r"""Join the digits of `10,\!000`, `10{,}000` and `10\,000`, and drop what negative space is left.

    With its spacing this is a number anywhere; `(1,000)` without it may be a pair.
    """
    text = GROUPED.sub("", text)
    return text.replace(r"\!", "").replace("{,}", ",")


def tokenize(text: str) -> list[Token]:
    """Return the tokens of a cleaned answer."""
    tokens: list[Token] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise Malformed(f"cannot read {text[position]!r}")
        kind = match.lastgroup
        value = match[kind or 0]
        glued = match.start(kind or 0) == position
        position = match.end()
        if kind == "words":
            tokens.extend(words(value))
        elif kind == "run":
            tokens.extend(letters(value))
        else:
            tokens.append(Token(kind, value, glued))  # type: ignore[arg-type]
    return tokens


def words(value: str) -> list[Token]:
    """Return a separator for `and` and `or`, nothing for punctuation, else the words themselves."""
    if re.match(r"\s*-?\.?\d", value):
        return tokenize(value)  # `\text{4 cm}`
    if LETTERS.fullmatch(value):
        return [
            Token("separator", ",") if part == "," else Token("words", part) for part in value if part != " "
        ]
    if SEPARATING.fullmatch(value) or value.strip() in (",", ";"):
        return [Token("separator", ",")]
    if not any(character.isalnum() for character in value):
        return []
    return [Token("words", " ".join(value.split()))]


def letters(run: str) -> list[Token]:
    """Return a run of letters as a word, a function or a product of one-letter names: `cm`, `sin`, `xy`."""
    if run.lower() in ("and", "or"):
        return [Token("separator", ",")]
    if run in FUNCTION_NAMES:
        return [Token("command", f"\\{run}")]
    if run == "pi":
        return [Token("command", r"\pi")]
    if run.lower() in UNIT_WORDS or len(run) > 3:
        return [Token("words", run)]
    return [Token("letter", letter, index > 0) for index, letter in enumerate(run)]
