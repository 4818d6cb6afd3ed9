"""A tool is a typed Python function: its signature and docstring are its schema.

    def search(query: str, limit: int = 5) -> list[str]:
        \"\"\"Search the documents.

        query: what to look for
        limit: how many to return
        \"\"\"

What it returns is what the policy reads: text as it is, anything else as JSON; a `Found` also tells
rewards what was found. An exception is the policy's mistake until proven otherwise, and goes back to
it as a sentence; a `RolloutError` is the tool's own failure, and the rollout is excluded.

A parameter named `state` is not the policy's to fill: it gets what the task made for this rollout alone.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from groupwise.errors import ConfigError

STATE = "state"
JSON_TYPES: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's answer together with the names of what it found, best first."""

    text: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the policy may call."""

    name: str
    description: str
    function: Callable[..., Any]
    hints: Mapping[str, Any]
    """The type of each parameter."""
    required: tuple[str, ...]
    notes: Mapping[str, str]
    """What the docstring says of a parameter."""
    takes_state: bool = False
    """Whether the function wants its rollout's state."""

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates and OpenAI's interface know it."""
        properties = {
            name: json_schema(hint) | ({"description": self.notes[name]} if name in self.notes else {})
            for name, hint in self.hints.items()
        }
        parameters = {"type": "object", "properties": properties, "required": list(self.required)}
        about = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": about}

    @property
    def asynchronous(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def refusal(self, arguments: Mapping[str, Any]) -> str | None:
        """Say what is wrong with the arguments of a call, if anything is."""
        for name in self.required:
            if name not in arguments:
                return f"{self.name} needs the argument {name!r}"
        for name, value in arguments.items():
            if name not in self.hints:
                return f"{self.name} has no argument {name!r}, only {', '.join(self.hints)}"
            if not fits(value, self.hints[name]):
                return f"{self.name}: {name} must be {json.dumps(json_schema(self.hints[name]))}"
        return None


def tool_of(function: Callable[..., Any]) -> Tool:
    """Read a function's signature and docstring."""
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise ConfigError(f"a tool must be a function with a name; got {function!r}")
    hints = get_type_hints(function)
    parameters = dict(inspect.signature(function).parameters)
    takes_state = parameters.pop(STATE, None) is not None
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"tool {name}: every parameter must have a name; got {parameter}")
        if parameter.name not in hints:
            raise ConfigError(
                f"tool {name}: say of what type {parameter.name} is, such as {parameter.name}: str"
            )
        json_schema(hints[parameter.name])
    documentation = inspect.getdoc(function) or ""
    if not documentation:
        raise ConfigError(f"tool {name}: write a docstring; it tells the model what the tool does")
    return Tool(
        name=name,
        description=documentation.partition("\n")[0],
        function=function,
        hints={parameter: hints[parameter] for parameter in parameters},
        required=tuple(p.name for p in parameters.values() if p.default is p.empty),
        notes=notes_in(documentation, parameters),
        takes_state=takes_state,
    )


def notes_in(documentation: str, names: Mapping[str, object]) -> dict[str, str]:
    """Return the docstring's lines of the form `name: what it is`."""
    notes = {}
    for line in documentation.splitlines()[1:]:
        name, colon, note = line.strip().partition(":")
        if colon and name in names:
            notes[name] = note.strip()
    return notes


def json_schema(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a Python type."""
    if hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (list, Sequence) or hint is list:
        return {"type": "array"} | ({"items": json_schema(inner[0])} if inner else {})
    if origin in (dict, Mapping) or hint is dict:
        return {"type": "object"}
    if origin in (Union, types.UnionType):
        choices = [json_schema(one) for one in inner if one is not type(None)]
        return choices[0] if len(choices) == 1 else {"anyOf": choices}
    raise ConfigError(
        f"a tool's parameter cannot be {hint!r}: use str, int, float, bool, Literal, list or dict"
    )


def fits(value: Any, hint: Any) -> bool:
    """Tell whether a value out of JSON is of a type; a whole number is also a float."""
    if hint in JSON_TYPES:
        if isinstance(value, bool):
            return hint is bool
        return isinstance(value, int | float) if hint is float else isinstance(value, hint)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in inner
    if origin in (list, Sequence) or hint is list:
        return isinstance(value, list) and all(fits(item, inner[0]) for item in value if inner)
    if origin in (Union, types.UnionType):
        return any(value is None if one is type(None) else fits(value, one) for one in inner)
    return isinstance(value, dict)
