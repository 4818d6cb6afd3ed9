"""The search space: settings with bounds, how initial values are sampled and how values mutate."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from groupwise.config import FLAGS, Config
from groupwise.config.schema import BUILT_IN
from groupwise.errors import ConfigError
from groupwise.records import derive_seed
from groupwise.tasks import Task
from groupwise.tasks.task import closest

Values = dict[str, float]
"""A member's settings by name."""

WEIGHTS = "weights."
"""Prefix of a parameter that is the weight of a reward: `weights.NAME`."""
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
    "optim.learning_rate": (5e-6, 2e-4),
    "algo.beta": (1e-4, 1e-2),
    "rollout.group_size": (4, 16),
}
"""Default bounds for adapters, with the default settings inside."""
USUAL_TINY: dict[str, tuple[float, float]] = {
    "optim.learning_rate": (2e-5, 2e-3),
    "rollout.group_size": (8, 24),
    "rollout.temperature": (0.6, 1.2),
}
"""Default bounds for the built-in model, around its own default settings; it needs no KL penalty."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Bounds by setting."""

    bounds: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, config: Config, task: Task) -> SearchSpace:
        """Return the bounds of `evolve.vary`, or the defaults."""
        if not config.evolve.vary:
            return cls(USUAL_TINY if config.model.name in BUILT_IN else USUAL)
        bounds: dict[str, tuple[float, float]] = {}
        for name, (low, high) in config.evolve.vary.items():
            full = FLAGS.get(name, name)
            if full.startswith(WEIGHTS) and full.removeprefix(WEIGHTS) not in task.rewards:
                known = [WEIGHTS + reward for reward in task.rewards]
                raise ConfigError(f"evolve.vary: {name} names no reward of the task{closest(name, known)}")
            if not full.startswith(WEIGHTS) and full not in TUNABLE:
                raise ConfigError(f"evolve.vary: {name} cannot vary between members{closest(full, TUNABLE)}")
            for bound in (low, high):
                try:
                    applied({full: float(bound)}, config, task)
                except ConfigError as error:
                    raise ConfigError(f"evolve.vary: {error}") from None
            bounds[full] = (float(low), float(high))
        return cls(bounds)

    def start(self, config: Config, task: Task) -> Values:
        """Return the configured values, clamped to the bounds."""
        return {name: self.fit(name, current(name, config, task)) for name in self.bounds}

    def spread(self, count: int, *, seed: int) -> list[Values]:
        """Sample values for `count` members: for each setting, one from every equal part of its range.

        This is Latin hypercube sampling (McKay 1979). Ranges with positive bounds are divided on a log scale.
        """
        samples: list[Values] = [{} for _ in range(count)]
        for name, (low, high) in self.bounds.items():
            rng = random.Random(derive_seed(seed, "first values", name))
            parts = list(range(count))
            rng.shuffle(parts)
            for values, part in zip(samples, parts, strict=True):
                values[name] = self.fit(name, between(low, high, (part + rng.random()) / count))
        return samples

    def mutate(self, values: Values, rng: random.Random, factors: tuple[float, float]) -> Values:
        """Multiply one randomly chosen value by one of the factors."""
        name = rng.choice(sorted(values))
        return {**values, name: self.changed(name, values[name], rng.choice(factors))}

    def perturb(self, values: Values, rng: random.Random, factors: tuple[float, float]) -> Values:
        """Multiply every value by one of the factors."""
        return {
            name: self.changed(name, value, rng.choice(factors)) for name, value in sorted(values.items())
        }

    def changed(self, name: str, value: float, factor: float) -> float:
        """Return a value times a factor; an integer changes by at least one."""
        scaled = value * factor
        if name in WHOLE:
            scaled = max(round(scaled), value + 1) if factor > 1 else min(round(scaled), value - 1)
        return self.fit(name, scaled)

    def fit(self, name: str, value: float) -> float:
        low, high = self.bounds[name]
        inside = min(max(value, low), high)
        return float(round(inside)) if name in WHOLE else inside


def between(low: float, high: float, share: float) -> float:
    """Interpolate between two bounds, on a log scale if `low` is positive."""
    if low <= 0:
        return low + share * (high - low)
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))


def current(name: str, config: Config, task: Task) -> float:
    """Return the current value of a setting."""
    if name.startswith(WEIGHTS):
        return float(task.weights.get(name.removeprefix(WEIGHTS), 1.0))
    section, _, key = name.partition(".")
    value: Any = getattr(getattr(config, section), key)
    assert value is not None, "the config is resolved"
    return float(value)


def applied(values: Values, config: Config, task: Task) -> tuple[Config, Task]:
    """Return the config and the task of a member with these values."""
    weights = dict(task.weights)
    for name, value in values.items():
        if name.startswith(WEIGHTS):
            weights[name.removeprefix(WEIGHTS)] = value
            continue
        section, _, key = name.partition(".")
        typed = int(value) if name in WHOLE else value
        config = replace(config, **{section: replace(getattr(config, section), **{key: typed})})
    return config, replace(task, weights=weights)
