"""The study of GSM8K: how answers outside the task's format are read, and how its clock ends a run."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import gsm8k_study
import pytest
from gsm8k_study import Clock, few_shot_prompt, last_number

from groupwise.records import Example


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 + 4 = 7 apples.", 7),
        ("The total is $1,200.50.", Fraction("1200.5")),
        ("#### -12", -12),
        ("the change is -$5", -5),
        ("20-5", 5),  # a subtraction, and no sign
        ("x = 10 - 3", 3),
        ("**18** dollars", 18),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_of_an_answer_is_read_with_its_sign(text, number):
    assert last_number(text) == number


def test_worked_examples_are_earlier_turns_without_annotations_for_calculators():
    worked = Example({"question": "Half of 48?", "answer": "24", "solution": "48/2 = <<48/2=24>>24\n#### 24"})
    assert few_shot_prompt([worked])(Example({"question": "1 + 1?", "answer": "2"})) == [
        {"role": "user", "content": "Half of 48?"},
        {"role": "assistant", "content": "48/2 = 24\n#### 24"},
        {"role": "user", "content": "1 + 1?"},
    ]


def test_the_clock_does_not_count_measurements_and_ends_training_at_its_limit(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(gsm8k_study.time, "monotonic", lambda: now[0])
    run = SimpleNamespace(reason=None, stop=lambda reason: setattr(run, "reason", reason))
    clock = Clock(60.0)
    with clock.paused():
        now[0] += 500
    clock.before_rollout(run)
    now[0] += 40
    clock.after_update(run, {})
    with clock.paused():
        now[0] += 300
    assert (clock.spent(), run.reason) == (40.0, None)
    now[0] += 20
    clock.after_update(run, {})
    assert run.reason == "1 minutes are over"
