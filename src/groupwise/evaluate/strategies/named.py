"""Strategies by name, as the command line gives them: `best-of:8`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from groupwise.config.checks import between
from groupwise.errors import ConfigError
from groupwise.evaluate.strategies.answer import Strategy, single
from groupwise.evaluate.strategies.budget import budget_forcing
from groupwise.evaluate.strategies.preference import preference_optimization
from groupwise.evaluate.strategies.several import best_of, self_consistency
from groupwise.tasks.task import closest

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
