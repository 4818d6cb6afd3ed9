"""Reading the one number that an answer states."""

from __future__ import annotations

from fractions import Fraction

import pytest

from groupwise.rewards.extraction import stated_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72),
        (" 72.0\n", 72),
        ("$72", 72),
        (r"\$72", 72),
        ("**72**", 72),
        ("72 clips", 72),
        ("5km", 5),
        ("20%", 20),
        ("72 m²", 72),
        ("The answer is 72.", 72),
        ("1,080", 1080),
        ("$1,080.50", Fraction(2161, 2)),
        (".5", Fraction(1, 2)),
        ("-5", -5),
        ("−5", -5),  # a typographic minus
        ("- 5", -5),
        ("-$5", -5),
        ("$-5", -5),
        ("Answer: -5", -5),
        ("+5", 5),
        ("1/2", Fraction(1, 2)),
        ("-3/4 cups", Fraction(-3, 4)),
        ("48 + 24 = 72", 72),
        ("72 = 48+24", 72),
        ("$48 + $24 = $72", 72),
        ("Total cost = 1,080", 1080),
    ],
)
def test_one_stated_number_is_read(text, value):
    assert stated_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I do not know",
        "72 or 73",
        "72 73",
        "72, 73, 74",
        "7 2",
        "1,08",
        "1,0800",
        "48+24",  # not worked out
        "144/2",
        "48 + 24 = 71",  # not true
        "48 + 24 = 72 = 73",
        "1/0",
        "<72",
        "~72",
        "2^3",
        "7²",
        "7e5",
        "x-5",
        "twenty-5",
        "--5",
        "٧٢",
        "9" * 60,
        "7" + " " * 300,
        "=",
    ],
)
def test_what_states_no_number_or_several_is_none(text):
    assert stated_number(text) is None
