"""Turn the text of an answer into tokens without spacing and styling, and compare answers as text.

The second half handles words: phrases, units, and words beside a value that may change it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from groupwise.rewards.verify.vocabulary import HARMLESS, POWERS_OF_TEN, SIGN_WORDS, UNITS

MAX_CHARACTERS = 1000

Kind = Literal["number", "letter", "command", "words", "symbol", "separator"]


class LatexToken(NamedTuple):
    """One token of an answer; `glued` means that no space precedes it."""

    kind: Kind
    text: str
    glued: bool = False


class Malformed(Exception):
    """Not a valid answer in any notation: it is wrong whatever the truth is."""


class Unfamiliar(Exception):
    """Notation that this parser does not support, though it may be valid."""


TYPOGRAPHIC = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "π": r"\pi ",
        "∞": r"\infty ", "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ",
        "∈": r"\in ", "²": "^2", "³": "^3", "±": r"\pm ",
        "½": r"\frac12 ", "¼": r"\frac14 ", "¾": r"\frac34 ", "⅓": r"\frac13 ", "⅔": r"\frac23 ",
        "\u00a0": " ", "√": r"\sqrt ",
        "θ": r"\theta ", "α": r"\alpha ", "≈": r"\approx ", "∅": r"\emptyset ",
        "∨": r"\lor ", "∧": r"\land ", "\u200b": "", "\u200c": "", "\u200d": "", "\u2060": "", "\ufeff": "",
    }
)  # fmt: skip
SPACING = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![a-zA-Z])\.?|\\quad|\\qquad"
)
GROUPED = re.compile(
    r"(?<![\d.,])[1-9]\d{0,2}(?:(?:\\!)*(?:,(?:\\! ?)+|\{,\}|\\,)(?:\\!)*\d{3})+(?!\d)", re.ASCII
)
SPACE = re.compile(r"(\\\\)|\\[,;:> ]|~")
"""Spacing commands, but not the second half of the `\\\\` that ends a matrix row."""
AM_PM = re.compile(r"\b([ap])\.\s?m\b\.?")
STYLED_WORDS = re.compile(r"\\(?:mathrm|operatorname|rm)\s*\{([a-zA-Z. ]{2,})\}")
THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
ROOT_SIGN = re.compile(r"√\s*(\d+)")
REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{(\d{1,30})\}")
BRACKETED_LIST = re.compile(r"(?:[(\[]|\\\{)[^()\[\]]*,")
STYLE = re.compile(
    r"\\(?:mathbf|mathrm|mathit|mathsf|mathbb|boldsymbol|bm|rm|bf|operatorname|ensuremath|underline"
    r"|small|normalsize|large|Large|LARGE|huge|Huge)(?![a-zA-Z])\*?"
)
COLOR = re.compile(r"\\(?:textcolor|color)\s*\{[a-zA-Z]+\}")
OVER = re.compile(r"\{([^{}]*)\\(over|choose)(?![a-zA-Z])([^{}]*)\}")
REALS = re.compile(r"\\(?:mathbb|Bbb)\s*(?:\{\s*R\s*\}|R(?![a-zA-Z]))|ℝ")
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
UNIT_WORDS = (frozenset(UNITS) - frozenset("hslgm") - {"in"}) | {"men", "percent"}
"""Short runs of letters that are words. Outside `\\text{}` a single letter is a variable."""
FUNCTION_NAMES = frozenset("sin cos tan cot sec csc log ln exp sqrt arcsin arccos arctan".split())  # noqa: SIM905
LETTERS = re.compile(r" *[a-zA-Z](?: *, *[a-zA-Z])+ *")
AND_OR_FIRST = re.compile(r"[\s,;]*\b(and|or)\b[\s,;]*", re.IGNORECASE)
AND_OR_LAST = re.compile(r"[\s,;]*\b(and|or)\b[\s,;]*$", re.IGNORECASE)
AND_OR_COMMANDS = {r"\land": "and", r"\wedge": "and", r"\lor": "or", r"\vee": "or"}
TEXT_WORD = re.compile(r"[^\W\d_]+")
LABEL = re.compile(r"(?<=[^\W\d_]):(?=\s)")
"""The colon of `Answer: 5`, unlike that of `8:34`."""
STARTS_WITH_NUMBER = re.compile(r"\s*-?\s?\.?\d", re.ASCII)
EQUALS_WORDS = frozenset(("is", "equals"))


@lru_cache(maxsize=4096)  # for its spelling, and for its tokens
def clean(text: str) -> str:
    """Return the text without styling, spacing, currency and thousands separators."""
    if len(text) > MAX_CHARACTERS:
        raise Malformed("too long")
    text = ungroup(ROOT_SIGN.sub(r"\\sqrt{\1}", text).translate(TYPOGRAPHIC))
    text = SPACE.sub(lambda space: space[1] or " ", text)
    text = without_math_mode(trimmed(text))
    text = REALS.sub(r"(-\\infty,\\infty)", COLOR.sub("", text))
    text = OVER.sub(as_command, text)
    text = STYLED_WORDS.sub(r"\\text{\1}", AM_PM.sub(r"\1m", text))
    text = SPACING.sub(" ", PHANTOM.sub(" ", text))  # a space: `5\quad6` is not 56
    text = REPEATING.sub(repeating, FRACTION.sub(r"\\frac", STYLE.sub("", text)))
    text = text.replace(r"\$", " ").replace("$", " ").replace(r"\%", "%").replace(r"\#", " ")
    if not BRACKETED_LIST.search(text):
        text = THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    return trimmed(text)


def as_command(infix: re.Match[str]) -> str:
    r"""Write `{3 \over 4}` as a fraction and `{5 \choose 2}` as a binomial coefficient."""
    above, name, below = infix.groups()
    return rf"\{'frac' if name == 'over' else 'binom'}{{{above}}}{{{below}}}"


def repeating(decimal: re.Match[str]) -> str:
    r"""Write `0.1\overline{6}` as a fraction."""
    whole, fixed, period = decimal.groups()
    below = 10 ** len(fixed) * (10 ** len(period) - 1)
    above = int(f"{whole}{fixed}" or "0") * (10 ** len(period) - 1) + int(period)
    return rf"\frac{{{above}}}{{{below}}}"


def without_math_mode(text: str) -> str:
    r"""Remove one pair of `$…$` or `\(…\)` around the whole text."""
    for opening, closing in MATH_MODES:
        inside = text.removeprefix(opening).removesuffix(closing)
        if len(text) - len(inside) == len(opening) + len(closing) and closing not in inside.replace(
            r"\$", ""
        ):
            return trimmed(inside)
    return text


def trimmed(text: str) -> str:
    """Strip surrounding whitespace and trailing punctuation."""
    if text.endswith("..."):
        raise Malformed("ends in an ellipsis")
    return text.strip().rstrip(".,; \n")


def ungroup(text: str) -> str:
    r"""Join the digits of `10,\!000`, `10{,}000` and `10\,000`, and drop remaining negative spaces.

    With such spacing this is always a number; `(1,000)` without it may be a pair.
    """
    text = GROUPED.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    return text.replace(r"\!", "").replace("{,}", ",")


def tokenize(text: str) -> list[LatexToken]:
    """Return the tokens of a cleaned answer."""
    tokens: list[LatexToken] = []
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
            tokens.extend(text_tokens(value))
        elif kind == "run":
            tokens.extend(letters(value))
        elif value in AND_OR_COMMANDS:
            tokens.append(LatexToken("separator", AND_OR_COMMANDS[value]))
        else:
            tokens.append(LatexToken(kind, value, glued))  # type: ignore[arg-type]
    return list(interpret_words(tokens))


def interpret_words(tokens: list[LatexToken]) -> Iterator[LatexToken]:
    """Replace words with a mathematical meaning: `minus 5`, `5 million`, `5 percent`, `x is 5`."""
    before: LatexToken | None = None
    for token in tokens:
        if token.kind != "words":
            yield token
            before = token
            continue
        parts = token.text.split()
        while (
            parts and before is not None and before.kind == "number" and normalized(parts[0]) in POWERS_OF_TEN
        ):
            yield LatexToken("command", r"\times")
            before = LatexToken("number", str(10 ** POWERS_OF_TEN[normalized(parts.pop(0))]))
            yield before
        if parts and before is not None and normalized(parts[0]) == "percent":
            before = LatexToken("symbol", "%")
            yield before
            parts.pop(0)
        last = normalized(parts[-1]) if parts else ""
        computes = len(parts) > 0 and (
            last in SIGN_WORDS or (last in EQUALS_WORDS and token is not tokens[-1])
        )
        if parts[: len(parts) - computes]:
            before = LatexToken("words", " ".join(parts[: len(parts) - computes]))
            yield before
        if computes:
            before = LatexToken("symbol", "-" if last in SIGN_WORDS else "=")
            yield before


def normalized(word: str) -> str:
    return word.strip(".,;:").casefold()


def text_tokens(value: str) -> list[LatexToken]:
    r"""Return the tokens of a `\text{}`: separators for `and` and `or`, numbers, words.

    Numbers among unknown words are words, too: `October 30` is not 30.
    """
    if value.strip() in (",", ";"):
        return [LatexToken("separator", ",")]
    if match := AND_OR_FIRST.match(value):
        return [LatexToken("separator", match[1].lower()), *text_tokens(value[match.end() :])]
    if match := AND_OR_LAST.search(value):
        return [*text_tokens(value[: match.start()]), LatexToken("separator", match[1].lower())]
    if LETTERS.fullmatch(value):
        return [
            LatexToken("separator", ",") if part == "," else LatexToken("words", part)
            for part in value
            if part != " "
        ]
    if not any(character.isalnum() for character in value):
        return tokenize(value.strip().strip(".,;:"))
    if any(character.isdigit() for character in value) and (
        STARTS_WITH_NUMBER.match(value) or all(is_known(word) for word in TEXT_WORD.findall(value))
    ):
        return list(numbers_among_words(value))
    return [LatexToken("words", " ".join(value.split()))]


def is_known(word: str) -> bool:
    word = word.casefold()
    return word in HARMLESS or word in SIGN_WORDS or word in POWERS_OF_TEN or word in ("and", "or", "percent")


def numbers_among_words(value: str) -> Iterator[LatexToken]:
    r"""Read `12 men`, `The answer is 5` and `5 or 6`, where letters are words."""
    position = 0
    value = THOUSANDS.sub(lambda number: number[0].replace(",", ""), value.rstrip())
    value = LABEL.sub(" ", value)
    while position < len(value):
        word = TEXT_WORD.match(value, position)
        if word is not None:
            position = word.end()
            if word[0].lower() in ("and", "or"):
                yield LatexToken("separator", word[0].lower())
            elif len(word[0]) == 1 and word[0] not in UNITS and word[0] not in HARMLESS:
                yield LatexToken("letter", word[0])
            else:
                yield LatexToken("words", word[0])
            continue
        match = TOKEN.match(value, position)
        if match is None or match.lastgroup in (None, "words"):
            if value[position] not in " \n.":
                raise Malformed(f"cannot read {value[position]!r}")
            position += 1
        elif match.lastgroup in ("run", "letter"):
            position = match.start(match.lastgroup)
        else:
            yield LatexToken(match.lastgroup, match[match.lastgroup])  # type: ignore[arg-type]
            position = match.end()


def letters(run: str) -> list[LatexToken]:
    """Return a run of letters as a word, a function or a product of variables: `cm`, `sin`, `xy`."""
    if run.lower() in ("and", "or"):
        return [LatexToken("separator", run.lower())]
    if run in FUNCTION_NAMES:
        return [LatexToken("command", f"\\{run}")]
    if run == "pi":
        return [LatexToken("command", r"\pi")]
    if run.lower() in UNIT_WORDS or len(run) > 3:
        return [LatexToken("words", run)]
    return [LatexToken("letter", letter, index > 0) for index, letter in enumerate(run)]


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
    """Return whether two answers are spelled the same, ignoring spacing and case; `1 2` is not `12`."""
    spelled = spelling(one)
    return bool(spelled) and spelled == spelling(other)


@lru_cache(maxsize=4096)  # the answers of a group often repeat, and share one ground truth
def spelling(text: str) -> str:
    with suppress(Malformed):
        text = clean(text)
    if whole := WHOLE_TEXT.fullmatch(text):
        text = whole[1].strip(" .")  # `yes` and `\\text{yes}` are spelled the same
    text = re.sub(r"(?<=[0-9.])\s+(?=[0-9.])", "␣", text)
    parts = COMMAND.split(re.sub(r"\s+", "", text))
    return "".join(part if part.startswith("\\") else part.casefold() for part in parts)


def is_phrase(text: str) -> bool:
    """Return whether letters are a word or a label, whose order matters, and not a product of variables.

    A product is in lower case and alphabetical order: `xy`, `abc`, but not `DNE` or `odd`.
    """
    text = text.strip()
    if not PHRASE.fullmatch(text):
        return False
    if len(text) == 2:
        return text in SHORT_WORDS or not text.islower()
    return len(text) > 3 or not text.islower() or any(a >= b for a, b in pairwise(text))


def same_phrase(predicted: str, truth: str) -> bool:
    """Compare with a word or a phrase, ignoring harmless words around it: `The answer is DNE`."""
    theirs = words_of(truth)
    ours = words_of(NAMED_SIDE.sub("", predicted, count=1))
    return ours == theirs or [word for word in ours if word in theirs or word not in HARMLESS] == theirs


def same_words(one: str, other: str) -> bool:
    """Compare as words: `\\text{(A)}`, `(A)` and `A` are equal, and so are lists of letters in any order."""
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


def units_in(phrases: Iterable[str]) -> frozenset[str]:
    """Return the canonical names of the units in some phrases."""
    return frozenset(UNITS[word] for phrase in phrases for word in words_of(phrase) if word in UNITS)


def says_more(phrases: Iterable[str], truth: Iterable[str]) -> bool:
    """Return whether words beside a value may change it. Harmless words and words of the truth do not."""
    phrases = list(phrases)
    ours = [word for phrase in phrases for word in words_of(WITHIN_WORD.sub(" ", phrase))]
    if not ours:
        return False
    truth = list(truth)
    if any(AND_OR.search(phrase) for phrase in phrases) and phrases != truth:
        return True
    known = {word for phrase in truth for word in words_of(phrase)}
    raised = any(UNITS.get(word) in ("square", "cubic") for word in ours)
    if raised and not known and not any(UNITS.get(word) in LENGTHS for word in ours):
        return True  # `5 square` may mean 25
    return any(word not in HARMLESS and word not in known and word != "/" for word in ours)
