r"""A second look at values that agree in floating point: are they equal, or only close?

`e^{-40}` is not 0 and `10^{15} + 1` is not `10^{15} \sin 90^\circ`, though floats tell neither pair apart.
Equal values differ by rounding alone, so their difference shrinks with the precision. That of others stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from threading import Lock
from typing import Any

import mpmath

from groupwise.rewards.latex.expressions import Node
from groupwise.rewards.latex.values import INVERSE, RECIPROCAL, TRIGONOMETRIC, Undefined, assigned

ONE_AT_A_TIME = Lock()
"""mpmath's precision is the same for all threads."""
DIGITS, MORE_DIGITS = 40, 120
ROUNDING = 10.0**-40
"""Of the 80 digits that are gained, rounding must have shrunk by these."""


def precisely_equal(one: Node, other: Node, point: int) -> bool:
    """Tell whether two values that are close are equal."""
    try:
        rough, _ = difference(one, other, point, DIGITS)
        fine, size = difference(one, other, point, MORE_DIGITS)
    except (ArithmeticError, ValueError, TypeError, KeyError, Undefined):
        return False
    return bool(fine <= rough * ROUNDING or fine <= size * ROUNDING**2)


def precisely_proportional(ours: Node, theirs: Node, points: Sequence[int]) -> bool:
    """Tell whether one value is the same multiple of another at every point."""
    try:
        with ONE_AT_A_TIME, mpmath.workdps(MORE_DIGITS):
            first, *others = [evaluated(ours, point) / evaluated(theirs, point) for point in points]
            return all(abs(ratio - first) <= abs(first) * ROUNDING**2 for ratio in others)
    except (ArithmeticError, ValueError, TypeError, KeyError, Undefined):
        return False


def difference(one: Node, other: Node, point: int, digits: int) -> tuple[Any, Any]:
    """Return by how much two values differ, and the size of one."""
    with ONE_AT_A_TIME, mpmath.workdps(digits):
        ours, theirs = evaluated(one, point), evaluated(other, point)
        return abs(ours - theirs), abs(ours)


def evaluated(node: Node, point: int, *, angle: bool = False) -> Any:
    """Return the value of a tree as `values.value_at` does, in mpmath's numbers."""
    kind = node[0]
    if kind == "number":
        return rational(node[1])
    if kind == "name":
        return rational(assigned(node[1], point))
    if kind == "constant":
        return {"pi": +mpmath.pi, "e": +mpmath.e, "i": mpmath.mpc(0, 1)}[node[1]]
    if kind == "function":
        return function(node, point)
    parts = [evaluated(part, point, angle=angle) for part in node[1:]]
    if kind == "percent":
        return parts[0] / 100
    if kind == "degrees":
        return parts[0] * mpmath.pi / 180 if angle else parts[0]
    return OPERATIONS[kind](*parts)


def rational(value: Fraction) -> Any:
    return mpmath.mpf(value.numerator) / value.denominator


def root(degree: Any, value: Any) -> Any:
    """Return the real root where there is one."""
    n = int(degree)
    if n % 2 and mpmath.im(value) == 0 and mpmath.re(value) < 0:
        return -mpmath.root(-value, n)
    return mpmath.root(value, n)


def power(base: Any, exponent: Any) -> Any:
    """Return a power; one with a whole exponent or an odd root of a negative number stays real."""
    if mpmath.im(exponent) == 0 and mpmath.re(exponent) != 0:
        below = 1 / mpmath.re(exponent)
        n = int(mpmath.nint(below))
        if 2 <= n <= 64 and mpmath.almosteq(below, n):
            return root(n, base)
    return mpmath.power(base, exponent)


def function(node: Node, point: int) -> Any:
    _, name, argument, base = node
    trigonometric = name in TRIGONOMETRIC or name in RECIPROCAL
    x = evaluated(argument, point, angle=trigonometric)
    if name in INVERSE:
        return {"arcsin": mpmath.asin, "arccos": mpmath.acos, "arctan": mpmath.atan}[name](x)
    if trigonometric or name == "exp":
        return getattr(mpmath, name)(x)
    scale = evaluated(base, point) if base else (10 if name == "log" else mpmath.e)
    return mpmath.log(x) / mpmath.log(scale)


OPERATIONS: dict[str, Any] = {
    "+": lambda a, b: a + b,
    "mixed": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "^": power,
    "root": root,
    "negative": lambda a: -a,
    "factorial": mpmath.factorial,
    "choose": mpmath.binomial,
    "absolute": abs,
}
