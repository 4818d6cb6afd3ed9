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
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise import rewards
from groupwise.config import Config, config_from_keywords
from groupwise.errors import (
    CallbackError,
    ConfigError,
    GroupwiseError,
    InvariantError,
    RolloutError,
    StopTraining,
)
from groupwise.isolation.worker import in_process
from groupwise.records import Example, Rollout
from groupwise.rollout.environment import Environment, Reply
from groupwise.rollout.tools import ToolResult
from groupwise.tasks import (
    Task,
    UserFunctions,
    is_loadable,
    leave_task_file,
    load_examples,
    load_task,
    split_functions,
    use_functions,
    with_data,
)
from groupwise.tasks.external.mcp_tools import mcp_tools
from groupwise.tasks.external.text_environments import gymnasium, openenv, textarena
from groupwise.tasks.external.verifiers_tasks import verifiers_task
from groupwise.tracking.run_folder import RunFolder, run_of_checkpoint

if TYPE_CHECKING:
    from groupwise.algo.losses import LossSettings, Tokens
    from groupwise.gym.agent import Agent
    from groupwise.gym.env import PromptEnv
    from groupwise.run_result import RunResult
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
    "rewards",
    "textarena",
    "train",
    "verifiers_task",
]


LATER = {
    "Agent": "groupwise.gym.agent",
    "Callback": "groupwise.training.callbacks",
    "RunControl": "groupwise.training.callbacks",
    "RunResult": "groupwise.run_result",
    "PromptEnv": "groupwise.gym.env",
    "LossSettings": "groupwise.algo.losses",
    "Tokens": "groupwise.algo.losses",
}
"""Names whose modules import torch: loaded when they are first used."""


def __getattr__(name: str) -> Any:
    if name == "Found":
        warnings.warn("groupwise.Found is now groupwise.ToolResult", DeprecationWarning, stacklevel=2)
        return ToolResult
    if name == "__version__":
        return version("groupwise")
    if name in LATER:
        return getattr(import_module(LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    leave_task_file(task if isinstance(task, Task) else None, settings)
    config, loaded, functions, run = prepare(task, resume, settings)
    from groupwise.training import train as run_training

    return result_of(run_training(config, resume=run, task=loaded, functions=functions))


def evolve(
    task: Task | str | None = None, *, resume: str | os.PathLike[str] | None = None, **settings: Any
) -> RunResult:
    """Train a population on one base, select among its members, and return the result; the best is `elite/`.

    Settings are those of `train`, and the section `evolve`: `evolve={"population": 8, "method": "pbt"}`.
    """
    leave_task_file(task if isinstance(task, Task) else None)
    config, loaded, functions, run = prepare(task, resume, settings)
    config = replace(config, run=replace(config.run, kind="evolve"))
    from groupwise.evolution.evolve_run import evolve as run_search

    return result_of(run_search(config, resume=run, task=loaded, functions=functions))


def prepare(
    task: Task | str | None, resume: str | os.PathLike[str] | None, settings: dict[str, Any]
) -> tuple[Config, Task, UserFunctions, Path | None]:
    """Return the settings of a run, its task, the user's functions in it, and the folder to resume."""
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


def result_of(folder: Path) -> RunResult:
    from groupwise.run_result import RunResult

    return RunResult(folder)


def with_task(config: Config, task: Task | str) -> tuple[Config, Task]:
    """Return the settings with the task's name, and the task, loaded where only that is given."""
    if not isinstance(task, Task | str):
        raise ConfigError(f"a task is a gw.Task, a name or a file; got {type(task).__name__}")
    name = task.name if isinstance(task, Task) else task
    config = replace(config, task=replace(config.task, name=name))
    return config, with_data(task, config.task) if isinstance(task, Task) else load_task(config.task)
