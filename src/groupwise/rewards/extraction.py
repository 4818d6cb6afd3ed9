"""Reading `<think>…</think><answer>…</answer>` out of a completion.

The prompt already ends in `<think>`, so a completion begins inside the thinking. Everything before
`</think>` is thinking, where the model may write what it likes, an `<answer>` included. The answer
is the one `<answer>` block after it.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from groupwise.rewards.verify.arithmetic import evaluate_expression
from groupwise.rewards.verify.vocabulary import CHANGING, HARMLESS, SIGN_WORDS

THINK, END_THINK = "<think>", "</think>"
ANSWER, END_ANSWER = "<answer>", "</answer>"


def final_answer(completion: str) -> str | None:
    """Return what stands in the one answer block after the thinking, or None.

    Text around the block is allowed here; `is_well_formed` is what refuses it.
    """
    return only_block(completion, after=END_THINK, opening=ANSWER, closing=END_ANSWER)


def is_well_formed(completion: str) -> bool:
    """Tell whether a completion is: thinking, `</think>`, space, one answer block, space.

    Thinking and answer must not be blank, and neither may hold a think tag.
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
    """Return what stands in the one block after the tag that ends the thinking, or None.

    Two blocks, or a second end of the thinking that would let the writer pick which part counts, are none
    at all: nothing is gained by writing more. A completion that never ends its thinking may still have
    exactly one block in all. Text around the block is allowed here.
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
"""Characters that any work has: `11+11=22` has these."""
ENOUGH = 1000
"""Characters of the working out that are looked at."""
ANY_TAG = re.compile("|".join(TAGS))


def solution_of(completion: str) -> str | None:
    """Return what stands in the one solution block after the working out, or None."""
    return only_block(completion, after=END, opening=SOLUTION, closing=END_SOLUTION)


def is_exact(completion: str, *, least_working: int) -> bool:
    """Tell whether a completion is the working out, the solution, and nothing else.

    Each tag stands once, and the working out has at least `least_working` characters besides spaces: half of
    them or more letters or digits, and not the same few again and again.
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
    """Tell whether something stands there that may be work: `........` is none."""
    start = "".join(working[:ENOUGH].split())
    said = sum(map(str.isalnum, start))
    return len(start) >= least and 2 * said >= least and len(set(start)) >= DIFFERENT


def has_tags(completion: str) -> bool:
    """Tell whether any of the four tags stands in the completion."""
    return ANY_TAG.search(completion) is not None


def tags_once(completion: str) -> int:
    """Return how many of the four tags stand in the completion exactly once."""
    found = ANY_TAG.findall(completion)
    return [found.count(tag) for tag in TAGS].count(1)


BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
BARE = re.compile(r"[^\s{}$\\,;]+")


def last_box(text: str) -> str | None:
    r"""Return what stands in the last balanced `\boxed{…}` or `\fbox{…}`; None for nothing at all.

    `\boxed 42` counts too. A box that is never closed hides no earlier one, and a box inside another
    is part of that one. The time is linear in the text.
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
            continue  # inside the box before
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
    # The whole of it may be a box again.
    inner = BOX.match(content)
    if inner and content[inner.end() : inner.end() + 1] == "{" and content.endswith("}"):
        return last_box(content) if content.count("\\boxed") + content.count("\\fbox") < 9 else None
    return content or None


def closing_braces(text: str, start: int) -> dict[int, int]:
    """Return where each opening brace from there on that is closed is closed; escaped braces do not count."""
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
