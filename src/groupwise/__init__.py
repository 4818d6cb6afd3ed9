"""Teach language models to reason and to use tools with GRPO: answers are reinforced relative to their group.

import groupwise as gw

task = gw.Task(name="…", examples=gw.load_examples("rows.jsonl"), prompt=…, rewards={…})
result = gw.train(task, model="Qwen/Qwen2.5-0.5B-Instruct", max_steps=100)
result.generate("…")
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise import rewards
    from groupwise.algo.losses import LossSettings, Tokens
    from groupwise.config import Config
    from groupwise.errors import (
        CallbackError,
        ConfigError,
        GroupwiseError,
        InvariantError,
        RolloutError,
        StopTraining,
    )
    from groupwise.gym.agent import Agent
    from groupwise.gym.env import PromptEnv
    from groupwise.isolation.worker import in_process
    from groupwise.records import Example, Rollout
    from groupwise.rollout.environment import Environment, Reply
    from groupwise.rollout.tools import ToolResult
    from groupwise.run_result import RunResult
    from groupwise.tasks import Task, UserFunctions, load_examples
    from groupwise.tasks.external.mcp_tools import mcp_tools
    from groupwise.tasks.external.reasoning_gym_tasks import reasoning_gym_task
    from groupwise.tasks.external.text_environments import gymnasium, openenv, textarena
    from groupwise.tasks.external.verifiers_tasks import verifiers_task
    from groupwise.training.callbacks import Callback, RunControl

__all__ = [
    "Agent",
    "Callback",
    "CallbackError",
    "Config",
    "ConfigError",
    "Environment",
    "Example",
    "GroupwiseError",
    "InvariantError",
    "LossSettings",
    "PromptEnv",
    "Reply",
    "Rollout",
    "RolloutError",
    "RunControl",
    "RunResult",
    "StopTraining",
    "Task",
    "Tokens",
    "ToolResult",
    "evolve",
    "gymnasium",
    "in_process",
    "load_examples",
    "mcp_tools",
    "openenv",
    "reasoning_gym_task",
    "rewards",
    "textarena",
    "train",
    "verifiers_task",
]


MODULES = {
    "groupwise.algo.losses": ("LossSettings", "Tokens"),
    "groupwise.config": ("Config",),
    "groupwise.errors": (
        *("CallbackError", "ConfigError", "GroupwiseError", "InvariantError", "RolloutError", "StopTraining"),
    ),
    "groupwise.gym.agent": ("Agent",),
    "groupwise.gym.env": ("PromptEnv",),
    "groupwise.isolation.worker": ("in_process",),
    "groupwise.records": ("Example", "Rollout"),
    "groupwise.rollout.environment": ("Environment", "Reply"),
    "groupwise.rollout.tools": ("ToolResult",),
    "groupwise.run_result": ("RunResult",),
    "groupwise.tasks": ("Task", "load_examples"),
    "groupwise.tasks.external.mcp_tools": ("mcp_tools",),
    "groupwise.tasks.external.reasoning_gym_tasks": ("reasoning_gym_task",),
    "groupwise.tasks.external.text_environments": ("gymnasium", "openenv", "textarena"),
    "groupwise.tasks.external.verifiers_tasks": ("verifiers_task",),
    "groupwise.training.callbacks": ("Callback", "RunControl"),
}
"""Where the public names are defined. They are imported at their first use: `groupwise --help` needs none."""

HOME = {name: module for module, names in MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "Found":
        warnings.warn("groupwise.Found is now groupwise.ToolResult", DeprecationWarning, stacklevel=2)
        name = "ToolResult"
    if name == "__version__":
        return import_module("groupwise.files").package_version()
    if name == "rewards":
        return import_module("groupwise.rewards")
    if name in HOME:
        return getattr(import_module(HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def train(
    task: Task | str | None = None, *, resume: str | os.PathLike[str] | None = None, **settings: Any
) -> RunResult:
    """Train on a task, a built-in one or a Python file by name, and return the result.

    Settings are the command line's flags by name (`model=`, `max_steps=`, `learning_rate=`, …), whole
    sections (`optim={"epochs": 2}`) or full names (`**{"task.held_out": 8}`). `loss` and `advantage` also
    take functions of your own, and `callbacks` a list of `Callback` (docs/extending.md). `resume` continues
    the run in that folder, which keeps its settings, or after one of its checkpoints in a new folder;
    its task must be given again only if it was defined in Python.
    """
    from groupwise.tasks import Task, leave_task_file

    leave_task_file(task if isinstance(task, Task) else None, settings)
    config, loaded, functions, run = prepare(task, resume, settings)
    from groupwise.training import train as run_training

    return result_of(run_training(config, resume=run, task=loaded, functions=functions), functions)


def evolve(
    task: Task | str | None = None, *, resume: str | os.PathLike[str] | None = None, **settings: Any
) -> RunResult:
    """Train a population on one base, select among its members, and return the result; the best is `elite/`.

    Settings are those of `train`, and the section `evolve`: `evolve={"population": 8, "method": "pbt"}`.
    """
    from groupwise.tasks import Task, leave_task_file

    leave_task_file(task if isinstance(task, Task) else None)
    config, loaded, functions, run = prepare(task, resume, settings)
    config = replace(config, run=replace(config.run, kind="evolve"))
    from groupwise.evolution.evolve_run import evolve as run_search

    return result_of(run_search(config, resume=run, task=loaded, functions=functions), functions)


def prepare(
    task: Task | str | None, resume: str | os.PathLike[str] | None, settings: dict[str, Any]
) -> tuple[Config, Task, UserFunctions, Path | None]:
    """Return the settings of a run, its task, the user's functions in it, and the folder to resume."""
    from groupwise.config import config_from_keywords
    from groupwise.errors import ConfigError
    from groupwise.tasks import is_loadable, split_functions, use_functions
    from groupwise.tracking.run_folder import RunFolder, run_of_checkpoint

    run = None if resume is None else run_of_checkpoint(Path(resume)) or RunFolder.open(Path(resume))
    named, functions = split_functions(settings)
    config = config_from_keywords(run.config if run else None, **named)
    if task is None and run is not None:
        task = config.task.name
        if not is_loadable(task):
            raise ConfigError(
                f"the task {task!r} of {run.path} was defined in Python: give it to train again"
            )
    config, loaded = with_task(config, config.task.name if task is None else task)
    folder = None if resume is None else Path(resume)
    return config, loaded, use_functions(config, functions), folder


def result_of(folder: Path, functions: UserFunctions) -> RunResult:
    from groupwise.run_result import RunResult

    return RunResult(folder, logits_processor=functions.logits_processor)


def with_task(config: Config, task: Task | str) -> tuple[Config, Task]:
    """Return the settings with the task's name, and the task, loaded where only that is given."""
    from groupwise.errors import ConfigError
    from groupwise.tasks import Task, load_task, with_data

    if not isinstance(task, Task | str):
        raise ConfigError(f"a task is a gw.Task, a name or a file; got {type(task).__name__}")
    name = task.name if isinstance(task, Task) else task
    config = replace(config, task=replace(config.task, name=name))
    if isinstance(task, Task):
        return config, with_data(task, config.task)
    return config, load_task(config.resolve().task)  # the built-in model has puzzles of its own
