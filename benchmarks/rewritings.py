r"""Other ways to write an answer.

Made from the text of a gold answer by rules that are right by construction and know nothing of the
verifier: `\frac{3}{4}` may be written `0.75`. A rule that does not fit yields nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction

INTEGER = re.compile(r"-?\d+")
DECIMAL = re.compile(r"(-?)(\d*)\.(\d+)")
FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
SURD = re.compile(r"(-?)(\d*) ?\\sqrt\{?(\d+)\}?")
CIRCLE = re.compile(r"(-?)(\d+) ?\\pi")
PAIR = re.compile(r"\(([^()\[\],]+(?:,[^()\[\],]+)+)\)")
INTERVAL = re.compile(r"([(\[])([^()\[\],]+),([^()\[\],]+)([)\]])")
LIST = re.compile(r"[^()\[\]{},=]+(?:, ?[^()\[\]{},=]+)+")
UNIT = re.compile(r"([\d.]+) ?\\(?:text|mbox)\{([^{}]+)\}")
DEGREES = re.compile(r"(-?[\d.]+)\^\{?\\circ\}?")
PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?\\%")
MONEY = re.compile(r"\\\$([\d.]+)")
BASED = re.compile(r"(\d+)_\{?(\d+)\}?")
WORD = re.compile(r"\\text\{\(?([A-Za-z]+)\)?\}")
POLYNOMIAL = re.compile(r"[-+ 0-9a-z^{}]*[a-z][-+ 0-9a-z^{}]*")
TERM = re.compile(r"[-+]?[^-+]+")
SOLVED = re.compile(r"([a-zA-Z]) ?= ?(-?[\d.]+|-?\\frac\{\d+\}\{\d+\})")
MATRIX = re.compile(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", re.DOTALL)
Rule = Callable[[str], Iterator[str]]


def plain(gold: str) -> str:
    return gold.replace(r"\left", "").replace(r"\right", "").strip().rstrip(".")


def is_value(gold: str) -> bool:
    """Tell whether this is one number or expression: no relation, list, word or bracketed thing."""
    return not re.search(r"[=<>,:;_]|\\(?:text|mbox|le|ge|in|cup|begin|pm|%|circ|\$|approx)", gold)


def shown(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    if value.denominator == 1:
        return str(value.numerator)
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def is_list(gold: str) -> bool:
    """Tell whether commas separate values here, and not thousands or words."""
    grouped = re.search(r",\\!|\d,\d{3}(?!\d)", gold)
    return bool(LIST.fullmatch(gold)) and r"\text" not in gold and not grouped


def fraction_parts(gold: str) -> tuple[str, int, int] | None:
    """Return the sign and what stands above and below the line."""
    found = FRACTION.fullmatch(gold)
    return (found[1], int(found[2]), int(found[3])) if found else None


def surd_parts(gold: str) -> tuple[str, int, int] | None:
    """Return the sign and what stands before and under the root."""
    found = SURD.fullmatch(gold)
    return (found[1], int(found[2] or 1), int(found[3])) if found else None


def wrapping(gold: str) -> Iterator[str]:
    yield f"${gold}$"
    yield rf"\({gold}\)"
    yield f" {gold} "
    yield f"{gold}."
    yield rf"\displaystyle {gold}"
    yield rf"{gold}\,"


def words_before(gold: str) -> Iterator[str]:
    if is_value(gold) and not gold.endswith("."):
        yield rf"\text{{The answer is }} {gold}"
        yield rf"x = {gold}"
        yield rf"{gold} \text{{ units}}"


def spacing(gold: str) -> Iterator[str]:
    if not re.search(r"\\text|\\mbox|\\begin|\d \d|\\[a-zA-Z]+ ", gold):
        yield gold.replace(" ", "")
        yield gold.replace(", ", r",\; ")
        yield re.sub(r" ?([+=]) ?", r" \1 ", gold)
    if (
        r"\left" not in gold
        and re.fullmatch(r"[(\[].*[)\]]", gold)
        and gold.count("(") + gold.count("[") == 1
    ):
        yield rf"\left{gold[:-1]}\right{gold[-1]}"
    yield gold.replace(r"\left", "").replace(r"\right", "")


def styled_fraction(gold: str) -> Iterator[str]:
    if r"\frac{" in gold:
        yield gold.replace(r"\frac{", r"\dfrac{")
        yield gold.replace(r"\frac{", r"\tfrac{")
        yield re.sub(r"\\frac\{(\d)\}\{(\d)\}", r"\\frac\1\2", gold)
        yield re.sub(r"(?<![\d)} ])\\frac\{(\d+)\}\{(\d+)\}(?![\w\\({^])", r"{\1}/{\2}", gold)


def braced_power(gold: str) -> Iterator[str]:
    if re.search(r"\^\d(?!\d)", gold):
        yield re.sub(r"\^(\d)(?!\d)", r"^{\1}", gold)
    if re.search(r"[a-z]\^\d(?!\d)", gold):
        yield (
            re.sub(r"\b([a-z])\^2(?!\d)", r"\1\\cdot \1", gold)
            if re.fullmatch(r"\d*[a-z]\^2", gold)
            else gold
        )


def integer(gold: str) -> Iterator[str]:
    if not INTEGER.fullmatch(gold):
        return
    number = int(gold)
    yield f"{number}.0"
    yield f"{number}.00"
    yield rf"\frac{{{number}}}{{1}}"
    yield rf"\frac{{{3 * number}}}{{3}}"
    yield f"({number})"
    yield rf"\mathbf{{{number}}}"
    yield rf"\text{{{number}}}"
    yield rf"{number} \text{{ cm}}"
    yield rf"{number}^\circ"
    yield rf"\${number}"
    yield f"n = {number}"
    if number > 0:
        yield f"+{number}"
        yield rf"\sqrt{{{number * number}}}"
    if number < 0:
        yield gold.replace("-", "−")
        yield f"- {-number}"
    if abs(number) >= 1000:
        yield f"{number:,}"
        yield f"{number:,}".replace(",", "{,}")
        yield f"{number:,}".replace(",", r",\!")
        yield f"{number:,}".replace(",", r"\,")
    if number and number % 1000 == 0:
        yield rf"{number // 1000}\times 10^3"


def decimal(gold: str) -> Iterator[str]:
    if DECIMAL.fullmatch(gold):
        yield f"{gold}0"
        yield shown(Fraction(gold))
        if re.match(r"-?0\.", gold):
            yield gold.replace("0.", ".", 1)


def fraction(gold: str) -> Iterator[str]:
    if (parts := fraction_parts(gold)) is None:
        return
    sign, above, below = parts
    yield f"{sign}{above}/{below}"
    yield f"{sign}({above}/{below})"
    yield rf"{sign}\frac{{{2 * above}}}{{{2 * below}}}"
    yield rf"{sign}{above} \div {below}"
    yield rf"{sign}\frac{{1}}{{{below}}}\cdot {above}"
    if sign:
        yield rf"\frac{{-{above}}}{{{below}}}"
        yield rf"\frac{{{above}}}{{-{below}}}"
        yield rf"-\left(\frac{{{above}}}{{{below}}}\right)"
    whole, rest = divmod(above, below)
    if whole and rest:
        yield rf"{sign}{whole}\frac{{{rest}}}{{{below}}}" if not sign else gold
        yield gold if sign else f"{whole} {rest}/{below}"
    value = Fraction(above, below)
    power = next((power for power in range(1, 7) if 10**power % value.denominator == 0), None)
    if power:
        yield f"{sign}{float(value):.{power}f}"


def surd(gold: str) -> Iterator[str]:
    if (parts := surd_parts(gold)) is None:
        return
    sign, outside, inside = parts
    yield rf"{sign}\sqrt{{{outside * outside * inside}}}"
    yield rf"{sign}{outside}\cdot\sqrt{{{inside}}}"
    yield rf"{sign}{outside}\times {inside}^{{1/2}}"
    yield rf"{sign}{outside}\sqrt[2]{{{inside}}}"
    yield rf"{sign}\sqrt{{{inside}}}\cdot {outside}"
    yield rf"{sign}\frac{{{outside * inside}}}{{\sqrt{{{inside}}}}}"


def circle(gold: str) -> Iterator[str]:
    found = CIRCLE.fullmatch(gold)
    if found:
        yield rf"{found[1]}{found[2]}\cdot\pi"
        yield rf"{found[1]}\pi\cdot {found[2]}"
        yield f"{found[1]}{found[2]}π"


def collection(gold: str) -> Iterator[str]:
    if is_list(gold):
        parts = [part.strip() for part in gold.split(",")]
        yield ", ".join(reversed(parts))
        yield rf"\{{{','.join(parts)}\}}"
        yield rf"\{{{', '.join(reversed(parts))}\}}"
        yield rf"{', '.join(parts[:-1])} \text{{ and }} {parts[-1]}"


def pair(gold: str) -> Iterator[str]:
    if PAIR.fullmatch(plain(gold)):
        parts = [part.strip() for part in plain(gold)[1:-1].split(",")]
        yield f"({', '.join(parts)})"
        yield f"({','.join(parts)})"
        spaced = r",\; ".join(parts)
        yield rf"\left({spaced}\right)"
        yield rf"(x, y) = ({', '.join(parts)})" if len(parts) == 2 else gold


def interval(gold: str) -> Iterator[str]:
    found = INTERVAL.fullmatch(plain(gold))
    if not found or ({found[1], found[4]} == {"(", ")"} and r"\infty" not in gold):
        return
    low, high = found[2].strip(), found[3].strip()
    left, right = (r"\le" if found[1] == "[" else "<"), (r"\le" if found[4] == "]" else "<")
    yield rf"x \in {plain(gold)}"
    if low != r"-\infty" and high != r"\infty":
        yield rf"{low} {left} x {right} {high}"
    elif low != r"-\infty":
        yield f"x > {low}" if left == "<" else rf"x \ge {low}"
    elif high != r"\infty":
        yield rf"x {right} {high}"


def union(gold: str) -> Iterator[str]:
    if r"\cup" in gold:
        parts = [part.strip() for part in plain(gold).split(r"\cup")]
        yield r" \cup ".join(parts)
        yield r"\cup".join(reversed(parts))
        yield " ∪ ".join(parts)


def measured(gold: str) -> Iterator[str]:
    for pattern, others in (
        (UNIT, (r"{0}", r"{0}\ \mathrm{{{1}}}")),
        (DEGREES, (r"{0}", r"{0}^{{\circ}}", r"{0}°", r"{0}\text{{ degrees}}")),
        (PERCENT, (r"{0}", r"{0}%", r"{0} \%", r"{0}\text{{ percent}}")),
        (MONEY, (r"{0}", r"{0} \text{{ dollars}}", r"\$ {0}")),
        (BASED, (r"{0}", r"{0}_{{{1}}}", r"{0}_{1}")),
    ):
        if found := pattern.fullmatch(gold):
            for other in others:
                if r"\mathrm" not in other or found[2].strip().isalpha():
                    yield other.format(*found.groups())
    if found := PERCENT.fullmatch(gold):
        yield shown(Fraction(found[1]) / 100)


def worded(gold: str) -> Iterator[str]:
    if found := WORD.fullmatch(gold):
        yield found[1]
        yield found[1].lower()
        yield rf"\textbf{{{found[1]}}}"
        yield rf"\mathrm{{{found[1]}}}"
        if len(found[1]) == 1:
            yield f"({found[1]})"
            yield rf"\textbf{{({found[1]})}}"


def reordered(gold: str) -> Iterator[str]:
    if POLYNOMIAL.fullmatch(gold) and ("+" in gold or "-" in gold[1:]):
        terms = [term.replace(" ", "") for term in TERM.findall(gold.replace("^{", "^{"))]
        if all(term.count("{") == term.count("}") for term in terms) and "".join(terms) == gold.replace(
            " ", ""
        ):
            turned = [term if term[0] in "+-" else f"+{term}" for term in reversed(terms)]
            yield "".join(turned).removeprefix("+")
            yield f"({gold})"
            yield f"-({''.join(term.translate(SWAP) for term in turned).removeprefix('+')})"


SWAP = str.maketrans("+-", "-+")


def solved(gold: str) -> Iterator[str]:
    if found := SOLVED.fullmatch(gold):
        yield found[2]
        yield f"{found[1]}={found[2]}"
        yield f"{found[2]} = {found[1]}"


def matrix(gold: str) -> Iterator[str]:
    if found := MATRIX.fullmatch(gold):
        yield rf"\begin{{bmatrix}}{found[1]}\end{{bmatrix}}"
        yield re.sub(r"\s+", " ", gold)
        yield re.sub(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", r"\1\2/\3", gold)


REWRITINGS: tuple[Rule, ...] = (
    wrapping, words_before, spacing, styled_fraction, braced_power, integer, decimal, fraction, surd, circle,
    collection, pair, interval, union, measured, worded, reordered, solved, matrix,
)  # fmt: skip


def rewritings(gold: str) -> Iterator[tuple[str, str]]:
    """Yield (rule, other way to write the answer)."""
    for rule in REWRITINGS:
        for other in dict.fromkeys(rule(gold)):
            if other != gold:
                yield rule.__name__, other
