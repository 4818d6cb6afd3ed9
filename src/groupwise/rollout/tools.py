"""A tool is a typed Python function: its signature and docstring are its schema.

    def search(query: str, limit: int = 5) -> list[str]:
        \"\"\"Search the documents.

        query: what to look for
        limit: how many to return
        \"\"\"

The policy reads the return value: strings as they are, anything else as JSON. A `ToolResult` also gives
rewards the names of what was retrieved. An exception counts as the policy's mistake, and its message becomes
the result of the call. A `RolloutError` means that the tool itself failed; the rollout is then excluded.

A parameter named `state` is not part of the schema: it receives the state that the task created for this
rollout.

`MethodTools` makes tools of the public methods of an object, as TRL's `environment_factory` does. Each
rollout has an object of its own.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from groupwise.errors import ConfigError, RolloutError

STATE = "state"
JSON_TYPES: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The text that a tool returns, with the names of what it retrieved, best first."""

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
    """Descriptions of parameters, from the docstring."""
    takes_state: bool = False
    """Whether the function takes the rollout's state."""
    parameters: Mapping[str, Any] | None = None
    """JSON schema of the arguments, where it does not come from the function's signature."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool's schema in the format of chat templates and OpenAI's API."""
        properties = {
            name: json_schema(hint) | ({"description": self.notes[name]} if name in self.notes else {})
            for name, hint in self.hints.items()
        }
        parameters: Mapping[str, Any] = self.parameters or {
            "type": "object",
            "properties": properties,
            "required": list(self.required),
        }
        about = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": about}

    @property
    def asynchronous(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def typed(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Read arguments that are all text as JSON, where the schema does not ask for text."""
        return as_declared(arguments, self.schema["function"]["parameters"].get("properties", {}))

    def refusal(self, arguments: Mapping[str, Any]) -> str | None:
        """Return what is wrong with the arguments of a call, or None. The model reads this text."""
        if self.parameters is not None:
            return schema_violation(self.name, arguments, self.parameters)
        for name in self.required:
            if name not in arguments:
                return f"{self.name} needs the argument {name!r}"
        for name, value in arguments.items():
            if name not in self.hints:
                return f"{self.name} has no argument {name!r}, only {', '.join(self.hints)}"
            if not fits(value, self.hints[name]):
                return f"{self.name}: {name} must be {json.dumps(json_schema(self.hints[name]))}"
        return None


def with_schema(
    function: Callable[..., Any],
    name: str,
    description: str | None,
    parameters: Mapping[str, Any],
    *,
    takes_state: bool = False,
) -> Callable[..., Any]:
    """Name a function and make it a tool whose arguments have a JSON schema."""
    if takes_state and STATE in parameters.get("properties", {}):
        raise ConfigError(f"tool {name}: rename its argument `state`, which is the state of the rollout")
    function.__name__ = name
    function.tool = Tool(  # type: ignore[attr-defined]
        name=name,
        description=description or name,
        function=function,
        hints={},
        required=(),
        notes={},
        takes_state=takes_state,
        parameters=parameters,
    )
    return function


def as_declared(arguments: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
    """Read arguments that are all text as JSON, where their JSON schemas do not ask for text."""
    return {
        name: value if accepts_text(properties.get(name, {})) else json_or_text(value)
        for name, value in arguments.items()
    }


def accepts_text(schema: Mapping[str, Any]) -> bool:
    """Whether a JSON schema accepts any text."""
    kinds = schema.get("type", "string" if not schema.get("anyOf") else ())
    return "string" in ([kinds] if isinstance(kinds, str) else kinds) or any(
        accepts_text(one) for one in schema.get("anyOf", ())
    )


def json_or_text(value: Any) -> Any:
    try:
        return json.loads(value)
    except (TypeError, ValueError, RecursionError):
        return value


def schema_violation(name: str, arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str | None:
    """Return how arguments violate a JSON schema, or None."""
    import jsonschema

    validator = jsonschema.validators.validator_for(parameters)(parameters)
    try:
        error = jsonschema.exceptions.best_match(validator.iter_errors(dict(arguments)))
    except Exception as reason:  # such as a $ref to nowhere
        raise RolloutError(f"the JSON schema of {name} is not valid: {reason}") from reason
    return (
        None if error is None else f"{name}: {error.json_path.removeprefix('$').strip('.')} {error.message}"
    )


def tool_of(function: Callable[..., Any]) -> Tool:
    """Build a tool from a function's signature and docstring, or return its attribute `tool`."""
    if isinstance(ready := getattr(function, "tool", None), Tool):
        return ready
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise ConfigError(f"a tool must be a named function; got {function!r}")
    hints = get_type_hints(function)
    parameters = dict(inspect.signature(function).parameters)
    takes_state = parameters.pop(STATE, None) is not None
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"tool {name}: every parameter must be passable by name; got {parameter}")
        if parameter.name not in hints:
            raise ConfigError(
                f"tool {name}: annotate the type of {parameter.name}, for example {parameter.name}: str"
            )
        json_schema(hints[parameter.name])
    documentation = inspect.getdoc(function) or ""
    if not documentation:
        raise ConfigError(f"tool {name} has no docstring: add one that tells the model what the tool does")
    return Tool(
        name=name,
        description=documentation.partition("\n")[0],
        function=function,
        hints={parameter: hints[parameter] for parameter in parameters},
        required=tuple(p.name for p in parameters.values() if p.default is p.empty),
        notes=notes_in(documentation, parameters),
        takes_state=takes_state,
    )


PARAMETER_NOTE = re.compile(r"\s*(\w+)\s*(?:\([^)]*\))?:(.*)")


def notes_in(documentation: str, names: Mapping[str, object]) -> dict[str, str]:
    """Return the docstring's lines of the form `name: description` or `name (type): description`."""
    matches = map(PARAMETER_NOTE.match, documentation.splitlines()[1:])
    return {match[1]: match[2].strip() for match in matches if match is not None and match[1] in names}


RESET, GET_REWARD = "reset", "get_reward"


class MethodTools:
    """The public methods of an object as tools: what TRL calls an `environment_factory`.

    `make` returns a new object. Its `reset` gets the columns of an example by name, and returns None or a
    text that ends the prompt's last message. Its `get_reward`, if there is one, returns the reward of the
    rollout at its end. All other methods whose names do not begin with an underscore are tools.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        example = make()
        self.name = type(example).__name__
        methods = dict(inspect.getmembers(type(example), predicate=inspect.isfunction))
        if RESET not in methods:
            raise ConfigError(f"environment_factory: {self.name} has no method reset(**columns); add one")
        self.has_reward = GET_REWARD in methods
        self.tools = tuple(
            as_tool(getattr(example, name))
            for name in methods
            if name not in (RESET, GET_REWARD) and not name.startswith("_")
        )

    def start(self, example: Mapping[str, Any]) -> Any:
        """Return the object of a rollout, reset for its example."""
        made = self.make()
        made.reset(**example)
        return made

    def opening(self, example: Mapping[str, Any]) -> str:
        """Return what `reset` adds to the prompt of an example."""
        text = self.make().reset(**example)
        if text is not None and not isinstance(text, str):
            raise ConfigError(f"environment_factory: reset must return a text or None; got {text!r:.80}")
        return text or ""


def as_tool(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls this method of the rollout's object, with the schema of the method."""
    name = method.__name__
    if STATE in inspect.signature(method).parameters:
        raise ConfigError(f"tool {name}: rename its argument `state`, which is the state of the rollout")

    def call(state: Any, **arguments: Any) -> Any:
        return getattr(state, name)(**arguments)

    async def call_async(state: Any, **arguments: Any) -> Any:
        return await getattr(state, name)(**arguments)

    function: Any = call_async if inspect.iscoroutinefunction(method) else call
    function.__name__ = name
    function.tool = replace(tool_of(method), function=function, takes_state=True)
    return cast(Callable[..., Any], function)


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
        f"unsupported type of a tool's parameter: {hint!r}; use str, int, float, bool, Literal, list or dict"
    )


def fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value matches a type; integers also match float."""
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
