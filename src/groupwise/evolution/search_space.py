"""What members may differ in: settings with bounds, how first values are drawn and how values change."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from groupwise.config import FLAGS, Config
from groupwise.config.schema import BUILT_IN
from groupwise.errors import ConfigError
from groupwise.seeds import derive_seed
from groupwise.tasks import Task
from groupwise.tasks.task import closest

Values = dict[str, float]
"""A member's settings by name."""

WEIGHTS = "weights."
"""Before the name of a reward: its weight in the sum."""
TUNABLE = (
    "optim.learning_rate",
    "optim.max_grad_norm",
    "algo.beta",
    "algo.clip_low",
    "algo.clip_high",
    "algo.entropy_bonus",
    "rollout.group_size",
    "rollout.temperature",
)
WHOLE = {"rollout.group_size"}
USUAL: dict[str, tuple[float, float]] = {
    "optim.learning_rate": (1e-7, 1e-5),
    "algo.beta": (1e-4, 1e-2),
    "rollout.group_size": (4, 12),
}
"""Bounds for a model of a few billion weights under adapters."""
USUAL_TINY: dict[str, tuple[float, float]] = {
    "optim.learning_rate": (2e-5, 2e-3),
    "rollout.group_size": (8, 24),
    "rollout.temperature": (0.6, 1.2),
}
"""Bounds for the built-in model: as far from its own settings; it needs no anchor."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Bounds by name."""

    bounds: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, config: Config, task: Task) -> SearchSpace:
        """The bounds that the settings declare, or the usual ones."""
        if not config.evolve.vary:
            return cls(USUAL_TINY if config.model.name in BUILT_IN else USUAL)
        bounds: dict[str, tuple[float, float]] = {}
        for name, (low, high) in config.evolve.vary.items():
            full = FLAGS.get(name, name)
            if full.startswith(WEIGHTS) and full.removeprefix(WEIGHTS) not in task.rewards:
                known = [WEIGHTS + reward for reward in task.rewards]
                raise ConfigError(f"evolve.vary: no reward for {name}{closest(name, known)}")
            if not full.startswith(WEIGHTS) and full not in TUNABLE:
                raise ConfigError(f"evolve.vary: {name} is the same for all members{closest(full, TUNABLE)}")
            for bound in (low, high):
                try:
                    applied({full: float(bound)}, config, task)
                except ConfigError as error:
                    raise ConfigError(f"evolve.vary: {error}") from None
            bounds[full] = (float(low), float(high))
        return cls(bounds)

    def start(self, config: Config, task: Task) -> Values:
        """The values that the settings give, moved inside the bounds."""
        return {name: self.fit(name, current(name, config, task)) for name in self.bounds}

    def spread(self, count: int, *, seed: int) -> list[Values]:
        """Draw values for so many members: of each setting, one from every equal part of its range.

        Ranges are divided by their logarithm where both bounds are above 0 (Latin hypercube, McKay 1979).
        """
        drawn: list[Values] = [{} for _ in range(count)]
        for name, (low, high) in self.bounds.items():
            rng = random.Random(derive_seed(seed, "first values", name))
            parts = list(range(count))
            rng.shuffle(parts)
            for values, part in zip(drawn, parts, strict=True):
                values[name] = self.fit(name, between(low, high, (part + rng.random()) / count))
        return drawn

    def mutate(self, values: Values, rng: random.Random, factors: tuple[float, float]) -> Values:
        """Change one value, chosen by lot, by one of the factors."""
        name = rng.choice(sorted(values))
        return {**values, name: self.changed(name, values[name], rng.choice(factors))}

    def perturb(self, values: Values, rng: random.Random, factors: tuple[float, float]) -> Values:
        """Change every value, each by one of the factors."""
        return {
            name: self.changed(name, value, rng.choice(factors)) for name, value in sorted(values.items())
        }

    def changed(self, name: str, value: float, factor: float) -> float:
        """A value times a factor; a whole number changes by at least one."""
        moved = value * factor
        if name in WHOLE:
            moved = max(round(moved), value + 1) if factor > 1 else min(round(moved), value - 1)
        return self.fit(name, moved)

    def fit(self, name: str, value: float) -> float:
        low, high = self.bounds[name]
        inside = min(max(value, low), high)
        return float(round(inside)) if name in WHOLE else inside


def between(low: float, high: float, share: float) -> float:
    """The value at some share of the way from one bound to the other."""
    if low <= 0:
        return low + share * (high - low)
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))


def current(name: str, config: Config, task: Task) -> float:
    """The value that a setting has."""
    if name.startswith(WEIGHTS):
        return float(task.weights.get(name.removeprefix(WEIGHTS), 1.0))
    section, _, key = name.partition(".")
    value: Any = getattr(getattr(config, section), key)
    assert value is not None, "the config is resolved"
    return float(value)


def applied(values: Values, config: Config, task: Task) -> tuple[Config, Task]:
    """The settings and the task of a member with these values."""
    weights = dict(task.weights)
    for name, value in values.items():
        if name.startswith(WEIGHTS):
            weights[name.removeprefix(WEIGHTS)] = value
            continue
        section, _, key = name.partition(".")
        typed = int(value) if name in WHOLE else value
        config = replace(config, **{section: replace(getattr(config, section), **{key: typed})})
    return config, replace(task, weights=weights)
