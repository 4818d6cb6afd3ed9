"""Rewards for answers of a common shape: exact, contained, matching a pattern, a number."""

from __future__ import annotations

from fractions import Fraction

import pytest

import groupwise as gw
from groupwise.errors import ConfigError
from groupwise.records import Example, Rollout
from groupwise.rewards.text_rewards import last_number


def answered(text: str) -> Rollout:
    nothing = (0.0, 0.0)
    return Rollout(
        prompt="?",
        text=text,
        tokens=(1, 2),
        trained=(False, True),
        logprobs=nothing,
        entropies=nothing,
        prompt_length=1,
        finish="stop",
    )


@pytest.mark.parametrize(
    ("text", "exact", "contained"),
    [
        ("Paris", 1, 1),
        ("  paris\n", 1, 1),
        ("<think>Rome?</think> Paris", 1, 1),
        ("It is Paris.", 0, 1),
        ("Parisian", 0, 0),
        ("", 0, 0),
    ],
)
def test_exact_and_contained_answers(text, exact, contained):
    example = Example({"answer": "Paris"})
    assert gw.rewards.exact_match()(answered(text), example) == exact
    assert gw.rewards.contains()(answered(text), example) == contained


def test_the_column_can_be_named():
    example = Example({"city": "Lima"})
    assert gw.rewards.exact_match("city")(answered("lima"), example) == 1


def test_a_pattern_is_searched_in_the_answer_without_its_thinking():
    yes_or_no = gw.rewards.matches(r"^(yes|no)\b")
    assert yes_or_no(answered("<think>yes</think>maybe"), Example({})) == 0
    assert yes_or_no(answered("<think>maybe</think>yes, it is"), Example({})) == 1


def test_a_pattern_that_is_none_is_refused_at_once():
    with pytest.raises(ConfigError, match="not a regular expression"):
        gw.rewards.matches("(")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 1,080 of them.", 1080),
        ("-5", -5),
        ("72.50 dollars", Fraction(145, 2)),
        ("first 3, then 4", 4),
        ("none", None),
        ("v2", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


def test_numbers_are_compared_by_value_and_within_a_tolerance():
    example = Example({"answer": "#### 1,000"})
    assert gw.rewards.same_number()(answered("It is 1000.0"), example) == 1
    assert gw.rewards.same_number()(answered("It is 1009"), example) == 0
    assert gw.rewards.same_number(tolerance=0.01)(answered("It is 1009"), example) == 1


def test_a_row_without_a_number_is_an_error_and_not_a_wrong_answer():
    with pytest.raises(ConfigError, match="contains no number"):
        gw.rewards.same_number()(answered("3"), Example({"answer": "three"}))


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        (1e-05, "5", 0),  # the column reads 1e-05
        (1e-05, "0.00001", 1),
        (1e16, "16", 0),
        (150, "1.5e2 metres", 1),
        ("3/4", "4", 0),
        ("3/4", "so 0.75.", 1),
        (2, "so 8/4", 1),
        (10, "Score 10/10", 1),
        (11, "On 9/11", 1),
        (9, "On 9/11", 0),
        (-4, "3/4", 0),
        (60, "60/hour", 1),
        (3, "\N{MINUS SIGN}3", 0),
        (-3, "\N{MINUS SIGN}3", 1),
        (0.25, ".25", 1),
        (25, ".25", 0),
    ],
)
def test_fractions_exponents_and_minus_signs_belong_to_the_number(gold, answer, right):
    assert gw.rewards.same_number()(answered(answer), Example({"answer": gold})) == right


@pytest.mark.parametrize(
    ("gold", "answer", "contained"),
    [
        ("3", "it is 3.", 1),
        ("3", "3, not 4", 1),
        ("3", "pages 1-3", 1),
        ("3", "3.5", 0),
        ("3", "0.3", 0),
        ("500", "1,500", 0),
        ("3", "-3", 0),
        ("3", "\N{MINUS SIGN}3", 0),
        ("-3", "x is -3", 1),
        ("\N{MINUS SIGN}3", "x is \N{MINUS SIGN}3", 1),
        ("\N{MINUS SIGN}3", "x is -3", 1),
        ("-3", "x is -3.5", 0),
        ("-1", "x is -1,300", 0),
        ("300", "1,300,000", 0),
        ("300,000", "1,300,000", 0),
        (3, "x = 3,5", 1),
        (5, "x = 3,5", 1),
        (3, "ids 3,4567", 1),
    ],
)
def test_a_part_of_a_number_is_not_contained(gold, answer, contained):
    assert gw.rewards.contains()(answered(answer), Example({"answer": gold})) == contained


def test_nothing_to_look_for_is_refused():
    for nothing in ("", " ", None):
        with pytest.raises(ConfigError, match="the column 'answer' is empty"):
            gw.rewards.contains()(answered("none"), Example({"answer": nothing}))
