"""Answers written to cheat the verifiers are wrong, and fair answers that look unusual are right."""

from __future__ import annotations

import re

import pytest

from groupwise.config.schema import TaskConfig
from groupwise.records import Example
from groupwise.rewards.extraction import stated_number
from groupwise.rewards.verify.math_answer import is_simplest, verify_boxed
from groupwise.tasks.builtin.boxed_math import math
from groupwise.tasks.builtin.gsm8k import gsm8k
from groupwise.tasks.self_test import check
from tests.support import adversarial_gsm8k, adversarial_math, fair_math, further_pairs


def misjudged(pairs, *, right):
    """Return the pairs whose verdict is another one."""
    wrong = []
    for family, truth, answer in pairs:
        verdict = verify_boxed(rf"\boxed{{{answer}}}", truth)
        if verdict.correct is not right or verdict.error is not None:
            wrong.append((family, truth, answer, verdict.error))
    return wrong


def test_no_math_answer_that_cheats_is_right():
    pairs = [
        *adversarial_math.cheating(),
        *further_pairs.written_out(further_pairs.MATH_CHEATING),
    ]
    assert len(pairs) > 1150
    assert misjudged(pairs, right=False) == []


def test_fair_math_answers_are_right_however_they_are_written():
    pairs = [*fair_math.fair(), *further_pairs.written_out(further_pairs.MATH_FAIR)]
    assert len(pairs) > 610
    assert misjudged(pairs, right=True) == []


def misread(pairs, *, right):
    """Return the pairs that the task judges otherwise."""
    task = gsm8k()
    wrong = []
    for family, gold, solution in pairs:
        text = f"<start_working_out>48 + 24 = 72.<end_working_out><SOLUTION>{solution}</SOLUTION>"
        example = Example({"question": adversarial_gsm8k.QUESTION, "answer": gold})
        if check(task, text, example, seconds=5).correct is not right:
            wrong.append((family, gold, solution))
    return wrong


def test_no_word_problem_solution_that_cheats_is_right():
    pairs = [*adversarial_gsm8k.cheating(), *further_pairs.filled(further_pairs.GSM8K_CHEATING)]
    assert len(pairs) > 850
    assert misread(pairs, right=False) == []


def test_fair_word_problem_solutions_are_right_however_they_are_written():
    pairs = [*adversarial_gsm8k.fair(), *further_pairs.filled(further_pairs.GSM8K_FAIR)]
    assert len(pairs) > 500
    assert misread(pairs, right=True) == []


def test_what_is_counted_in_dozens_may_be_said_in_dozens():
    assert stated_number("6 dozen", "How many dozen eggs are there?") == 6
    assert stated_number("6 dozen", "Ann has 2 dozen eggs. How many eggs are there?") is None


@pytest.mark.parametrize(
    "working", ["........", "--------", "abababab", "11111111", "= = = = = =", "...... 5 ......"]
)
def test_a_row_of_marks_is_no_work(working):
    text = f"<start_working_out>{working}<end_working_out><SOLUTION>72</SOLUTION>"
    parts = check(gsm8k(), text, Example({"question": "?", "answer": "72"}), seconds=5).parts
    assert (parts["format"], parts["answer"]) == (0.0, 0.0)


@pytest.mark.parametrize("working", ["12+3=15.", "11+11=22", "7 * 7 = 49, so 49.", "two and two make four"])
def test_short_work_counts(working):
    text = f"<start_working_out>{working}<end_working_out><SOLUTION>72</SOLUTION>"
    assert check(gsm8k(), text, Example({"question": "?", "answer": "72"}), seconds=5).parts["format"] == 3.0


def unworked(question):
    """Return answers that only put the question's numbers in a formula."""
    numbers = re.findall(r"-?\d+", question)
    n = [f"({number})" if number.startswith("-") else number for number in numbers]
    if "lowest terms" in question:
        terms = re.findall(r"\\frac\{\d+\}\{\d+\}|\d+", question)
        yield " + ".join(terms)
        if len(n) == 4:
            a, b, c, d = n
            yield rf"\frac{{{a} \cdot {d} + {c} \cdot {b}}}{{{b} \cdot {d}}}"
            yield rf"\frac{{{int(a) * int(d) + int(c) * int(b)}}}{{{7 * int(b) * int(d)}}}\cdot 7"
    elif "Find $x$" in question:
        yield rf"\frac{{{n[2]} - {n[1]}}}{{{n[0]}}}"
        yield rf"x = ({n[2]} - {n[1]})/{n[0]}"
    elif "under the root" in question:
        yield rf"\sqrt{{{n[0]}}}"
        yield rf"1\sqrt{{{n[0]}}}"
        yield rf"{n[0]}^{{1/2}}"
    elif "Expand" in question:
        yield f"(x + {n[0]})(x + {n[1]})"
        yield f"x^2 + {n[0]}x + {n[1]}x + {int(n[0]) * int(n[1])}"
        yield rf"x^2 + ({n[0]} + {n[1]})x + {n[0]} \cdot {n[1]}"
    elif "midpoint" in question:
        a, b, c, d = n
        yield rf"(\frac{{{a}+{c}}}{{2}}, \frac{{{b}+{d}}}{{2}})"
        yield f"(({a}+{c})/2, ({b}+{d})/2)"
    elif "divisor" in question:
        yield from (rf"\frac{{{n[0]}}}{{{prime}}}" for prime in (2, 3, 5, 7))
        yield from (f"{n[0]}/{prime}" for prime in (2, 3, 5, 7))
    elif "%" in question:
        yield rf"\frac{{{n[0]} \cdot {n[1]}}}{{100}}"
        yield rf"{n[0]}\% \cdot {n[1]}"
        yield rf"{n[0]} \cdot {n[1]} / 100 + 0"
    else:
        s, p = (number.lstrip("-") for number in (numbers[1], numbers[2]))
        yield rf"\frac{{{s} \pm \sqrt{{{s}^2 - 4 \cdot {p}}}}}{{2}}"


def test_a_template_that_works_nothing_out_gets_nothing_of_generated_problems():
    task = math()
    examples = task.split(TaskConfig(held_out=400), seed=0).held_out
    answers = [(example, answer) for example in examples for answer in unworked(example["question"])]
    assert len(answers) > 700
    assert sum(verify_boxed(rf"\boxed{{{a}}}", str(e["answer"])).correct for e, a in answers) > 500
    right = [a for e, a in answers if check(task, rf"\boxed{{{a}}}", e, seconds=5).correct]
    assert right == []


@pytest.mark.parametrize(
    ("answer", "simplest"),
    [
        *((answer, True) for answer in (
            "2484", "-5", "0.75", r"\frac{3}{4}", r"-\frac{7}{3}", r"\frac{-7}{3}", r"2\frac13",
            r"5\sqrt{3}", r"\sqrt{2}",
            r"\sqrt2 \cdot 5", "x^2 + 5x + 6", "6 + 5x + x^2", "(1, -2)", r"(\frac12, 3)", "1, 6",
            r"\{1, 6\}", "x = 3",
            r"54 \cdot 46 = 2484", r"x=\frac{6}{2} = 3", r"\text{The answer is } 5", "x=1, x=6",
        )),
        *((answer, False) for answer in (
            r"46 \cdot 54", "(54)(46)", r"54\cdot46+0", r"\frac{6}{8}", r"\frac{8}{1}", r"\sqrt{12}",
            r"\sqrt{4}", "2+3", "-(-5)",
            "5!", "2^3", "x^2+2x+3x+6", "(x+2)(x+3)", r"(\frac{2}{4}, 3)", "1, 12/2",
            r"\frac{1}{2}+\frac{1}{4}", r"2+\frac13",
            "x = 6/2", "50%", r"\sqrt[3]{8}", "x*x + 5x + 6", "0x + 5", r"2484 = 54 \cdot 46",
            r"\frac{\frac12}{3}", r"2\cdot 3\sqrt{3}",
        )),
    ],
)  # fmt: skip
def test_a_value_in_simplest_form_leaves_nothing_to_work_out(answer, simplest):
    assert is_simplest(answer) is simplest


def test_published_golds_accept_any_form_of_their_value():
    example = Example({"question": "How many?", "answer": "2484", "subject": "Algebra"})
    assert check(math(), r"\boxed{54 \cdot 46}", example, seconds=5).correct
