r"""Judging a completion by the answer in its last `\boxed{…}`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from groupwise.config.checks import finite
from groupwise.errors import ConfigError, RolloutError
from groupwise.rewards.boxed import last_box
from groupwise.rewards.latex.equal import same_answer
from groupwise.rewards.latex.tokens import MAX_CHARACTERS, Unfamiliar
from groupwise.rewards.latex.words import says_more
from groupwise.rewards.symbolic import comparer

COMMAND = re.compile(r"\\[a-zA-Z]+")
TEXT = re.compile(r"\\text\{([^{}]*)\}")
NAMED_SIDE = re.compile(r"\s*[a-zA-Z]\s*")
UNREAD = re.compile(r"[<>~?&;,]|(?<![\\a-zA-Z])[a-zA-Z]{3,}")
READ_BY_MATH_VERIFY = frozenset(
    rf"\{name}"
    for name in """
    sum prod int lfloor rfloor lceil rceil left right frac dfrac tfrac sqrt cdot times div pi infty binom
    sin cos tan cot sec csc log ln exp arcsin arccos arctan circ displaystyle
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What a right answer, a wrong one and none at all are worth.

    By default silence is worth no more than a wrong answer, so that it never pays.
    """

    right: float = 1.0
    wrong: float = -1.0
    no_answer: float = -1.0

    def __post_init__(self) -> None:
        for name, score in asdict(self).items():
            finite(f"math: {name}", score)


LENIENT = Scores(no_answer=-0.5)
"""No answer costs less than a wrong one, which teaches caution, and silence on hard questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found in a completion."""

    predicted: str | None
    """As written in the box; None: no answer."""
    ground_truth: str
    correct: bool
    error: str | None = None
    """Why the two could not be compared."""

    @property
    def has_answer(self) -> bool:
        return self.predicted is not None


def truth_of(answer: str) -> str:
    """Return the true answer, which may itself be given in a box."""
    return last_box(answer) or answer


@lru_cache(maxsize=4096)
def verify_boxed(completion: str, answer: str) -> Verdict:
    """Judge a completion; never raises, whatever is written in it."""
    truth = truth_of(answer)
    predicted = last_box(completion)
    if predicted is None:
        return Verdict(predicted=None, ground_truth=truth, correct=False)
    try:
        correct = equivalent(predicted, truth)
    except RolloutError as error:
        return Verdict(predicted=predicted, ground_truth=truth, correct=False, error=str(error))
    return Verdict(predicted=predicted, ground_truth=truth, correct=correct)


def equivalent(predicted: str, truth: str) -> bool:
    """Tell whether two answers are the same: by our own reading, else by `math-verify`."""
    if len(predicted) > MAX_CHARACTERS:
        return predicted == truth
    try:
        return same_answer(predicted, truth)
    except Unfamiliar:
        predicted = without_harmless_text(predicted)
        sides = sides_of(predicted)
        if len(sides) > 1:
            return all(equivalent(side, truth) for side in sides)
        return may_be_read(predicted, truth) and comparer.equal(predicted, truth)


def without_harmless_text(predicted: str) -> str:
    return TEXT.sub(lambda text: " " if not says_more([text[1]], []) else text[0], predicted)


def sides_of(predicted: str) -> list[str]:
    r"""Return the sides of an equation, of which `math-verify` would look at the last alone.

    An `=` in braces is part of an expression: `\sum_{k=1}^3 k`. A name on the left says nothing.
    """
    depth, sides = 0, [""]
    for character in predicted.replace(r"\{", "(").replace(r"\}", ")"):
        depth += (character == "{") - (character == "}")
        if character == "=" and not depth:
            sides.append("")
        else:
            sides[-1] += character
    return sides[1:] if len(sides) > 1 and NAMED_SIDE.fullmatch(sides[0]) else sides


def may_be_read(predicted: str, truth: str) -> bool:
    r"""Tell whether `math-verify` is known to read every command: what it does not know, it leaves out.

    What stands in the truth will do; other relations, logic and words will not.
    """
    commands = READ_BY_MATH_VERIFY.union(COMMAND.findall(truth))
    return commands.issuperset(COMMAND.findall(predicted)) and set(UNREAD.findall(truth)).issuperset(
        UNREAD.findall(predicted)
    )


def score_boxed(completion: str, answer: str, scores: Scores | None = None) -> tuple[float, dict[str, Any]]:
    """Return the reward, and predicted, ground_truth, correct and has_answer beside it."""
    verdict = verify_boxed(completion, answer)
    if verdict.error is not None:
        raise RolloutError(verdict.error)
    info = {
        "predicted": verdict.predicted,
        "ground_truth": verdict.ground_truth,
        "correct": verdict.correct,
        "has_answer": verdict.has_answer,
    }
    return reward_of(verdict, scores or Scores()), info


def reward_of(verdict: Verdict, scores: Scores) -> float:
    if not verdict.has_answer:
        return scores.no_answer
    return scores.right if verdict.correct else scores.wrong


def score_boxed_batch(
    completions: Sequence[str], answers: Sequence[str], scores: Scores | None = None
) -> list[tuple[float, dict[str, Any]]]:
    """Score each completion against its own answer."""
    if len(completions) != len(answers):
        raise ConfigError(f"{len(completions)} completions but {len(answers)} answers")
    return [score_boxed(c, a, scores) for c, a in zip(completions, answers, strict=True)]
