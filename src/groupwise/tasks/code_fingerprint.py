"""Telling whether a task's own code has changed: its rewards, and whatever else decides what is measured."""

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
from groupwise.rollout.tool_executor import IN_WORKER
from groupwise.tasks.task import Task

OURS = "groupwise"
PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Values around a function that are written the same way everywhere."""


def code_of(task: Task) -> dict[str, str]:
    """Return a fingerprint of each function of the user's, by its part in the task, and of the weights.

    Functions of this package are left out: they change with its version, which is not the user's doing.
    """
    parts: dict[str, Any] = {f"reward {name}": function for name, function in task.rewards.items()}
    parts |= {"prompt": task.prompt, "state": task.state}
    parts |= {f"tool {tool.__name__}": tool for tool in task.tools}
    texts = {name: text for name, function in parts.items() if (text := source_of(function))}
    if texts:
        texts["weights"] = repr(sorted(task.weights.items()))
        texts["accuracy"] = task.accuracy or next(iter(task.rewards))
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def changed_code(kept: Mapping[str, str] | None, code: Mapping[str, str]) -> list[str]:
    """Return the parts of a task that are not as they were; none where that was not kept."""
    if kept is None:
        return []
    return [name for name in dict.fromkeys((*kept, *code)) if kept.get(name) != code.get(name)]


def source_of(function: Any) -> str:
    """Return the source of a function and of all that it uses of its own package; "" of one of ours."""
    found: dict[int, str] = {}
    collect(function, found)
    return "\n".join(found.values())


def collect(value: Any, found: dict[int, str]) -> None:
    """Add the source of a function or a class, then of what it calls."""
    value = plain_function(value)
    if id(value) in found or not isinstance(value, FunctionType | type) or is_foreign(value):
        return
    constants = [text for function in functions_in(value) for text in constants_of(function)]
    found[id(value)] = "\n".join([text_of(value), *constants])
    for used in uses(value):
        collect(used, found)


def plain_function(value: Any) -> Any:
    """Return what is behind a partial, a method, a decorator's wrapper or an object that is called."""
    if isinstance(value, functools.partial):
        return plain_function(value.func)
    if isinstance(value, IsolatedReward):
        return plain_function(value.function)
    if hasattr(value, IN_WORKER):
        return plain_function(value.__wrapped__)
    if isinstance(value, MethodType):
        return plain_function(value.__func__)
    if callable(value) and not isinstance(value, FunctionType | type):
        return type(value)
    return value


def is_foreign(value: FunctionType | type) -> bool:
    """Whether it is of this package, of Python's or of an installed one: no code that the user edits."""
    if (value.__module__ or "").partition(".")[0] == OURS:
        return True
    try:
        path = inspect.getfile(value)
    except (TypeError, OSError):
        return isinstance(value, type)
    return "site-packages" in path or path.startswith(sysconfig.get_path("stdlib"))


def uses(value: FunctionType | type) -> Iterator[Any]:
    """Yield the functions and classes that a function names, in its module or around it."""
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
        cell.cell_contents  # noqa: B018  (reading it is the question)
    except ValueError:
        return True
    return False


def names_in(code: CodeType) -> list[str]:
    """Every name that code reads, that of functions within it included, in a fixed order."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return sorted({*code.co_names, *(name for one in inner for name in names_in(one))})


def constants_of(function: FunctionType) -> Iterator[str]:
    """Yield the assignments that a function reads in its module, and the plain values around it."""
    assigned = assignments(function.__code__.co_filename)
    yield from (assigned[name] for name in names_in(function.__code__) if name in assigned)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if not is_empty(cell) and isinstance(cell.cell_contents, PLAIN):
            yield f"{name} = {cell.cell_contents!r}"


def assignments(path: str) -> dict[str, str]:
    """Every assignment at the top of a module by the name that it sets, as it is written."""
    linecache.checkcache(path)
    try:
        statements = ast.parse("".join(linecache.getlines(path))).body
    except SyntaxError:  # not a file of Python: what was typed into a notebook, say
        return {}
    found: dict[str, str] = {}
    for statement in statements:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for name in (target.id for target in targets if isinstance(target, ast.Name)):
                found[name] = ast.unparse(statement)
    return found


def text_of(value: FunctionType | type) -> str:
    """The source without comments and layout; as it stands where it is part of a line, as a lambda is."""
    try:
        text = textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):  # typed into an interpreter
        return repr(value.__code__.co_code) if isinstance(value, FunctionType) else value.__qualname__
    try:
        return ast.unparse(ast.parse(text))
    except SyntaxError:
        return text.strip()
