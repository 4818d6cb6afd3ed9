"""Curves with intervals as an SVG file: share over a quantity on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from groupwise.evaluate.intervals import Interval

COLOURS = ("#444444", "#1f77b4", "#2ca02c", "#d62728", "#9467bd")
WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 620, 10, 350
"""The edges of the field that the curves lie in."""


class Point(NamedTuple):
    """Where on the axis, and the share there."""

    x: float
    share: Interval


def draw(curves: Mapping[str, Sequence[Point]], *, axis: str) -> str:
    """Return the drawing as text."""
    every = [point.x for points in curves.values() for point in points]
    low, high = math.log2(min(every)) - 0.3, math.log2(max(every)) + 0.3

    def across(x: float) -> float:
        return LEFT + (math.log2(x) - low) / (high - low) * (RIGHT - LEFT)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for percent in range(0, 101, 20):
        y = up(percent / 100)
        parts += [line(LEFT, y, RIGHT, y, "#dddddd"), text(LEFT - 8, y + 4, f"{percent} %", "end")]
    for power in range(math.ceil(low), math.floor(high) + 1):
        x = across(2.0**power)
        parts += [line(x, TOP, x, BOTTOM, "#eeeeee"), text(x, BOTTOM + 18, str(2**power), "middle")]
    parts.append(text((LEFT + RIGHT) / 2, HEIGHT - 12, axis, "middle"))
    for number, (name, points) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        parts += curve([(across(x), share) for x, share in points], colour)
        parts += [dot(LEFT + 14, 20 + 16 * number, colour), text(LEFT + 24, 24 + 16 * number, name, "start")]
    return "\n".join([*parts, "</svg>", ""])


def up(share: float) -> float:
    return BOTTOM - share * (BOTTOM - TOP)


def curve(points: Sequence[tuple[float, Interval]], colour: str) -> Iterator[str]:
    path = " ".join(f"{x:.1f},{up(share.mean):.1f}" for x, share in points)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for x, share in points:
        yield line(x, up(share.low), x, up(share.high), colour)
        yield dot(x, up(share.mean), colour)


def line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'


def text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'
