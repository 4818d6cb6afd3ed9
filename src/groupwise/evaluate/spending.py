"""What a test-time strategy reaches on held-out examples, and what it spends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from groupwise.evaluate.statistics import Interval, wilson
from groupwise.evaluate.strategies.answer import Draws, Strategy
from groupwise.evaluate.strategies.judge import task_judge
from groupwise.records import Example, Group
from groupwise.rewards.score import score_group
from groupwise.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Accuracy against tokens."""

    accuracy: Interval
    tokens: float
    """Mean tokens that the policy wrote for one question."""
    right: tuple[bool, ...]
    """By example."""


def spend(
    strategy: Strategy, task: Task, examples: Sequence[Example], *, draws: Draws, seconds: float
) -> Spending:
    """Answer every example by a strategy and score what it settles on, by the verifier of training."""
    judge = task_judge(task, examples, seconds=seconds)
    draws = replace(draws, examples=examples)
    answers = strategy([task.ask(example) for example in examples], draws, judge)
    right = []
    for example, answer in zip(examples, answers, strict=True):
        group = Group(example=example, rollouts=(answer.rollout,))
        scored = score_group(group, rewards=task.rewards, weights=task.weights, seconds=seconds)
        right.append(task.is_right(scored.rollouts[0]))
    return Spending(
        accuracy=wilson(sum(right), len(right)),
        tokens=fmean(answer.tokens for answer in answers),
        right=tuple(right),
    )
