"""Strategies by name, as the command line gives them: `best-of:8`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from groupwise.config.coerce import between
from groupwise.errors import ConfigError
from groupwise.evaluate.intervals import Interval, wilson
from groupwise.evaluate.strategies.base import Sampler, Strategy, single
from groupwise.evaluate.strategies.best_of_n import best_of, self_consistency, task_judge
from groupwise.evaluate.strategies.budget_forcing import budget_forcing
from groupwise.evaluate.strategies.tpo import preference_optimization
from groupwise.records import Example, Group
from groupwise.rewards.runner import score_group
from groupwise.tasks.task import Task, closest

STRATEGIES: Mapping[str, tuple[Callable[[int], Strategy], int]] = {
    "single": (lambda count: single, 1),
    "self-consistency": (self_consistency, 8),
    "best-of": (best_of, 8),
    "budget": (budget_forcing, 2),
    "tpo": (preference_optimization, 2),
}
"""Each with what its number is by default: answers, answers, answers, waits, rounds."""


ONE_TURN = ("budget",)
"""Strategies that rewrite a reply while it is written, which a conversation with tools does not allow."""


def strategy_named(name: str, *, tools: bool = False) -> Strategy:
    """Return the strategy of a name such as `self-consistency`, or `self-consistency:16`.

    `tools`: whether the policy calls tools while it answers.
    """
    kind, colon, text = name.partition(":")
    if kind not in STRATEGIES:
        raise ConfigError(f"unknown strategy {kind!r}{closest(kind, STRATEGIES)}")
    if tools and kind in ONE_TURN:
        others = ", ".join(other for other in STRATEGIES if other not in ONE_TURN)
        raise ConfigError(f"the strategy {kind} cannot be used with tools; take one of {others}")
    make, number = STRATEGIES[kind]
    if colon:
        if not text.isdecimal():
            raise ConfigError(f"a strategy is written NAME or NAME:NUMBER; got {name!r}")
        number = int(text)
    between(f"the number of {name}", number, 1)
    return make(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost:
    """Accuracy against tokens."""

    accuracy: Interval
    tokens: float
    """Mean tokens that the policy wrote for one question."""
    right: tuple[bool, ...]
    """By example."""


def spend(
    strategy: Strategy, task: Task, examples: Sequence[Example], *, draws: Sampler, seconds: float
) -> TokenCost:
    """Answer every example by a strategy and score what it settles on, by the verifier of training."""
    judge = task_judge(task, examples, seconds=seconds)
    draws = replace(draws, examples=examples)
    answers = strategy([task.ask(example) for example in examples], draws, judge)
    right = []
    for example, answer in zip(examples, answers, strict=True):
        group = Group(example=example, rollouts=(answer.rollout,))
        scored = score_group(group, rewards=task.rewards, weights=task.weights, seconds=seconds)
        right.append(task.is_right(scored.rollouts[0]))
    return TokenCost(
        accuracy=wilson(sum(right), len(right)),
        tokens=fmean(answer.tokens for answer in answers),
        right=tuple(right),
    )
