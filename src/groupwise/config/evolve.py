"""Populations (`groupwise evolve`): how many members, how they differ, and which of them go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from groupwise.config.checks import between, finite, one_of
from groupwise.errors import ConfigError

METHODS = ("halving", "tournament", "pbt", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolveConfig:
    """A population on one base (`groupwise evolve`)."""

    method: str = "halving"
    """halving (successive), tournament (with elitism), pbt, or random: nobody is replaced."""
    population: int = 4
    every: int = 12
    """Steps between selections; each is preceded by an evaluation of every member."""
    tokens: int | None = None
    """Stop when this many tokens were sampled, in training and in evaluations, by all members together."""
    target: float | None = None
    """Stop when the best member's accuracy reaches this."""
    vary: Mapping[str, Any] = field(default_factory=dict)
    """What differs, between which bounds: `{optim.learning_rate: [1e-6, 1e-4], weights.format: [0, 1]}`."""
    spread: bool = True
    """Draw the first members' values from those bounds, but for the first member. false: all start equal."""
    certain: bool = True
    """Replace a member only by one that is better beyond doubt: 95 %, paired over the same prompts."""
    tournament: int = 2
    """Members that are drawn for a tournament."""
    elitism: bool = True
    """The best member goes on as it is."""
    mutate: float = 0.857
    """How often a member that goes on gets another value of one setting (6 in 7)."""
    smaller: float = 0.8
    """What a value is multiplied by when it changes: this or the next, by lot."""
    larger: float = 1.2
    share: float = 0.25
    """pbt: the worst share copies from the best share."""

    def __post_init__(self) -> None:
        one_of("evolve.method", self.method, METHODS)
        between("evolve.population", self.population, 1)
        between("evolve.every", self.every, 1)
        between("evolve.tokens", self.tokens, 1)
        between("evolve.target", self.target, 0.0, 1.0)
        between("evolve.tournament", self.tournament, 1)
        between("evolve.mutate", self.mutate, 0.0, 1.0)
        between("evolve.share", self.share, 0.0, 0.5)
        for name, bounds in self.vary.items():
            if not isinstance(bounds, list | tuple) or len(bounds) != 2:
                raise ConfigError(f"evolve.vary: {name} needs a lowest and a highest value; got {bounds!r}")
            for bound in bounds:
                finite(f"evolve.vary: a bound of {name}", bound)
            if not bounds[0] <= bounds[1]:
                raise ConfigError(f"evolve.vary: {name} goes from {bounds[0]} down to {bounds[1]}")
        between("evolve.smaller", self.smaller, 1e-6, 1.0)
        between("evolve.larger", self.larger, 1.0)
