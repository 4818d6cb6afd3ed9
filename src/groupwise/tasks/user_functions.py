"""The user's own functions in a run, such as a loss or an advantage.

A setting names one as `module:function` or `FILE.py:function`. `gw.train` also takes the function itself. The
settings then hold the name that it can be imported by, or `python:NAME` if it cannot be: a lambda, a function
in a function, or one of a notebook.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from groupwise.algo.advantages import register_advantage
from groupwise.config.coerce import is_function_name
from groupwise.config.schema import Config
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.tasks.code_fingerprint import fingerprint_of
from groupwise.tasks.registry import TASK_FILE, run_file, where
from groupwise.tasks.task import closest

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
        from groupwise.algo.losses import register_loss

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
            f"{setting}: {attribute} was defined in Python and cannot be imported: resume it from Python "
            f"with groupwise.train(task, resume=RUN, {keyword}=…)"
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
