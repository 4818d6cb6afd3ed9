"""Read and write YAML, check the ranges of settings, and convert values to the types that settings declare.

The YAML loader is safe, rejects aliases and duplicate keys, and reads `1e-5` as a number.
"""

from __future__ import annotations

import math
import re
import reprlib
import types
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, Union, get_args, get_origin

import yaml

from groupwise.errors import ConfigError

# YAML 1.1 requires a dot in the mantissa and a sign in the exponent, so it reads 1e-5 as text. It also reads
# 010 as 8 and 1:30 as 90; here both stay text.
SCIENTIFIC = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
DECIMAL = re.compile(r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$")
WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$")
INT, FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class BadYaml(ValueError):
    """The text is not valid YAML, or uses an unsupported feature; the message has the reason and the line."""


class Loader(yaml.SafeLoader):
    """A safe loader that rejects duplicate keys and aliases, because both hide mistakes in settings."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not supported", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                problem = f"duplicate key {key.value!r}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


class Dumper(yaml.SafeDumper):
    """A dumper whose output `Loader` reads back as the same value."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Double quotes escape line breaks as \\n, so that every value stays on one line.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (INT, FLOAT)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
NUMERALS = list("-+.0123456789")
Loader.add_implicit_resolver(INT, WHOLE, NUMERALS)
Loader.add_implicit_resolver(FLOAT, DECIMAL, NUMERALS)
for cls in (Loader, Dumper):
    cls.add_implicit_resolver(FLOAT, SCIENTIFIC, NUMERALS)
Dumper.add_representer(str, represent_text)


def parse_yaml(text: str) -> Any:
    """Parse one YAML document; raise `BadYaml` if it is invalid."""
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise BadYaml(f"{line}{error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line_number = text.count("\n", 0, error.position) + 1
        raise BadYaml(f"line {line_number}: unprintable character {error.character!r}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date or number
        raise BadYaml(str(error).splitlines()[0]) from None
    except RecursionError:
        raise BadYaml("the brackets are nested too deeply") from None


def write_yaml(value: Any) -> str:
    """Return a value as one line of YAML."""
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def one_of(setting: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{setting} must be one of {', '.join(choices)}; got {value!r}")


def is_function_name(value: str) -> bool:
    """Whether a setting names a function of the user: module:function, FILE.py:function or python:NAME."""
    module, colon, function = value.rpartition(":")
    return bool(module and colon and function)


def one_of_or_function(setting: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices and not is_function_name(value):
        raise ConfigError(
            f"{setting} must be one of {', '.join(choices)}, or a function as module:function or "
            f"FILE.py:function; got {value!r}"
        )


def between(setting: str, value: float | None, low: float, high: float = float("inf")) -> None:
    if value is not None and not low <= value <= high:
        bound = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
        raise ConfigError(f"{setting} must be {bound}; got {value!r}")


def finite(setting: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{setting} must be a number; got {value!r}")


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
    """Return a value that survives a round trip through YAML; raise `TypeError` for any other."""
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
"""The types that a setting may declare: a name for messages, and the function that converts a value."""


def kind_of(hint: Any) -> tuple[Any, bool]:
    """Split a declared type into the type and whether null is allowed: `int | None` -> (int, True)."""
    optional = get_origin(hint) in (types.UnionType, Union)
    if optional:
        (hint,) = (arm for arm in get_args(hint) if arm is not type(None))
    kind = get_origin(hint) or hint
    assert kind in KINDS, f"settings of type {hint} cannot be read"
    return kind, optional


def convert(value: Any, *, to: Any, setting: str) -> Any:
    """Convert a YAML or Python value to the type `to`."""
    kind, optional = kind_of(to)
    if value is None and optional:
        return None
    expected, accept = KINDS[kind]
    try:
        return accept(value)
    except (TypeError, OverflowError):
        raise mismatch(setting, expected, optional=optional, got=value) from None


def convert_text(text: str, *, to: Any, setting: str) -> Any:
    """Convert text from the shell to the type `to`. Strings need no quotes, and lists no brackets."""
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
    """Convert text from the shell as YAML does; for task options, which declare no type."""
    try:
        return as_plain(parse_yaml(text))
    except (BadYaml, TypeError):
        raise mismatch(setting, "a plain value", optional=False, got=text) from None


def mismatch(setting: str, expected: str, *, optional: bool, got: Any) -> ConfigError:
    or_null = " or null" if optional else ""
    return ConfigError(f"{setting} must be {expected}{or_null}; got {shorten.repr(got)}")
