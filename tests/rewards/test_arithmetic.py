from __future__ import annotations

from fractions import Fraction

import pytest

from groupwise.rewards import evaluate_expression


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("7", Fraction(7), (7,)),
        ("(1 + 2) / 3", Fraction(1), (1, 2, 3)),
        ("8 / (3 - 8 / 3)", Fraction(24), (3, 3, 8, 8)),  # exact where floats give 23.999…
        ("1 / 3", Fraction(1, 3), (1, 3)),
        ("2 - 3 - 4", Fraction(-5), (2, 3, 4)),  # left to right
        ("2 + 3 * 4", Fraction(14), (2, 3, 4)),
        ("6 × 4 ÷ 3 − 2 · 1", Fraction(6), (1, 2, 3, 4, 6)),
        ("\n(1 +\n 2) ", Fraction(3), (1, 2)),
        ("-3 + 27", Fraction(24), (3, 27)),
        ("2 * -(3 - 5)", Fraction(4), (2, 3, 5)),
        ("-(-7) + 25*4", Fraction(107), (4, 7, 25)),
    ],
)
def test_plain_arithmetic_is_exact(text, value, numbers):
    result = evaluate_expression(text)
    assert result is not None
    assert (result.value, result.numbers) == (value, numbers)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "2**3",
        "9**9**9",
        "7//2",
        "1.5",
        "1e3",
        "1_000",
        "0x10",
        "007",
        "1 2",
        "2(3)",
        "(2)(3)",
        "(1, 2)",
        "()",
        "(1 + 2",
        "1 + 2)",
        ")1(",
        "1 +",
        "--3",
        "+3",
        "- -3",
        "2 * --3",
        "(--3)",
        "1 - - -3",
        "~3",
        "5 % 3",
        "1 < 2",
        "3 = 3",
        "x",
        "abs(3)",
        "[1][0]",
        "__import__('os')",
        "1 # 2",
        "1;2",
        "1 / 0",
        "1 / (2 - 2)",
        "٣ + 1",
        "² + 1",
        "\uff11 + 2",
        "\x001",
    ],
)
def test_whatever_else_has_no_value(text):
    assert evaluate_expression(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "1" * 1_000_000,
        "1+" * 500_000 + "1",
        "(" * 10_000 + "1" + ")" * 10_000,
        "(" * 99 + "1" + ")" * 99,
        "-" * 199 + "1",
        "*".join(["9" * 40] * 6),
        "(" * 200,
        " " * 1_000_000,
    ],
)
def test_oversized_input_is_refused_without_an_exception(text):
    assert evaluate_expression(text) is None


def test_parentheses_may_be_many_but_not_deep():
    assert evaluate_expression("+".join(["(1)"] * 30)).value == 30
    assert evaluate_expression("(" * 20 + "1" + ")" * 20).value == 1
    assert evaluate_expression("(" * 21 + "1" + ")" * 21) is None


def test_the_value_is_a_fraction_whether_or_not_something_was_divided():
    assert [repr(evaluate_expression(text).value) for text in ("1 + 2", "6 / 3", "1 / 2 - 1", "-4")] == [
        "Fraction(3, 1)", "Fraction(2, 1)", "Fraction(-1, 2)", "Fraction(-4, 1)",
    ]  # fmt: skip


def test_the_largest_accepted_value_is_still_small():
    result = evaluate_expression("9" * 99 + "*" + "9" * 99)
    assert result is not None
    assert result.value == (10**99 - 1) ** 2
