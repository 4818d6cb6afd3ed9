"""Evaluate expressions with bounded size: exactly if rational, else in floating point.

Values that are close in floating point are compared again with mpmath at high precision.
"""

from __future__ import annotations

import cmath
import math
import zlib
from collections.abc import Sequence
from fractions import Fraction
from threading import Lock
from typing import Any

import mpmath

from groupwise.rewards.verify.latex.expressions import Node

Value = Fraction | complex
MAX_BITS = 4096
MAX_FACTORIAL = 100
TOLERANCE = 1e-9
POINTS = 4
"""Number of random assignments to the variables at which two expressions must agree."""


class Undefined(Exception):
    """The expression has no value: division by zero, infinity, or too large a number."""


def value_at(node: Node, point: int, *, angle: bool = False) -> Value:
    """Return the value of a tree, with each variable replaced by a number that depends on name and point.

    `angle`: whether a degree sign converts to radians, as inside a trigonometric function; elsewhere it is a
    unit.
    """
    kind = node[0]
    if kind == "number":
        return exact(node[1])
    if kind == "name":
        return assigned(node[1], point)
    if kind == "constant":
        return {"pi": complex(math.pi), "e": complex(math.e), "i": 1j}[node[1]]
    if kind in ("percent", "degrees"):
        inside = value_at(node[1], point, angle=angle)
        if kind == "percent":
            return divide(inside, Fraction(100))
        return multiply(inside, math.pi / 180) if angle else inside
    if kind == "function":
        return function_value(node, point)
    if kind not in OPERATIONS:
        raise Undefined(f"a {kind} has no value")
    return bounded(OPERATIONS[kind](*(value_at(part, point, angle=angle) for part in node[1:])))


def assigned(name: str, point: int) -> Fraction:
    """Return a number for a variable: positive at point 0, negative at 1, then of either sign."""
    noise = zlib.crc32(f"{name} {point}".encode())
    number = Fraction(noise % 9973 + 1, 2003)
    return -number if point == 1 or (point > 1 and noise & 1) else number


def bounded(value: Value) -> Value:
    if isinstance(value, Fraction):
        return exact(value)
    if not cmath.isfinite(value):
        raise Undefined("infinite")
    return value


def exact(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise Undefined("too large")
    return value


def add(left: Value, right: Value) -> Value:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left + right
    return inexact(left) + inexact(right)


def negate(value: Value) -> Value:
    return -value


def subtract(left: Value, right: Value) -> Value:
    return add(left, -right)


def multiply(left: Value, right: Value | float) -> Value:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left * right
    return inexact(left) * inexact(right)


def divide(left: Value, right: Value) -> Value:
    if not right or (not isinstance(right, Fraction) and abs(right) < 1e-12):
        raise Undefined("division by zero")
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left / right
    return inexact(left) / inexact(right)


def inexact(value: Value | float) -> complex:
    try:
        return complex(value)
    except OverflowError:
        raise Undefined("too large") from None


def power(base: Value, exponent: Value) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            return whole_power(base, int(exponent))
        if exponent.numerator == 1 and exponent.denominator <= 64:
            return root(Fraction(exponent.denominator), base)
    try:
        return inexact(base) ** inexact(exponent)
    except (OverflowError, ZeroDivisionError):
        raise Undefined("too large") from None


def whole_power(base: Fraction, exponent: int) -> Fraction:
    size = base.numerator.bit_length() + base.denominator.bit_length()
    if base not in (0, 1, -1) and abs(exponent) * size > MAX_BITS:
        raise Undefined("too large")
    if not base and exponent <= 0:
        raise Undefined("0 to the 0")
    if abs(exponent) > MAX_BITS:
        exponent = exponent % 2  # of 0, 1 or -1
        return base if exponent else base * base
    return Fraction(base**exponent)


def root(degree: Value, value: Value) -> Value:
    """Return a root, real if possible and exact if rational."""
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 1 <= degree <= 64:
        raise Undefined("unsupported degree of a root")
    n = int(degree)
    if isinstance(value, Fraction):
        if value < 0 and n % 2:
            return -root(degree, -value)
        if value >= 0:
            above, below = whole_root(value.numerator, n), whole_root(value.denominator, n)
            if above is not None and below is not None:
                return Fraction(above, below)
    number = inexact(value)
    return cmath.sqrt(number) if n == 2 else number ** (1 / n)


def whole_root(value: int, n: int) -> int | None:
    """Return the exact n-th root of an integer, or None."""
    if n == 2:
        guess = math.isqrt(value)
    elif value.bit_length() > 1000:
        return None
    else:
        guess = round(value ** (1 / n))
    return guess if guess**n == value else None


def factorial(value: Value) -> Value:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
        raise Undefined("factorial out of range")
    return Fraction(math.factorial(int(value)))


def choose(n: Value, k: Value) -> Value:
    for value in (n, k):
        if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= 1000:
            raise Undefined("binomial coefficient out of range")
    return Fraction(math.comb(int(n), int(k)))  # type: ignore[arg-type]


def absolute(value: Value) -> Value:
    return abs(value) if isinstance(value, Fraction) else complex(abs(value))


OPERATIONS: dict[str, Any] = {
    "+": add,
    "mixed": add,
    "-": subtract,
    "*": multiply,
    "/": divide,
    "^": power,
    "root": root,
    "negative": negate,
    "factorial": factorial,
    "choose": choose,
    "absolute": absolute,
}

TRIGONOMETRIC = {"sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan}
INVERSE = {"arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan}
RECIPROCAL = {"csc": cmath.sin, "sec": cmath.cos, "cot": cmath.tan}


def function_value(node: Node, point: int) -> Value:
    _, name, argument, base = node
    trigonometric = name in TRIGONOMETRIC or name in RECIPROCAL
    x = inexact(value_at(argument, point, angle=trigonometric))
    try:
        if name in RECIPROCAL:
            return bounded(divide(Fraction(1), RECIPROCAL[name](x)))
        if name in TRIGONOMETRIC:
            return bounded(TRIGONOMETRIC[name](x))
        if name in INVERSE:
            return bounded(INVERSE[name](x))
        if name == "exp":
            return bounded(cmath.exp(x))
        scale = (
            cmath.log(inexact(value_at(base, point))) if base else cmath.log(10 if name == "log" else math.e)
        )
        return bounded(divide(cmath.log(x), scale))
    except (OverflowError, ValueError, ZeroDivisionError):
        raise Undefined(name) from None


def close(left: Value, right: Value) -> bool:
    """Return whether two values are equal, or close if one of them is inexact."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    one, other = inexact(left), inexact(right)
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other)) + 1e-13


ONE_AT_A_TIME = Lock()
"""mpmath's precision is global to all threads."""
DIGITS, MORE_DIGITS = 40, 120
ROUNDING = 10.0**-40
"""From DIGITS to MORE_DIGITS, the rounding error of equal values must shrink by this factor."""


def precisely_equal(one: Node, other: Node, point: int) -> bool:
    """Return whether two close values are equal, by comparing their difference at two precisions."""
    try:
        rough, _ = difference(one, other, point, DIGITS)
        fine, size = difference(one, other, point, MORE_DIGITS)
    except (ArithmeticError, ValueError, TypeError, KeyError, Undefined):
        return False
    return bool(fine <= rough * ROUNDING or fine <= size * ROUNDING**2)


def precisely_proportional(ours: Node, theirs: Node, points: Sequence[int]) -> bool:
    """Return whether one value is the same multiple of another at every point."""
    try:
        with ONE_AT_A_TIME, mpmath.workdps(MORE_DIGITS):
            first, *others = [evaluated(ours, point) / evaluated(theirs, point) for point in points]
            return all(abs(ratio - first) <= abs(first) * ROUNDING**2 for ratio in others)
    except (ArithmeticError, ValueError, TypeError, KeyError, Undefined):
        return False


def difference(one: Node, other: Node, point: int, digits: int) -> tuple[Any, Any]:
    """Return the absolute difference of two values, and the magnitude of the first."""
    with ONE_AT_A_TIME, mpmath.workdps(digits):
        ours, theirs = evaluated(one, point), evaluated(other, point)
        return abs(ours - theirs), abs(ours)


def evaluated(node: Node, point: int, *, angle: bool = False) -> Any:
    """Return the value of a tree as `value_at` does, as an mpmath number."""
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
    return PRECISE_OPERATIONS[kind](*parts)


def rational(value: Fraction) -> Any:
    return mpmath.mpf(value.numerator) / value.denominator


def precise_root(degree: Any, value: Any) -> Any:
    """Return a root, real if possible."""
    n = int(degree)
    if n % 2 and mpmath.im(value) == 0 and mpmath.re(value) < 0:
        return -mpmath.root(-value, n)
    return mpmath.root(value, n)


def precise_power(base: Any, exponent: Any) -> Any:
    """Return a power. Integer exponents and odd roots of negative numbers stay real."""
    if mpmath.im(exponent) == 0 and mpmath.re(exponent) != 0:
        below = 1 / mpmath.re(exponent)
        n = int(mpmath.nint(below))
        if 2 <= n <= 64 and mpmath.almosteq(below, n):
            return precise_root(n, base)
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


PRECISE_OPERATIONS: dict[str, Any] = {
    "+": lambda a, b: a + b,
    "mixed": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "^": precise_power,
    "root": precise_root,
    "negative": lambda a: -a,
    "factorial": mpmath.factorial,
    "choose": mpmath.binomial,
    "absolute": abs,
}
