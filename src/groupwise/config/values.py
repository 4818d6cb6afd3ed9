"""Turn what the user wrote into the type its setting declares, and refuse whatever needs a guess."""

from __future__ import annotations

import math
import reprlib
import types
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, Union, get_args, get_origin

from groupwise.config.text import BadYaml, parse_yaml
from groupwise.errors import ConfigError

shorten = reprlib.Repr()
shorten.maxstring = shorten.maxother = shorten.maxlong = 80


def as_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def as_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


def as_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise TypeError
    return float(value)


def as_str(value: Any) -> str:
    if not isinstance(value, str | PurePath):
        raise TypeError
    return str(value)


def as_strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError
    return tuple(as_str(item) for item in value)


def as_options(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError
    return {as_str(key): as_plain(item) for key, item in value.items()}


def as_plain(value: Any) -> Any:
    """Accept what YAML can write down and read back unchanged."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return as_float(value)
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    return as_options(value)


KINDS: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    bool: ("true or false", as_bool),
    int: ("a whole number (int)", as_int),
    float: ("a number (float)", as_float),
    str: ("a string", as_str),
    tuple: ("a list of strings", as_strings),
    Mapping: ("a mapping of plain values", as_options),
}
"""The types a setting may declare: how to call each in a message, and how to accept a value for it."""


def kind_of(hint: Any) -> tuple[Any, bool]:
    """Split a declared type into its kind and whether null is allowed: `int | None` -> (int, True)."""
    optional = get_origin(hint) in (types.UnionType, Union)
    if optional:
        (hint,) = (arm for arm in get_args(hint) if arm is not type(None))
    kind = get_origin(hint) or hint
    assert kind in KINDS, f"settings of type {hint} cannot be read"
    return kind, optional


def convert(value: Any, *, to: Any, setting: str) -> Any:
    """Return a YAML or Python value as the type `to`."""
    kind, optional = kind_of(to)
    if value is None and optional:
        return None
    expected, accept = KINDS[kind]
    try:
        return accept(value)
    except (TypeError, OverflowError):
        raise mismatch(setting, expected, optional=optional, got=value) from None


def convert_text(text: str, *, to: Any, setting: str) -> Any:
    """Return text from the shell as the type `to`; there a string needs no quotes and a list no brackets."""
    kind, optional = kind_of(to)
    if optional and text in ("null", "~"):
        return None
    if kind is str and not text.startswith(("'", '"')):
        return text
    if kind is tuple and not text.startswith("["):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        value = parse_yaml(text)
    except BadYaml:
        raise mismatch(setting, KINDS[kind][0], optional=optional, got=text) from None
    return convert(value, to=to, setting=setting)


def convert_option(text: str, *, setting: str) -> Any:
    """Return text from the shell as the plain value it looks like, for settings that only a task declares."""
    try:
        return as_plain(parse_yaml(text))
    except (BadYaml, TypeError):
        raise mismatch(setting, "a plain value", optional=False, got=text) from None


def mismatch(setting: str, expected: str, *, optional: bool, got: Any) -> ConfigError:
    or_null = " or null" if optional else ""
    return ConfigError(f"{setting} must be {expected}{or_null}; got {shorten.repr(got)}")
