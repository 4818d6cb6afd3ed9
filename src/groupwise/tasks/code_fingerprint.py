"""Fingerprint the user's code, such as a task's rewards, prompt and tools, to detect changes to it."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import linecache
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from groupwise.rewards.runner import IsolatedReward
from groupwise.rollout.environment import IsolatedEnvironment
from groupwise.rollout.tool_executor import IN_WORKER
from groupwise.tasks.task import Task

OURS = "groupwise"
PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Types of closure values whose repr is stable across processes."""


def code_of(task: Task) -> dict[str, str]:
    """Return fingerprints of the user's functions, by their role in the task, and of the weights.

    Functions of this package are excluded: they change with its version, not by the user.
    """
    parts: dict[str, Any] = {f"reward {name}": function for name, function in task.rewards.items()}
    parts |= {"prompt": task.prompt, "state": task.state, "environment": task.environment}
    parts |= {f"tool {tool.__name__}": tool for tool in task.tools}
    texts = {name: text for name, function in parts.items() if (text := source_of(function))}
    if texts:
        texts["weights"] = repr(sorted(task.weights.items()))
        threshold = "" if task.correct_at == 1 else f" at least {task.correct_at:g}"
        texts["accuracy"] = f"{task.accuracy_reward}{threshold}"
    return {name: digest(text) for name, text in texts.items()}


def fingerprint_of(function: Any) -> str:
    """Return the fingerprint of a user's function and the code it calls; "" for one of this package."""
    text = source_of(function)
    return digest(text) if text else ""


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def changed_code(saved: Mapping[str, str] | None, code: Mapping[str, str]) -> list[str]:
    """Return the parts that differ from the saved fingerprints; none if nothing was saved."""
    if saved is None:
        return []
    return [name for name in dict.fromkeys((*saved, *code)) if saved.get(name) != code.get(name)]


def source_of(function: Any) -> str:
    """Return the source of a function and of the user code it calls; "" for a function of this package."""
    sources: dict[int, str] = {}
    collect(function, sources)
    return "\n".join(sources.values())


def collect(value: Any, sources: dict[int, str]) -> None:
    """Add the source of a function or a class, then of the code it uses."""
    value = plain_function(value)
    if id(value) in sources or not isinstance(value, FunctionType | type) or is_foreign(value):
        return
    constants = [text for function in functions_in(value) for text in constants_of(function)]
    sources[id(value)] = "\n".join([text_of(value), *constants])
    for used in uses(value):
        collect(used, sources)


def plain_function(value: Any) -> Any:
    """Unwrap a partial or a method; return the class of a callable object."""
    if isinstance(value, functools.partial):
        return plain_function(value.func)
    if isinstance(value, IsolatedReward):
        return plain_function(value.function)
    if isinstance(value, IsolatedEnvironment):
        return plain_function(value.make)
    if hasattr(value, IN_WORKER):
        return plain_function(value.__wrapped__)
    if isinstance(value, MethodType):
        return plain_function(value.__func__)
    if callable(value) and not isinstance(value, FunctionType | type):
        return type(value)
    return value


def is_foreign(value: FunctionType | type) -> bool:
    """Whether code belongs to this package, the standard library or an installed package."""
    if (value.__module__ or "").partition(".")[0] == OURS:
        return True
    try:
        path = inspect.getfile(value)
    except (TypeError, OSError):
        return isinstance(value, type)
    return "site-packages" in path or path.startswith(sysconfig.get_path("stdlib"))


def uses(value: FunctionType | type) -> Iterator[Any]:
    """Yield the functions and classes that a function refers to, in its module or its closure."""
    for function in functions_in(value):
        around = [cell.cell_contents for cell in function.__closure__ or () if not is_empty(cell)]
        named = (function.__globals__.get(name) for name in names_in(function.__code__))
        for used in (*around, *named):
            if isinstance(used, FunctionType | MethodType | functools.partial | type):
                yield used


def functions_in(value: FunctionType | type) -> Iterator[FunctionType]:
    if isinstance(value, FunctionType):
        yield value
    else:
        yield from (method for method in vars(value).values() if isinstance(method, FunctionType))


def is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (raises if the cell is empty)
    except ValueError:
        return True
    return False


def names_in(code: CodeType) -> list[str]:
    """Return every name that code reads, including nested functions, in a fixed order."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return sorted({*code.co_names, *(name for one in inner for name in names_in(one))})


def constants_of(function: FunctionType) -> Iterator[str]:
    """Yield the module-level assignments that a function reads, and the plain values of its closure."""
    assigned = assignments(function.__code__.co_filename)
    yield from (assigned[name] for name in names_in(function.__code__) if name in assigned)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if not is_empty(cell) and isinstance(cell.cell_contents, PLAIN):
            yield f"{name} = {cell.cell_contents!r}"


def assignments(path: str) -> dict[str, str]:
    """Return the source of each module-level assignment, by the name that it sets."""
    linecache.checkcache(path)
    try:
        statements = ast.parse("".join(linecache.getlines(path))).body
    except SyntaxError:  # not a Python file: a notebook cell, for example
        return {}
    result: dict[str, str] = {}
    for statement in statements:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for name in (target.id for target in targets if isinstance(target, ast.Name)):
                result[name] = ast.unparse(statement)
    return result


def text_of(value: FunctionType | type) -> str:
    """Return the source without comments and formatting; unchanged if it does not parse, as for a lambda."""
    try:
        text = textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):  # defined in an interactive interpreter
        return repr(value.__code__.co_code) if isinstance(value, FunctionType) else value.__qualname__
    try:
        return ast.unparse(ast.parse(text))
    except SyntaxError:
        return text.strip()
