"""What each built-in task's rewards must say to completions written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groupwise.rewards.worked_solution import END, END_SOLUTION, SOLUTION, START


@dataclass(frozen=True, slots=True)
class Case:
    """A completion, the columns it answers to, and the reward it must get."""

    completion: str
    columns: Mapping[str, Any]
    expected: float


def puzzle(answer: str, expected: float, *, thinking: str = "1 + 2 is 3.") -> Case:
    text = f"{thinking}</think>\n<answer>{answer}</answer>"
    return Case(text, {"numbers": [1, 2, 8], "target": 24}, expected)


def worked(solution: str, gold: str, expected: float) -> Case:
    text = f"{START}48 + 24 = 72{END}{SOLUTION}{solution}{END_SOLUTION}"
    return Case(text, {"answer": gold}, expected)


def boxed(answer: str, truth: str, expected: float) -> Case:
    return Case(rf"The answer is \boxed{{{answer}}}", {"answer": truth}, expected)


def found(answer: str, expected: float) -> Case:
    text = f"<think> flute</think>\n<answer> {answer}</answer>"
    return Case(text, {"answer": "flute", "documents": ["Mara Velk"]}, expected)


CASES: Mapping[str, tuple[Case, ...]] = {
    "countdown": (
        puzzle("(1 + 2) * 8", 2.0),
        puzzle("8 × (2 + 1) = 24", 2.0),
        puzzle("3 * 8", 1.0),  # not the numbers
        puzzle("1 + 2 + 8", 1.0),  # not the target
        puzzle("1 * 2 ** 8", 1.0),  # not an operation
        puzzle("9**9**9", 1.0),
        puzzle("(1 + 2) * 8", 1.0, thinking=""),
        Case("24", {"numbers": [1, 2, 8], "target": 24}, 0.0),
    ),
    "gsm8k": (
        worked("72", "72", 9.5),
        worked("$1,080", "1080", 9.5),
        worked("72.0 clips", "72", 9.5),
        worked("79", "72", 6.5),  # within 10 %
        worked("86", "72", 5.5),  # within 20 %
        worked("-5", "5", 4.5),
        worked("72 or 73", "72", 4.5),
        Case(f"{SOLUTION}72{END_SOLUTION}", {"answer": "72"}, 1.5),
        Case("The answer is 72.", {"answer": "72"}, -2.0),
    ),
    "math": (
        boxed("42", "42", 1.0),
        boxed("3.14", "3.14", 1.0),
        boxed("1/2", "0.5", 1.0),
        boxed(r"x^2+2x+1", "(x+1)^2", 1.0),
        boxed(r"\{2,1\}", r"\{1,2\}", 1.0),
        boxed(r"5\text{ cm}", "5", 1.0),
        boxed("100", "200", -1.0),
        boxed("0.0005", "0", -1.0),
        boxed("1 2", "12", -1.0),
        boxed(r"\sqrt{9**9**9}", "3", -1.0),
        Case("I do not know.", {"answer": "42"}, -1.0),
    ),
    "search_qa": (
        found("flute", 1.0),  # right, but never searched: nothing for MRR and format
        found("Flute", 1.0),
        found("harp", 0.0),
        found("flute</answer><answer> harp", 0.0),
    ),
}
