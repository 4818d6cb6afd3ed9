r"""Judging a completion by the answer in its last `\boxed{…}`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from groupwise.config.checks import finite
from groupwise.errors import ConfigError, RolloutError
from groupwise.rewards.boxed import last_box
from groupwise.rewards.latex.equal import same_answer
from groupwise.rewards.latex.tokens import MAX_CHARACTERS, Unfamiliar
from groupwise.rewards.symbolic import comparer


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
        return comparer.equal(predicted, truth)


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
