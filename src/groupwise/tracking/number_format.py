"""Format numbers, durations and sparklines, and make text safe to print on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

BARS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """Format a duration with its two largest units: 72 -> "1 min 12 s"."""
    whole = round(seconds)
    for name, length, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= length:
            return f"{whole // length} {name} {whole % length // part} {smaller}"
    return f"{whole} s"


def sparkline(values: Sequence[float], *, width: int, least_range: float = 0.1) -> str:
    """Draw a series in at most `width` characters, each the mean of an equal part of the values.

    The scale spans at least `least_range`, so that noise around a constant does not look like a trend.
    """
    if not values or not width:
        return ""
    width = min(width, len(values))
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low = min(means)
    scale = (len(BARS) - 1) / max(max(means) - low, least_range)
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def number(value: float) -> str:
    """Format a number briefly: 5123.4 -> "5,123", 3.148 -> "3.15", 0.00012 -> "1.2e-04"."""
    size = abs(value)
    for least, pattern in ((100, ",.0f"), (10, ".1f"), (1, ".2f"), (0.001, ".3f")):
        if size >= least:
            return format(value, pattern)
    return format(value, ".1e") if value else "0"


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def printable(text: str) -> str:
    """Replace control characters, such as line breaks and escape codes, by spaces."""
    return "".join(character if character.isprintable() else " " for character in text)
