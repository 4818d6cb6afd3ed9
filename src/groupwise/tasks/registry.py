"""Load the task that a configuration names: built-in, from reasoning-gym, or from a user's Python file."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from groupwise.config.schema import TaskConfig
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.records import Example
from groupwise.rewards.llm_judge import reward_model
from groupwise.tasks.builtin.boxed_math import math
from groupwise.tasks.builtin.code_problems import code
from groupwise.tasks.builtin.countdown import countdown
from groupwise.tasks.builtin.gsm8k import gsm8k
from groupwise.tasks.builtin.medquad import medquad
from groupwise.tasks.builtin.search_qa import search_qa
from groupwise.tasks.builtin.tldr import tldr
from groupwise.tasks.examples import load_examples, renamed
from groupwise.tasks.external.reasoning_gym_tasks import PREFIX, reasoning_gym_task
from groupwise.tasks.task import Task, closest

TASKS: dict[str, Callable[..., Task]] = {
    "code": code,
    "countdown": countdown,
    "gsm8k": gsm8k,
    "math": math,
    "medquad": medquad,
    "search_qa": search_qa,
    "tldr": tldr,
}
"""The built-in tasks. The keyword arguments of each function are the task's options."""

NEEDS_FIRST: dict[str, str] = {"medquad": "groupwise index build"}
"""Tasks that require a preparation step, with the command to run."""

TASK_FILE = "groupwise_task_"
"""How the module names of users' files begin."""

loading_task_file: ContextVar[bool] = ContextVar("loading_task_file", default=False)


class TaskFileLoaded(BaseException):
    """Carries the task out of a file that calls `gw.train`. A BaseException: the file must not catch it."""

    def __init__(self, task: Task | None, settings: Mapping[str, Any]) -> None:
        super().__init__(task)
        self.task = task
        self.settings = settings


@dataclass(frozen=True, slots=True)
class TaskFile:
    """The contents of a user's task file."""

    task: Task
    settings: Mapping[str, Any]
    """Keyword arguments of the file's `gw.train(task, …)` call, if it has one."""


def leave_task_file(task: Task | None, settings: Mapping[str, Any] | None = None) -> None:
    """Stop executing the task file that is being loaded, if any; `train` calls this first.

    A task file may call `gw.train(task, …)` without a main guard. While `load_task` reads the file, that
    call returns the task and its settings instead of starting a second run inside the first. `task` is None
    if the file trains a task by name.
    """
    if loading_task_file.get():
        raise TaskFileLoaded(task, settings or {})


def load_task(config: TaskConfig) -> Task:
    """Return the task that the configuration names, with its options and data."""
    if config.name in TASKS:
        task = made_with_options(TASKS[config.name], config.options)
    elif config.name.startswith(PREFIX):
        task = made_with_options(partial(reasoning_gym_task, config.name), config.options)
    elif config.name.endswith(".py"):
        return task_of(read_task_file(Path(config.name).expanduser()), config)
    else:
        hint = closest(config.name, TASKS)
        raise ConfigError(f"unknown task {config.name!r}{hint} (or use gym:NAME or the path of a .py file)")
    return with_data(task, config)


def is_loadable(name: str) -> bool:
    """Whether a task can be loaded by name. A task that was defined in Python cannot."""
    return name in TASKS or name.endswith(".py") or name.startswith(PREFIX)


def task_of(file: TaskFile, config: TaskConfig) -> Task:
    """Return the task of a file, with the data of the configuration."""
    if config.options:
        raise ConfigError(f"task.options requires a built-in task; {config.name} is a task file")
    return with_data(file.task, config)


def with_data(task: Task, config: TaskConfig) -> Task:
    """Return the task with the data, the test sets, the weights and the threshold of the configuration."""
    if config.data is None and config.test_data is None and not config.test_sets and config.columns:
        raise ConfigError("task.columns requires task.data, task.test_data or task.test_sets")
    if config.data is not None:
        task = replace(task, examples=load_rows(config.data, task=task, config=config), held_out=None)
    if config.test_data is not None:
        rows = load_rows(config.test_data, task=task, config=config, split="test")
        task = replace(task, held_out=rows)
    if config.test_sets:
        sets = {
            name: load_rows(source, task=task, config=config, split="test")
            for name, source in config.test_sets.items()
        }
        task = replace(task, test_sets={**task.test_sets, **sets})
    return with_scoring(task, config)


def with_scoring(task: Task, config: TaskConfig) -> Task:
    """Return the task with the reward model, the reward weights and the threshold of the configuration."""
    if config.reward_model is not None:
        added = reward_model(config.reward_model)
        task = replace(task, accuracy=task.accuracy_reward, rewards={**task.rewards, "reward_model": added})
    for name in config.weights:
        if name not in task.rewards:
            hint = closest(name, task.rewards)
            raise ConfigError(f"task.weights: {task.name} has no reward {name!r}{hint}")
    if config.weights:
        task = replace(task, weights={**task.weights, **config.weights})
    return task if config.correct_at is None else replace(task, correct_at=config.correct_at)


def without_data(config: TaskConfig) -> TaskConfig:
    """Return the configuration without data, so that the task uses its own examples."""
    return replace(config, data=None, test_data=None, test_sets={}, columns={})


def load_rows(source: str, *, task: Task, config: TaskConfig, split: str = "train") -> list[Example]:
    """Read examples for a task, with columns checked and renamed by the configuration."""
    columns = renamed(task.columns, config.columns, task=task.name)
    return load_examples(source, split=split, columns=columns)


def made_with_options(make: Callable[..., Task], options: Mapping[str, Any]) -> Task:
    """Call a function that returns a task; its keyword arguments are the task's options."""
    known = inspect.signature(make).parameters
    for option in options:
        if option not in known:
            raise ConfigError(f"unknown setting task.options.{option}{closest(option, known)}")
    return make(**options)


def read_task_file(path: Path) -> TaskFile:
    """Run a Python file and return its variable `task`, or else the first task that it trains."""
    if not path.is_file():
        raise ConfigError(f"no such task file: {path}")
    module, trained, settings = run_file(path)
    task = named_task(module, path) or trained
    if task is None:
        raise ConfigError(f"{path} does not define `task`; add: task = groupwise.Task(…)")
    return TaskFile(task, settings if task is trained else {})


def run_file(path: Path) -> tuple[ModuleType, Task | None, Mapping[str, Any]]:
    """Run a Python file up to its `gw.train`, if any; return the module, and the task and settings there."""
    name = f"{TASK_FILE}{path.stem}"
    spec = importlib.util.spec_from_file_location(
        name, path, loader=CurrentSource(name, os.path.abspath(path))
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # As for a script: the file can import its neighbours, now and when a reward runs.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    trained: Task | None = None
    settings: Mapping[str, Any] = {}
    token = loading_task_file.set(True)
    try:
        spec.loader.exec_module(module)
    except TaskFileLoaded as handed_over:
        trained, settings = handed_over.task, handed_over.settings
    except GroupwiseError:
        raise
    except Exception as error:
        message = error.msg if isinstance(error, SyntaxError) else error
        raise ConfigError(f"{where(error, path)}: {type(error).__name__}: {message}") from error
    finally:
        loading_task_file.reset(token)
    return module, trained, settings


class CurrentSource(SourceFileLoader):
    """Compiles a file each time. Cached bytecode is taken for current after an edit in the same second."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def named_task(module: ModuleType, path: Path) -> Task | None:
    task = getattr(module, "task", None)
    if task is None or isinstance(task, Task):
        return task
    raise ConfigError(f"{path}: `task` must be a groupwise.Task; got {type(task).__name__}")


def where(error: Exception, path: Path) -> str:
    """Return the file and line of the user's code that raised an error."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == os.path.abspath(path)]
    return f"{path}, line {lines[-1]}" if lines else str(path)
