"""Teach language models to reason and to use tools with GRPO: answers are reinforced relative to their group.

import groupwise as gw

task = gw.Task(name="…", examples=gw.load_examples("rows.jsonl"), prompt=…, rewards={…})
gw.train(task, model="Qwen/Qwen2.5-0.5B-Instruct", max_steps=100)
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from importlib import import_module
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
from groupwise.records import Example, Rollout
from groupwise.rewards.worker import in_process
from groupwise.rollout.environment import Environment, Reply
from groupwise.rollout.tools import ToolResult
from groupwise.tasks import (
    Task,
    leave_task_file,
    load_examples,
    load_task,
    split_functions,
    use_functions,
    with_data,
)
from groupwise.tracking.run_folder import RunFolder

if TYPE_CHECKING:
    from groupwise.algo.losses import LossSettings, Tokens
    from groupwise.gym.agent import Agent
    from groupwise.gym.env import PromptEnv
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
    "StopTraining",
    "Task",
    "Tokens",
    "ToolResult",
    "evolve",
    "in_process",
    "load_examples",
    "rewards",
    "train",
]


LATER = {
    "Agent": "groupwise.gym.agent",
    "Callback": "groupwise.training.callbacks",
    "RunControl": "groupwise.training.callbacks",
    "PromptEnv": "groupwise.gym.env",
    "LossSettings": "groupwise.algo.losses",
    "Tokens": "groupwise.algo.losses",
}
"""Names whose modules import torch: loaded when they are first used."""


def __getattr__(name: str) -> Any:
    if name == "Found":
        warnings.warn("groupwise.Found is now groupwise.ToolResult", DeprecationWarning, stacklevel=2)
        return ToolResult
    if name in LATER:
        return getattr(import_module(LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def train(task: Task | str, *, resume: str | Path | None = None, **settings: Any) -> Path:
    """Train on a task, or on a built-in one or a Python file by name, and return the run's folder.

    Settings are the command line's flags by name (`model=`, `max_steps=`, `learning_rate=`, …), whole
    sections (`optim={"epochs": 2}`) or full names (`**{"task.held_out": 8}`). `loss` and `advantage` also
    take functions of your own, and `callbacks` a list of `Callback` (docs/extending.md). `resume` goes on
    with the run in that folder, which keeps its settings.
    """
    leave_task_file(task if isinstance(task, Task) else None, settings)
    run = None if resume is None else RunFolder.open(resume)
    named, functions = split_functions(settings)
    config, loaded = with_task(config_from_keywords(run.config if run else None, **named), task)
    own = use_functions(config, functions)
    from groupwise.training import train as run_training

    return run_training(config, resume=run.path if run else None, task=loaded, functions=own)


def evolve(task: Task | str, *, resume: str | Path | None = None, **settings: Any) -> Path:
    """Train a population on one base, select among its members, and return the folder; `elite/` is the best.

    Settings are those of `train`, and the section `evolve`: `evolve={"population": 8, "method": "pbt"}`.
    """
    leave_task_file(task if isinstance(task, Task) else None)
    run = None if resume is None else RunFolder.open(resume)
    named, functions = split_functions(settings)
    config, loaded = with_task(config_from_keywords(run.config if run else None, **named), task)
    config = replace(config, run=replace(config.run, kind="evolve"))
    own = use_functions(config, functions)
    from groupwise.evolution.evolve_run import evolve as run_search

    return run_search(config, resume=run.path if run else None, task=loaded, functions=own)


def with_task(config: Config, task: Task | str) -> tuple[Config, Task]:
    """Return the settings with the task's name, and the task, loaded where only that is given."""
    name = task.name if isinstance(task, Task) else task
    config = replace(config, task=replace(config.task, name=name))
    return config, with_data(task, config.task) if isinstance(task, Task) else load_task(config.task)
