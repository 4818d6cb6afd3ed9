r"""A fast part of `benchmarks/verifier.py`: rewritings, near misses and fuzzed completions.

Golds are generated, and a few are written out to have every kind.
"""

from __future__ import annotations

import pytest
from fuzzing import fuzzed
from hypothesis import given, settings
from hypothesis import strategies as st
from near_misses import NEAR_MISSES, near_misses
from rewritings import REWRITINGS, rewritings

from groupwise.config.schema import TaskConfig
from groupwise.rewards.extraction import is_exact, solution_of, stated_number, tags_once
from groupwise.rewards.verify.math_answer import verify_boxed
from groupwise.tasks.builtin.boxed_math import math

GOLDS = [
    *(
        "42",
        "-7",
        "0",
        "1",
        "12500",
        "3.24",
        "-0.5",
        "28.40",
        r"\frac{3}{4}",
        r"-\frac{7}{3}",
        r"\frac12",
        r"\frac{1}{7}",
    ),
    *(r"2\sqrt{3}", r"-\sqrt{5}", r"6\pi", r"\frac{3\sqrt{3}}{\pi}", r"22 - 8 \sqrt{7}", r"1 \pm \sqrt{19}"),
    *("(2, 6)", r"\left( 3, \frac{\pi}{2} \right)", "-330, 90", r"\sqrt{2}, -\sqrt{2}", r"\{4,5,7\}"),
    *(
        "[-1,0)",
        r"(-\infty, 0]",
        r"(2,\infty)",
        r"[-1,0) \cup (0,1]",
        r"(-\infty,-2)\cup(-2, 2)\cup(2,\infty)",
    ),
    *(
        "x^2 - 5x - 24",
        "19x^4",
        "p - q",
        "2x + 3",
        "(t-11)(t+11)",
        "y = 2x + 3",
        "x = 12",
        r"x = \frac{3}{2}",
    ),
    *(r"10\text{ cm}", r"4 \text{ feet}", r"60^\circ", r"64\%", r"\$150", "2516_8", "1011_2", r"\text{(C)}"),
    *(
        r"\text{Tuesday}",
        r"\begin{pmatrix} 7 \\ -13 \end{pmatrix}",
        r"\begin{pmatrix} 2 & 1 \\ 7 & -2 \end{pmatrix}",
    ),
]


def generated() -> list[str]:
    return [example["answer"] for example in math().split(TaskConfig(held_out=60), seed=0).held_out]


def boxed(answer: str) -> str:
    return rf"So it is \boxed{{{answer}}}."


@pytest.mark.parametrize("gold", GOLDS)
def test_a_gold_accepts_itself_and_every_other_way_to_write_it(gold):
    assert verify_boxed(boxed(gold), gold).correct
    assert [
        (rule, other) for rule, other in rewritings(gold) if not verify_boxed(boxed(other), gold).correct
    ] == []


@pytest.mark.parametrize("gold", GOLDS)
def test_a_gold_refuses_every_near_miss(gold):
    assert [
        (rule, other) for rule, other in near_misses(gold) if verify_boxed(boxed(other), gold).correct
    ] == []


def test_the_same_holds_for_generated_golds_and_every_rule_is_used():
    golds = [*GOLDS, *generated()]
    for gold in golds:
        assert all(verify_boxed(boxed(other), gold).correct for _, other in rewritings(gold)), gold
        assert not any(verify_boxed(boxed(other), gold).correct for _, other in near_misses(gold)), gold
    assert {rule for gold in golds for rule, _ in rewritings(gold)} == {rule.__name__ for rule in REWRITINGS}
    assert {rule for gold in golds for rule, _ in near_misses(gold)} == {
        rule.__name__ for rule in NEAR_MISSES
    }


def test_fuzzed_completions_are_judged_without_a_crash():
    for text in fuzzed(GOLDS, 1500, seed=1):
        verdict = verify_boxed(text, "123456789")
        assert not verdict.correct, text


PIECES = [*"0123456789xyei+-*/^_=<>(){}[]|,;:!% .$&'\\", r"\frac", r"\sqrt", r"\text{", r"\left", r"\pm"]
LATEX = st.lists(st.sampled_from(PIECES)).map("".join)


@given(st.one_of(st.text(), LATEX), st.one_of(st.text(min_size=1), LATEX))
@settings(max_examples=400, deadline=None)
def test_any_two_texts_can_be_compared(predicted, truth):
    verdict = verify_boxed(boxed(predicted), truth)
    assert isinstance(verdict.correct, bool)


@given(st.integers(), st.integers(-50, 50))
@settings(max_examples=200, deadline=None)
def test_whole_numbers_are_equal_exactly_when_they_are(number, off):
    assert verify_boxed(boxed(f"{number:,}"), str(number + off)).correct == (off == 0)
    assert (stated_number(f"{number:,}") == number) == (abs(number) < 10**50)


@given(st.text())
@settings(max_examples=300, deadline=None)
def test_any_text_has_a_number_and_a_solution_or_none(text):
    stated_number(text)
    solution_of(text)
    assert 0 <= tags_once(text) <= 4
    assert is_exact(text, least_working=8) in (True, False)
