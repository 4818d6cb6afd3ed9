"""Rewards for the shape of an answer's text."""

from __future__ import annotations

from collections.abc import Callable

from groupwise.errors import ConfigError
from groupwise.records import Example, Rollout


def length(*, at_most: int) -> Callable[[Rollout, Example], float]:
    """Make a reward that is 1 when `rollout.text` has at most this many characters, else 0."""
    if at_most < 1:
        raise ConfigError(f"length(at_most=…) must be at least 1 character; got {at_most!r}")

    def short_enough(rollout: Rollout, example: Example) -> float:
        return float(len(rollout.text) <= at_most)

    return short_enough
