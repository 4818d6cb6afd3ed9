"""When two mathematical answers are the same: every row is an answer and a truth."""

from __future__ import annotations

import pytest

from groupwise.evaluate.intervals import majority
from groupwise.rewards.verify.latex.equal import same_answer
from groupwise.rewards.verify.latex.latex_lexer import Unfamiliar
from groupwise.tasks.builtin.boxed_math import alike


@pytest.mark.parametrize(
    ("predicted", "truth"),
    [
        ("x=5", "5"),
        (r"5\text{ cm}", "5"),
        (r"\{1,2\}", r"\{2,1\}"),
        ("x^2+2x+1", "(x+1)^2"),
        ("2x+1", "1+2x"),
        (r"10\!,\!000", "10000"),
        (r"\pi/2", r"\frac{\pi}{2}"),
        (r"2\frac13", "7/3"),
        ("7/3", r"2\frac{1}{3}"),
        ("2^{10}", "1024"),
        ("2^10", "1024"),
        (r"1.5\times10^3", "1500"),
        (r"50\%", "0.5"),
        (r"50\%", "50"),
        ("50", r"50\%"),
        ("0.50", r"\frac12"),
        (r"\dfrac{1}{2}", "0.5"),
        ("1,2", "2, 1"),
        ("[0,1)", r"0\le x<1"),
        (r"3\sqrt2", r"\sqrt{18}"),
        ("A", r"\text{(A)}"),
        ("(A)", r"\text{A}"),
        (r"\text{monday}", r"\text{Monday}"),
        ("70", r"70^\circ"),
        (r"60^{\circ}", r"60^\circ"),
        (r"\tan 15^\circ", r"2-\sqrt3"),
        ("y=2x+3", "2x-y+3=0"),
        ("2x+3", "y = 2x + 3"),
        (r"1+\sqrt{19},1-\sqrt{19}", r"1 \pm \sqrt{19}"),
        ("10{,}000", r"10,\!000"),
        ("10,000", "10000"),
        ("1011_2", "1011_{2}"),
        ("1011", "1011_2"),
        ("24", "24_{10}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
        (r"\$150", "150"),
        ("150 dollars", r"\$150"),
        (r"-\frac{1}{2}", r"\frac{-1}{2}"),
        (r"\frac{1}{-2}", "-0.5"),
        ("2, 3, 4", r"2, 3, \text{ and } 4"),
        ("5>x", "x<5"),
        (r"\text{The answer is } 5", "5"),
        (r"x \in [0,1]", "[0,1]"),
        (r"\begin{bmatrix}1\\2\end{bmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        (r"(2,\infty)", "x>2"),
        ("8:34 p.m.", r"8\!:\!34 \text{ p.m.}"),
        ("x^{2}", "x^2"),
        (r"12 \text{ square feet}", r"12\text{ ft}^2"),
        ("-5", "−5"),
        (r"\frac{3}{4}x", "3x/4"),
        (r"\sqrt{x^2+1}", "(x^2+1)^{1/2}"),
        ("e^{2x}", "(e^x)^2"),
        ("48+24=72", "72"),
        ("5.0", "5"),
        (".5", "0.5"),
        ("+5", "5"),
        (r"\sin 60^\circ", r"\frac{\sqrt3}{2}"),
        ("1/3", r"\frac{1}{3}"),
        (r"\frac{1}{\sqrt2}", r"\frac{\sqrt{2}}{2}"),
        (r"x\in\{1,2\}", "1,2"),
        ("2 1/3", r"\frac73"),
        (r"\mathbf{2340}", "2340"),
        ("$5$", "5"),
        (r"\(5\)", "5"),
        ("5 cm", "5"),
        (r"5\,\mathrm{cm}", "5"),
        (r"\text{A,B}", "B, A"),
        ("3:5", "3 : 5"),
        ("AB=9, CD=4", "9,4"),
        (r"\frac{11}{15}", r"\frac{11}{15}\text{ days}"),
        (r"4/3\pi", r"\frac{4\pi}{3}"),
        (r"\binom{5}{2}", "10"),
        ("5!", "120"),
        ("0.56", r"0.56 = 56\%"),
        (r"56\%", r"0.56 = 56\%"),
        (r"\text{4}", "4"),
        (r"\text{ 4 cm}", "4"),
        (r"x<2 \text{ or } x>3", r"(-\infty,2)\cup(3,\infty)"),
        (r"0.\overline{3}", r"\frac{1}{3}"),
        (r"1.1\overline{6}", r"\frac{7}{6}"),
        ("1.5e3", "1500"),
        ("1.5e-3", "0.0015"),
        ("1+2e", "2e+1"),
        (r"x=\pm 2", "2,-2"),
        ("x_1=1, x_2=2", "1,2"),
        ("y-2=3(x-1)", "y=3x-1"),
        ("f(x)=x^2", "x^2"),
        (r"5\mathrm{~cm}", "5"),
        (r"\{81,256\}", "81, 256"),
        (r"10\,000", "10000"),
        ("(x, y) = (2, 6)", "(2,6)"),
        (r"\log_2 8", "3"),
    ],
)
def test_answers_that_mean_the_same_are_accepted(predicted, truth):
    assert same_answer(predicted, truth)


@pytest.mark.parametrize(
    ("predicted", "truth"),
    [
        ("0.0005", "0"),
        ("0.0009", "0.0001"),
        ("12", "1 2"),
        ("1 2", "12"),
        ("1 2", "3"),
        ("(2)(3)", "23"),
        (r"5 \text{ or } 7", "5"),
        ("7,5", "5"),
        ("(1,2)", "(2,1)"),
        ("[1,2]", "(1,2)"),
        (r"\{1,2\}", "(1,2)"),
        ("0.333333", r"\frac13"),
        ("x>5", "x<5"),
        (r"\text{Tuesday}", r"\text{Monday}"),
        (r"\sqrt{9**9**9}", "2"),
        ("9^{9^{9}}", "1"),
        ("31", "11111_2"),
        ("12_3", "12"),
        (r"50\%", "5"),
        (r"0.5\%", r"50\%"),
        ("5", r"50\%"),
        (r"5 \text{ m}", r"5\text{ cm}"),
        ("|x|", "x"),
        ("x", "-x"),
        ("2x=6", "x=3"),
        ("y=3", "x=3"),
        (r"\frac{2}{1}", r"\frac12"),
        ("x^2", "2^x"),
        ("-5", "5"),
        (r"5^\circ", r"\frac{\pi}{36}"),
        ("1.41421", r"\sqrt2"),
        ("B", "A"),
        (r"\text{neither}", r"\text{even}"),
        ("", "5"),
        ("{", "5"),
        ("5{", "5"),
        ("3:4", "3:5"),
        ("[0,1]", r"0\le x<1"),
        (r"\frac12", r"\frac1b"),
        (r"1\pm2", "3"),
        ("x+1", "x-1"),
        (r"\text{not } 5 7", "5"),
        ("1,000,00", "100000"),
        (r"\{4,5\}", r"\{4,5,7\}"),
        ("4,5,7,8", r"\{4,5,7\}"),
        ("A,B", "A"),
        ("8:34 a.m.", r"8\!:\!34 \text{ p.m.}"),
        ("10", r"10,\!000"),
        ("10.000", r"10,\!000"),
        ("y=2x-3", "y=2x+3"),
        (r"\frac{1}{0}", "1"),
        ("5=7", "5"),
        ("48+24=73", "73"),
        ("x=5=7", "5"),
        (r"x<2, x<3", r"(-\infty,2)\cup(3,\infty)"),
        (r"0.\overline{3}", "0.3"),
        ("1e999", "1"),
        ("2e-1", "0.2"),
        ("5, 5", "5"),
        ("", ""),
    ],
)
def test_answers_that_differ_are_refused(predicted, truth):
    assert not same_answer(predicted, truth)


@pytest.mark.parametrize(
    "answer",
    [
        "9" * 900,
        "9^" * 300 + "9",
        "9**9**9",
        "9^{9^{9^{9}}}",
        "2^{99999999}",
        "100000000!",
        r"\binom{999999999}{500000000}",
        "(" * 900,
        "{" * 400 + "5" + "}" * 400,
        "-" * 999,
        "1" + "+1" * 490,
        "x^" + "-" * 900,
        r"\frac" * 190,
        r"\sqrt" * 190,
        r"\left" * 190,
        "1/0",
        "0^0",
        r"\log 0",
        "\\",
        "\x00\ud800",
        "5" * 1001,
    ],
)
def test_no_answer_is_too_much(answer):
    assert not same_answer(answer, "7")


def test_notation_that_is_not_read_here_is_passed_on():
    for notation in (r"\sum_{k=1}^{3} k", r"\lfloor 3.5 \rfloor", r"\int_0^1 x dx", r"\frac17\triangle ABC"):
        with pytest.raises(Unfamiliar):
            same_answer(notation, "6")


def test_long_rows_of_functions_are_compared_like_any_other_answer():
    deep, long = r"\ln" * 320, "1" + "+1" * 490
    for answer in (deep, long, deep + "5"):
        assert not same_answer("5", answer)
        assert not same_answer(answer, "5")
    assert majority(["5", deep, "5", deep + "2"], alike) == 0
