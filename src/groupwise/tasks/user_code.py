"""The user's code in a run: functions that settings name, such as a loss, and fingerprints of all of it.

A setting names a function as `module:function` or `FILE.py:function`. `gw.train` also takes the function
itself. The settings then hold the name that it can be imported by, or `python:NAME` if it cannot be: a
lambda, a function in a function, or one of a notebook.

Fingerprints detect changes to the user's code, such as a task's rewards, prompt and tools, since a run began.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import linecache
import os
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

from groupwise.algo.advantages import register_advantage
from groupwise.config.coerce import is_function_name
from groupwise.config.schema import Config
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.rewards.runner import IsolatedReward
from groupwise.rollout.agent_rollouts import IsolatedAgent, source_of_command
from groupwise.rollout.environment import IsolatedEnvironment
from groupwise.rollout.tool_executor import IN_WORKER
from groupwise.tasks.registry import TASK_FILE, run_file, where
from groupwise.tasks.task import Task, closest

CALLBACKS = "run.callbacks"
ENGINE = "engine.kind"
LOGITS_PROCESSOR = "rollout.logits_processor"
KEYWORDS = {
    "loss": "algo.loss",
    "advantage": "algo.advantage",
    "engine": ENGINE,
    "logits_processor": LOGITS_PROCESSOR,
}
"""Keywords of `gw.train` that take a function, with the setting that names it."""
IN_PYTHON = "python"
"""Stands for the module of a function that cannot be imported."""


def of_task(code: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Return the fingerprints of a task's own code: those of functions that settings name are left out."""
    if code is None:
        return None
    return {part: fingerprint for part, fingerprint in code.items() if part not in KEYWORDS.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFunctions:
    """The functions of the user in one run, by the setting that names each."""

    by_setting: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    callbacks: tuple[object, ...] = ()

    @property
    def engine(self) -> Callable[..., Any] | None:
        """The function that makes the engine, if it is the user's own."""
        return self.by_setting.get(ENGINE)

    @property
    def logits_processor(self) -> Callable[..., Any] | None:
        """The user's sampling rule, if there is one."""
        return self.by_setting.get(LOGITS_PROCESSOR)

    @property
    def code(self) -> dict[str, str]:
        """Fingerprints of the functions, as a checkpoint keeps them of a task's."""
        prints = {setting: fingerprint_of(function) for setting, function in self.by_setting.items()}
        return {setting: text for setting, text in prints.items() if text}


def split_functions(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replace the functions in keywords of `gw.train` by their names.

    Return the keywords, and the functions by setting; of `run.callbacks`, the list of callbacks.
    """
    named: dict[str, Any] = {}
    functions: dict[str, Any] = {}
    for keyword, value in settings.items():
        if keyword == "callbacks":
            functions[CALLBACKS] = list(value or ())
            named[CALLBACKS] = callback_names(functions[CALLBACKS])
            continue
        setting = KEYWORDS.get(keyword, keyword)
        if isinstance(value, Mapping):
            within = {f"{keyword}.{key}": item for key, item in value.items()}
            functions |= {name: item for name, item in within.items() if is_function(name, item)}
            named[keyword] = {
                key: name_of(item) if is_function(f"{keyword}.{key}", item) else item
                for key, item in value.items()
            }
        elif is_function(setting, value):
            functions[setting] = value
            named[setting] = name_of(value)
        else:
            named[keyword] = value
    return named, functions


def is_function(setting: str, value: object) -> bool:
    return setting in KEYWORDS.values() and callable(value)


def name_of(function: object) -> str:
    """Return the name that settings give a function: where it can be imported from, or `python:NAME`."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    try:
        importable = module is not None and attrgetter(name)(module) is function
    except AttributeError:  # a lambda, or a function in a function
        importable = False
    if module is None or not importable:
        return f"{IN_PYTHON}:{name}"
    if module.__name__ != "__main__" and not module.__name__.startswith(TASK_FILE):
        return f"{module.__name__}:{name}"
    file = getattr(module, "__file__", None)
    return f"{os.path.abspath(file)}:{name}" if file else f"{IN_PYTHON}:{name}"


def use_functions(config: Config, given: Mapping[str, Any] | None = None) -> UserFunctions:
    """Load the functions that settings name, except those given, and let the algorithms know them."""
    given = given or {}
    objects = {
        (setting, name_of(given[setting])): given[setting] for setting in given if setting != CALLBACKS
    }
    named = {
        "algo.loss": config.algo.loss,
        "algo.advantage": config.algo.advantage,
        ENGINE: config.engine.kind,
        LOGITS_PROCESSOR: config.rollout.logits_processor or "",
    }
    functions = {
        setting: objects.get((setting, name)) or load_function(setting, name)
        for setting, name in named.items()
        if is_function_name(name)
    }
    if "algo.advantage" in functions:
        register_advantage(config.algo.advantage, functions["algo.advantage"])
    if "algo.loss" in functions:
        from groupwise.algo.surrogates import register_loss

        register_loss(config.algo.loss, functions["algo.loss"])
    return UserFunctions(by_setting=functions, callbacks=load_callbacks(config, given.get(CALLBACKS, ())))


def callback_names(callbacks: Sequence[object]) -> list[str]:
    return [one if isinstance(one, str) else name_of(one) for one in callbacks]


def load_callbacks(config: Config, given: Sequence[object]) -> tuple[object, ...]:
    """Return the callbacks of the settings: those given, where the settings still name them, or loaded."""
    names: Sequence[object] = config.run.callbacks
    if callback_names(given) == list(names):
        names = given
    loaded = (load_function(CALLBACKS, one) if isinstance(one, str) else one for one in names)
    return tuple(one() if isinstance(one, type) else one for one in loaded)


def load_function(setting: str, name: str) -> Callable[..., Any]:
    """Import the function, or for run.callbacks the class or object, that a setting names."""
    module_name, _, attribute = name.rpartition(":")
    if module_name == IN_PYTHON:
        keyword = next((key for key, full in KEYWORDS.items() if full == setting), "callbacks")
        raise ConfigError(
            f"{setting}: {attribute} was defined in Python and cannot be imported: resume the run from "
            f"Python with groupwise.train(task, resume=RUN, {keyword}=…)"
        )
    if module_name.endswith(".py"):
        path = Path(module_name).expanduser()
        if not path.is_file():
            raise ConfigError(f"{setting}: there is no file {module_name}")
        module: Any = run_file(path)[0]
    else:
        module = import_named(setting, module_name)
    try:
        function: Callable[..., Any] = attrgetter(attribute)(module)
    except AttributeError:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"{setting}: {module_name} has no {kind_of(setting)} {attribute!r}{hint(attribute, known)}"
        ) from None
    if not callable(function) and setting != CALLBACKS:
        raise ConfigError(f"{setting}: {name} must be a function; got {type(function).__name__}")
    return function


def kind_of(setting: str) -> str:
    return "callback" if setting == CALLBACKS else "function"


def hint(name: str, known: Sequence[str]) -> str:
    return closest(name, known) if known else ""


def import_named(setting: str, module: str) -> Any:
    """Import a module, from the working folder too, as `python -m` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{setting}: there is no module {module!r}; write FILE.py:function for a file elsewhere"
            ) from None
        raise ConfigError(f"{setting}: {module} imports {error.name!r}, which is not installed") from error
    except GroupwiseError:
        raise
    except Exception as error:
        place = where(error, Path(getattr(sys.modules.get(module), "__file__", None) or module))
        raise ConfigError(f"{setting}: {place}: {type(error).__name__}: {error}") from error


OURS = "groupwise"
PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Types of closure values whose repr is stable across processes."""


def code_of(task: Task) -> dict[str, str]:
    """Return fingerprints of the user's functions, by their role in the task, and of the weights.

    Functions of this package are excluded: they change with its version, not by the user.
    """
    parts: dict[str, Any] = {f"reward {name}": function for name, function in task.rewards.items()}
    parts |= {"prompt": task.prompt, "state": task.state, "environment": task.environment}
    parts |= {"agent": task.agent}
    parts |= {f"tool {tool.__name__}": tool for tool in task.tools}
    texts = {name: text for name, function in parts.items() if (text := source_of(function))}
    if isinstance(task.agent, str):
        texts["agent"] = source_of_command(task.agent)
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
    if isinstance(value, IsolatedReward | IsolatedAgent):
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
