"""Answers written to cheat the verifiers are wrong, and fair answers that look unusual are right."""

from __future__ import annotations

from adversarial_math import cheating
from fair_math import fair
from groupwise.rewards.math_answer import verify_boxed


def judged(pairs, *, right):
    """Return the pairs whose verdict is another one."""
    wrong = []
    for family, truth, answer in pairs:
        verdict = verify_boxed(rf"\boxed{{{answer}}}", truth)
        if verdict.correct is not right or verdict.error is not None:
            wrong.append((family, truth, answer, verdict.error))
    return wrong


def test_no_answer_that_cheats_is_right():
    pairs = cheating()
    assert len(pairs) > 800
    assert judged(pairs, right=False) == []


def test_fair_answers_are_right_however_they_are_written():
    pairs = fair()
    assert len(pairs) > 490
    assert judged(pairs, right=True) == []
