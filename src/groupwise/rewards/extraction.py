"""Extract the answer from a completion: tagged blocks, `\\boxed{…}`, or the one number a short text states.

With `<think>…</think><answer>…</answer>`, the prompt already ends in `<think>`, so a completion begins
inside the thinking. Everything before `</think>` is thinking and may contain anything, even an `<answer>`.
The answer is the only `<answer>` block after it.

`evaluate_expression`, at the end, is exact arithmetic on untrusted text.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

from groupwise.rewards.verify.vocabulary import CHANGING, HARMLESS, SIGN_WORDS, UNITS

THINK, END_THINK = "<think>", "</think>"
ANSWER, END_ANSWER = "<answer>", "</answer>"


def final_answer(completion: str) -> str | None:
    """Return the content of the only answer block after the thinking, or None.

    Text around the block is allowed here; `is_well_formed` rejects it.
    """
    return only_block(completion, after=END_THINK, opening=ANSWER, closing=END_ANSWER)


def is_well_formed(completion: str) -> bool:
    """Return whether a completion is thinking, `</think>`, whitespace, one answer block, whitespace.

    Thinking and answer must not be blank and must not contain a think tag.
    """
    thinking, ended, rest = completion.partition(END_THINK)
    if not ended or END_THINK in rest:
        return False
    block = rest.strip()
    return (
        THINK not in completion
        and bool(thinking.strip())
        and block.startswith(ANSWER)
        and block.endswith(END_ANSWER)
        and bool(final_answer(completion))
    )


def only_block(completion: str, *, after: str, opening: str, closing: str) -> str | None:
    """Return the content of the only block after the tag that ends the thinking, or None.

    Two blocks, or a second tag that ends the thinking, give None: hedging must not pay. A completion that
    never ends its thinking may still have exactly one block in total. Text around the block is allowed.
    """
    _, ended, rest = completion.partition(after)
    if after in rest:
        return None
    scope = rest if ended else completion
    if scope.count(opening) != 1 or scope.count(closing) != 1:
        return None
    before, _, block = scope.partition(opening)
    if closing in before:
        return None
    return block.partition(closing)[0].strip()


START, END = "<start_working_out>", "<end_working_out>"
SOLUTION, END_SOLUTION = "<SOLUTION>", "</SOLUTION>"
TAGS = (START, END, SOLUTION, END_SOLUTION)
DIFFERENT = 4
"""Minimum number of distinct characters in the working out: `11+11=22` has four."""
ENOUGH = 1000
"""Number of leading characters of the working out that are checked."""
ANY_TAG = re.compile("|".join(TAGS))


def solution_of(completion: str) -> str | None:
    """Return the content of the only solution block after the working out, or None."""
    return only_block(completion, after=END, opening=SOLUTION, closing=END_SOLUTION)


def is_exact(completion: str, *, least_working: int) -> bool:
    """Return whether a completion is the working out, the solution, and nothing else.

    Each tag must occur once. The working out must have at least `least_working` non-space characters, half
    of which letters or digits, and must not repeat the same few characters.
    """
    text = completion.strip()
    if not (text.startswith(START) and text.endswith(END_SOLUTION)):
        return False
    if tags_once(text) < len(TAGS):
        return False
    working, _, rest = text.removeprefix(START).partition(END)
    block = rest.strip()
    solution = block.removeprefix(SOLUTION).removesuffix(END_SOLUTION).strip()
    return has_work(working, least=least_working) and block.startswith(SOLUTION) and bool(solution)


def has_work(working: str, *, least: int) -> bool:
    """Return whether a text may be a working out: `........` is not."""
    start = "".join(working[:ENOUGH].split())
    alphanumeric = sum(map(str.isalnum, start))
    return len(start) >= least and 2 * alphanumeric >= least and len(set(start)) >= DIFFERENT


def has_tags(completion: str) -> bool:
    """Return whether the completion contains any of the four tags."""
    return ANY_TAG.search(completion) is not None


def tags_once(completion: str) -> int:
    """Return how many of the four tags occur exactly once in the completion."""
    tags = ANY_TAG.findall(completion)
    return [tags.count(tag) for tag in TAGS].count(1)


BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
BARE = re.compile(r"[^\s{}$\\,;]+")


def last_box(text: str) -> str | None:
    r"""Return the content of the last balanced `\boxed{…}` or `\fbox{…}`, or None if there is none.

    `\boxed 42` counts too. An unclosed box does not hide an earlier one, and a nested box is part of the
    outer one. Runs in linear time.
    """
    first = BOX.search(text)
    if first is None:
        return None
    closes = closing_braces(text, first.start())
    content: str | None = None
    end = 0
    for box in BOX.finditer(text, first.start()):
        start = box.end()
        if start < end:
            continue  # nested in the previous box
        if text[start : start + 1] == "{":
            if start in closes:
                end = closes[start]
                content = text[start + 1 : end]
        elif bare := BARE.match(text, start):
            end = bare.end()
            content = bare[0].rstrip(".")
    if content is None:
        return None
    content = content.strip()
    # The whole content may be a box again.
    inner = BOX.match(content)
    if inner and content[inner.end() : inner.end() + 1] == "{" and content.endswith("}"):
        return last_box(content) if content.count("\\boxed") + content.count("\\fbox") < 9 else None
    return content or None


def closing_braces(text: str, start: int) -> dict[int, int]:
    """Map each matched opening brace from `start` on to its closing brace, ignoring escaped braces."""
    open_at: list[int] = []
    closes: dict[int, int] = {}
    for brace in BRACE.finditer(text, start):
        if brace[0] == "{":
            open_at.append(brace.start())
        elif brace[0] == "}" and open_at:
            closes[open_at.pop()] = brace.start()
    return closes


MAX_CHARACTERS = 200
MAX_DIGITS = 50

INVISIBLE = dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", "")
TYPOGRAPHIC = str.maketrans(
    {
        **{"−": "-", "–": "-", "—": "-", "×": "*", "÷": "/", "\u00a0": " ", "\u202f": " ", "’": "'"},
        **{"“": '"', "”": '"'},
        **INVISIBLE,
    }
)
NUMBER = re.compile(r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")
CURRENCY = "[$€£¥₹]"
SIGN = re.compile(rf"([-+])(\s*)(?:\\?{CURRENCY})?\s*$|{CURRENCY}\s*([-+])(\s*)$")
SIGN_MAY_FOLLOW = re.compile(r"(?:^|[:.,;(\[{\"'=$€£¥₹#]|\n)\s*$")
EMPHASIS = re.compile(r"(?<![\w*)])(\*{1,3}|_{1,3}|`)(?=[^\s*_`])([^*_`]+)(?<=\S)\1(?![\w*(])")
LETTER = "[^\\W\\d_²³¹⁰-⁹₀-₉¼-¾⅐-⅞]"
WORD = re.compile(rf"{LETTER}+(?:'{LETTER}+)?")
BESIDE_WORDS = re.compile(rf"(?:w|\s|[.,:;'\"()\[\]{{}}#°\\]|{CURRENCY}|(?<=w)[-/](?=w)|(?<=w)[²³!])*")
"""Text allowed beside a number, words replaced by `w`: nothing that changes it (`<`, `~`, `^`, `+` …)."""
DIRECTLY_AFTER = re.compile(r"\s*(?:\\?%)?(?!\s*[!%²³*^/]|\.\.)")
"""The end of a number: not followed by a factorial, power or fraction."""
RATE = re.compile(r"\s*/\s*(?=[^\W\d_])")
HYPHEN = re.compile(r"-(?=[^\W\d_])")
LEFT_OVER = re.compile(r"\bleft over\b", re.IGNORECASE)
HOW_MANY = re.compile(r"\bhow (?:many|much)((?: [^\W\d_]+){1,2})", re.IGNORECASE)
LATEX_WORDS = frozenset(("boxed", "text", "mathrm", "textbf", "mathbf", "percent"))


@lru_cache(maxsize=4096)  # several rewards read the same answer
def stated_number(text: str, question: str = "") -> Fraction | None:
    """Return the number that a short text states; None if it states none, or several.

    Thousands commas, currency, units, harmless words and words of the question are ignored. Any other word,
    or one that changes a number, gives None. So do two numbers, unless they are the sides of a true equation
    or form a fraction in lowest terms.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = EMPHASIS.sub(r"\2", EMPHASIS.sub(r"\2", text.translate(TYPOGRAPHIC).strip()))
    if "=" in text:
        return equation_value(text.split("="), question)
    numbers = list(NUMBER.finditer(text))
    if len(numbers) == 2 and text[numbers[0].end() : numbers[1].start()].strip() == "/":
        return fraction(text, numbers[0], numbers[1], question)
    if len(numbers) != 1:
        return None
    return only_number(text, numbers[0], question)


def only_number(text: str, number: re.Match[str], question: str) -> Fraction | None:
    """Return the value of the only number in a text."""
    value = signed(text[: number.start()], number[0], question)
    return value if value is not None and is_harmless_after(text[number.end() :], question) else None


def signed(before: str, digits: str, question: str) -> Fraction | None:
    """Return a number with its sign; None if anything but harmless words precedes it."""
    digits = digits.replace(",", "")
    if len(digits) > MAX_DIGITS:
        return None
    value = Fraction(digits)
    words = WORD.findall(before)
    if sign := SIGN.search(before):
        group = 1 if sign[1] else 3
        rest = before[: sign.start(group)]
        # "x - 5" is a subtraction: after a word, only a minus directly before the number is a sign.
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


def is_harmless_after(after: str, question: str) -> bool:
    """Return whether the text that follows a number leaves its value unchanged."""
    if rate := RATE.match(after):
        return is_harmless(after[rate.end() :], question)
    end = DIRECTLY_AFTER.match(after)
    if end is None:
        return False
    rest = after[end.end() :]
    if (glued := WORD.match(rest)) and len(glued[0]) == 1 and glued[0].casefold() not in UNITS:
        return False  # "72a"
    return is_harmless(rest[1:] if HYPHEN.match(rest) else rest, question)


def is_harmless(beside: str, question: str) -> bool:
    """Return whether the words and punctuation beside a number leave its value unchanged."""
    if not beside or beside.isspace():
        return True
    allowed, counted = words_of_question(question)
    beside = LEFT_OVER.sub("left", beside)
    for word in WORD.findall(beside):
        word = word.casefold()
        if word in CHANGING and word not in counted:
            return False
        if word not in HARMLESS and word not in LATEX_WORDS and word.removesuffix("'s") not in allowed:
            return False
    return bool(BESIDE_WORDS.fullmatch(WORD.sub("w", beside)))


@lru_cache(maxsize=4096)
def words_of_question(question: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the words of a question, and the words it asks to count: `How many dozen eggs …`."""
    words = {word.casefold() for word in WORD.findall(question) if len(word) > 1}
    words |= {word.removesuffix("'s") for word in words}
    counted = {word.casefold() for phrase in HOW_MANY.findall(question) for word in phrase.split()}
    return frozenset(words), frozenset(counted - SIGN_WORDS)


def fraction(text: str, above: re.Match[str], below: re.Match[str], question: str) -> Fraction | None:
    """Return a/b if it is in lowest terms: `144/2` is unfinished arithmetic."""
    numerator = signed(text[: above.start()], above[0], question)
    if (
        numerator is None
        or len(below[0]) > MAX_DIGITS
        or not is_harmless_after(text[below.end() :], question)
    ):
        return None
    denominator = Fraction(below[0].replace(",", ""))
    if denominator.denominator != 1 or numerator.denominator != 1 or denominator < 2:
        return None
    value = numerator / denominator
    return value if value.denominator == denominator else None


def equation_value(sides: list[str], question: str) -> Fraction | None:
    """Return the common value of the sides of an equation, if one of them is a plain number.

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
    """Return whether a side only names something: letters, and no word that changes a number."""
    words = side.casefold().replace("'", "").split()
    return all(word.isalpha() and word not in CHANGING for word in words)


# The length is checked before parsing (MAX_CHARACTERS). Without powers a value has no more digits than its
# text, so this limit also bounds the size of numbers and the run time.
MAX_DEPTH = 20

ASCII_SIGNS = str.maketrans({"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-"})
ALLOWED = frozenset("0123456789+-*/() ")
TWO_SIGNS = re.compile(r"(?:^|[-+*/(]) *- *-")
"""Two signs in a row, as in `--5`; `-(-5)` has one for the number and one for the parenthesis."""
Exact = int | Fraction
"""A Fraction only after a division: integer arithmetic is ten times faster."""
OPERATIONS: dict[type[ast.operator], Callable[[Exact, Exact], Exact]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: Fraction,
}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The value of an expression and the integers written in it, smallest first."""

    value: Fraction
    numbers: tuple[int, ...]


@lru_cache(maxsize=4096)  # the answers of a group often repeat
def evaluate_expression(text: str) -> Arithmetic | None:
    """Evaluate an expression exactly; return None for anything but plain arithmetic.

    Example: "(1 + 2) / 4" -> Arithmetic(value=Fraction(3, 4), numbers=(1, 2, 4))

    A number or a parenthesis may have one minus sign. Returns None for powers, `//`, decimals, names,
    non-ASCII digits, division by zero, more than MAX_CHARACTERS and nesting beyond MAX_DEPTH.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = " ".join(text.translate(ASCII_SIGNS).split())
    if not text or not ALLOWED.issuperset(text) or is_too_deep(text) or TWO_SIGNS.search(text):
        return None
    try:
        tree = ast.parse(text, mode="eval")
        numbers: list[int] = []
        value = Fraction(evaluate(tree.body, numbers))
    except (SyntaxError, ArithmeticError):
        return None
    return Arithmetic(value, tuple(sorted(numbers)))


def is_too_deep(text: str) -> bool:
    """Return whether parentheses are nested more than MAX_DEPTH levels."""
    if text.count("(") <= MAX_DEPTH:  # fast path: a scan of the text is slow
        return False
    return max(accumulate((character == "(") - (character == ")") for character in text)) > MAX_DEPTH


def evaluate(node: ast.expr, numbers: list[int]) -> Exact:
    """Return the value of a syntax tree and append its literals to `numbers`."""
    # `match` is four times slower here.
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        numbers.append(node.value)
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](evaluate(node.left, numbers), evaluate(node.right, numbers))
    if isinstance(node, ast.UnaryOp) and type(node.op) is ast.USub:
        return -evaluate(node.operand, numbers)
    raise ArithmeticError(f"{type(node).__name__} is not plain arithmetic")
