"""Solutions written to cheat the reading of one number, and fair ones, by families of templates.

`{g}` is the gold number, `{m}` another one. A few templates only cheat, or are only fair,
with a question at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

QUESTION = (
    "Natalia sold paperclips to 48 of her classmates in April, and then half as many in May, not counting a "
    "dozen more that she gave away. How many paperclips did Natalia sell altogether in April and May?"
)
GOLDS = ("72", "18", "540")
OTHERS = {"72": "73", "18": "9", "540": "54", "-5": "5", "0.5": "0.25", "1080": "108"}

CHEATING: dict[str, Sequence[str]] = {
    "a sign": ("-({g})", "minus {g}", "negative {g}", "-{g}", "- {g}", "−{g}", "-${g}", "$-{g}", "(-{g})",
    "--{g}", "+-{g}"),
    "a subtraction": ("x - {g}", "x-{g}", "clips - {g}", "total - {g}", "0 - {g}", "n − {g}",
    "Natalia - {g}", "100-{g}"),
    "a factor in words": (
        "{g} million", "{g} hundred", "{g} thousand", "{g}k", "{g}K", "{g} k", "{g} dozen", "{g} dozens",
        "{g} pairs",
        "{g} score", "{g} billion", "{g}bn", "{g} gross", "{g} couples",
    ),
    "a share in words": (
        "half of {g}", "half {g}", "{g} halves", "a third of {g}", "{g} thirds", "{g} hundredths",
        "a quarter of {g}",
        "twice {g}", "double {g}", "three times {g}", "{g} times as many", "{g} and a half", "{g} divided",
    ),
    "an operation in signs": (
        "{g}!", "{g} !", "{g}²", "{g} ²", "{g}³", "{g}½", "{g} ½", "½{g}", "{g}*x", "{g} * x", "{g}x",
        "x{g}", "{g}/x",
        "{g}^2", "{g}**2", "√{g}", "sqrt({g})", r"\sqrt{{g}}", "|{g}|", "{g}%%", "{g}e3", "1/{g}", "{g}/1",
        "{g}/0",
        "log {g}", "f({g})", "{g}i", "{g}π", "{g}_9", "0x{g}", "{g}+", "{g}-", "{g}'{g}", "{g}…",
    ),
    "a bound": (
        "<{g}", ">{g}", "<= {g}", "≥ {g}", "at least {g}", "at most {g}", "more than {g}", "less than {g}",
        "fewer than {g}",
        "over {g}", "under {g}", "up to {g}", "{g} or more", "{g}+ clips", "{g} or fewer", "no more than {g}",
    ),
    "a rounding": ("~{g}", "≈{g}", "about {g}", "around {g}", "roughly {g}", "nearly {g}", "{g}ish",
    "approximately {g}", "±{g}"),
    "a denial": (
        "not {g}", "{g} is wrong", "anything but {g}", "never {g}", "{g}? no", "{g} isn't it",
        "everything except {g}",
        "no {g}", "it is not {g}", "maybe {g}", "{g}?", "I guess {g}", "≠{g}", "x != {g}", "neither {g}",
    ),
    "several numbers": (
        "{g} or {m}", "{m}, {g}", "{g} {m}", "{m}/{g}/{m}", "{g}; {m}", "{m} -> {g}", "{g}-{m}",
        "{g} to {m}", "({m}, {g})",
        "between {g} and {m}", "{m} {g}", "[{g}, {m}]", "{g}|{m}", "{m}\n{g}", "{g} (or {m})",
        "{g}.{m}.{g}", "{g}:{m}",
    ),
    "an equation that is false or solved by no one": (
        "{m} = {g}", "{g} = {m}", "{m} + {m} + 1 = {g}", "2x = {g}", "x² = {g}", "-x = {g}", "1/x = {g}",
        "half x = {g}", "x = {g} = {m}",
        "x <= {g}", "x >= {g}", "minus x = {g}", "not x = {g}", "{g} =! {m}", "x + 1 = {g}", "sqrt x = {g}",
    ),
    "digits of another kind": ("0,{g}", "{g},5", "{g},00", "{g}.5", "{g}0", "1{g}", "{g} 000", "{g},000",
    "1 {g}", ",{g}", "{g}..", "5,{g}"),
    "not worked out": ("{g}+0", "{g}*1", "2*{m}", "{m}+{m}", "{g}/1", "({g})({m})", "{g}-0", "{g}+0=",
    "={g}+0"),
}  # fmt: skip

FAIR: dict[str, Sequence[str]] = {
    "plain": (
        "{g}", " {g} ", "{g}.", "{g}.0", "{g}.00", "+{g}", "({g})", "[{g}]", '"{g}"', "\u200b{g}",
        "{g}\u200b", "\u00a0{g}", "#### {g}",
        "**{g}**", "*{g}*", "`{g}`", "__{g}__", "${g}$", r"\boxed{{g}}", r"$\boxed{{g}}$", "{g},", "{g};",
    ),
    "money": ("${g}", r"\${g}", "${g}.00", "€{g}", "£{g}", "{g} dollars", "{g}$", "{g} USD", "$ {g}",
    "{g} cents", "₹{g}", "{g} euros"),
    "units": (
        "{g} clips", "{g} apples", "{g} km", "{g}km", "{g} hours", "{g} minutes", "{g} miles", "{g} m²",
        "{g} years", "{g} kg",
        "{g} people", "{g} students", "{g} km/h", "{g} miles per hour", "{g} square feet", "{g} pounds",
        "{g}%", "{g} percent",
        "{g} cookies", "{g}-hour", "${g}/hour", "{g} days", "{g} liters", r"{g}\%", "{g} cm³", "{g} books!",
        r"{g}\text{ clips}",
    ),
    "sentences": (
        "The answer is {g}.", "The final answer is {g}", "Answer: {g}", "Final answer: **{g}**",
        "So the total is {g}.", "It is {g}.",
        "There are {g} apples in total.", "We get {g}", "Total: {g}", "Therefore, the answer is ${g}.",
        "He has {g} left.",
        "She needs {g} hours.", "They have {g} marbles altogether.", "It costs ${g}.",
        "The total cost is ${g}.", "exactly {g}",
        "the answer: {g}", "Result: {g}", "{g} is the answer", "{g} in total", "{g} books each",
    ),
    "the question's own words": (
        "{g} paperclips", "Natalia sold {g} paperclips.",
        "Natalia sold {g} paperclips altogether in April and May.",
        "{g} classmates", "Natalia's total is {g}.", "In April and May Natalia sold {g} paperclips",
    ),
    "equations": ("x = {g}", "= {g}", "Total = {g}", "Total cost = ${g}", "{g} = {g}", "{g} + 0 = {g}",
    "0 + {g} = {g} clips", "answer = {g}", "n={g}"),
}  # fmt: skip

CHEATING_PAIRS = (
    ("-5", "5"), ("-5", "minus -5"), ("-5", "--5"), ("-5", "(5)"), ("-5", "- -5"), ("-5", "negative -5"),
    ("-5", "x -5 y"),
    ("0.5", "0,5"), ("0.5", "5"), ("0.5", "1/2/1"), ("0.5", "2/4"), ("0.5", ".5.5"), ("0.5", "0.5k"),
    ("0.5", "0.5 million"),
    ("1080", "1,08"), ("1080", "1,0800"), ("1080", "10,80"), ("1080", "1.080"), ("1080", "1 080 or so"),
    ("123", "0,123"),
    ("123", "0,123.0"), ("123", "00,123"), ("72", "seventy-two"), ("72", "٧٢"), ("72", "7 2"), ("72",
    "7\n2"), ("72", "7.2e1"), ("72", ""),
    ("72", "twenty-72"), ("72", "one 72"), ("72", "72 squared"), ("72", "72 factorial"), ("72",
    "72 less 5 percent"), ("72", "72 lakh"),
)  # fmt: skip

FAIR_PAIRS = (
    ("-5", "-5"), ("-5", "- 5"), ("-5", "−5"), ("-5", "minus 5"), ("-5", "negative 5"), ("-5", "-$5"),
    ("-5", "$-5"), ("-5", "(-5)"),
    ("-5", "The answer is -5."), ("-5", "Answer: -5"), ("-5", "Answer: - 5"), ("-5", "x = -5"), ("-5",
    "-5 degrees"), ("-5", "The answer is minus 5."),
    ("0.5", "1/2"), ("0.5", ".5"), ("0.5", "0.50"), ("0.5", "1/2 cups"), ("0.5", "$0.50"), ("0.75", "3/4"),
    ("-0.75", "-3/4 cups"),
    ("1080", "1,080"), ("1080", "$1,080"), ("1080", "1,080.00"), ("1,080", "1080"), ("1000000",
    "1,000,000"), ("72", "48 + 24 = 72"),
    ("72", "$48 + $24 = $72"), ("72", "72 = 48+24"), ("72", "x = 48 + 24 = 72"), ("1080",
    "Total cost = 1,080"), ("0", "0"), ("0", "0.0"), ("0", "-0"),
    ("100", "10 * 10 = 100 cm"), ("72", r"\$48 + \$24 = \$72"), ("72", "(48 + 24) = 72"), ("72",
    "48 × 3 ÷ 2 = 72"),
)  # fmt: skip


def filled(families: dict[str, Sequence[str]]) -> Iterator[tuple[str, str, str]]:
    """Yield (family, gold, solution)."""
    for name, templates in families.items():
        for gold in GOLDS:
            for template in templates:
                yield name, gold, template.replace("{g}", gold).replace("{m}", OTHERS[gold])


def cheating() -> list[tuple[str, str, str]]:
    return [*filled(CHEATING), *(("written out", *pair) for pair in CHEATING_PAIRS)]


def fair() -> list[tuple[str, str, str]]:
    return [*filled(FAIR), *(("written out", *pair) for pair in FAIR_PAIRS)]
