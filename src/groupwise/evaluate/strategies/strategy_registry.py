"""Strategies by name, as on the command line (`best-of:8`), and their accuracy against tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from groupwise.config.coerce import between
from groupwise.errors import ConfigError
from groupwise.evaluate.intervals import Interval, exact_interval
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
"""Each strategy with the default of its number: answers, answers, answers, waits, rounds."""


ONE_TURN = ("budget",)
"""Strategies that edit a reply during generation, which is not possible in a conversation with tools."""


def strategy_named(name: str, *, tools: bool = False) -> Strategy:
    """Return the strategy for a name such as `self-consistency` or `self-consistency:16`.

    `tools`: whether the policy calls tools.
    """
    kind, colon, text = name.partition(":")
    if kind not in STRATEGIES:
        raise ConfigError(f"unknown strategy {kind!r}{closest(kind, STRATEGIES)}")
    if tools and kind in ONE_TURN:
        others = ", ".join(other for other in STRATEGIES if other not in ONE_TURN)
        raise ConfigError(f"the strategy {kind} cannot be used with tools; use one of {others}")
    make, number = STRATEGIES[kind]
    if colon:
        if not text.isdecimal():
            raise ConfigError(f"a strategy must have the form NAME or NAME:NUMBER; got {name!r}")
        number = int(text)
    between(f"the number of {name}", number, 1)
    return make(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost:
    """Accuracy and token cost of a strategy."""

    accuracy: Interval
    tokens: float
    """Mean number of generated tokens per question."""
    right: tuple[bool, ...]
    """Whether the answer to each example is right."""


def spend(
    strategy: Strategy, task: Task, examples: Sequence[Example], *, draws: Sampler, seconds: float
) -> TokenCost:
    """Answer every example by a strategy and score the final answers by the task's rewards."""
    scorer = task_judge(task, examples, seconds=seconds)
    draws = replace(draws, examples=examples)
    answers = strategy([task.ask(example) for example in examples], draws, scorer)
    right = []
    for example, answer in zip(examples, answers, strict=True):
        group = Group(example=example, rollouts=(answer.rollout,))
        scored = score_group(group, rewards=task.rewards, weights=task.weights, seconds=seconds)
        right.append(task.is_right(scored.rollouts[0]))
    return TokenCost(
        accuracy=exact_interval(sum(right), len(right)),
        tokens=fmean(answer.tokens for answer in answers),
        right=tuple(right),
    )
