"""What a setting's value must satisfy, said in one sentence when it does not."""

from __future__ import annotations

import math

from groupwise.errors import ConfigError


def one_of(setting: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{setting} must be one of {', '.join(choices)}; got {value!r}")


def between(setting: str, value: float | None, low: float, high: float = float("inf")) -> None:
    if value is not None and not low <= value <= high:
        bound = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
        raise ConfigError(f"{setting} must be {bound}; got {value!r}")


def finite(setting: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{setting} must be a number; got {value!r}")
