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


def strategy_named(name: str) -> Strategy:
    """Return the strategy of a name such as `self-consistency`, or `self-consistency:16`."""
    kind, colon, text = name.partition(":")
    if kind not in STRATEGIES:
        raise ConfigError(f"unknown strategy {kind!r}{closest(kind, STRATEGIES)}")
    make, number = STRATEGIES[kind]
    if colon:
        if not text.isdecimal():
            raise ConfigError(f"a strategy is written NAME or NAME:NUMBER; got {name!r}")
        number = int(text)
    between(f"the number of {name}", number, 1)
    return make(number)
