"""Teach language models to reason and to use tools with GRPO: each answer is reinforced relative to its group.

    import groupwise as gw

    task = gw.Task(name="…", examples=gw.load_examples("rows.jsonl"), prompt=…, rewards={…})
    gw.train(task, model="Qwen/Qwen2.5-0.5B-Instruct", max_steps=100)
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from groupwise import rewards
from groupwise.config import Config
from groupwise.errors import ConfigError, GroupwiseError, InvariantError, RolloutError
from groupwise.records import Example, Rollout
from groupwise.tasks import Task, leave_task_file, load_examples

__all__ = [
    "Config",
    "ConfigError",
    "Example",
    "GroupwiseError",
    "InvariantError",
    "Rollout",
    "RolloutError",
    "Task",
    "load_examples",
    "rewards",
    "train",
]


def train(task: Task, *, resume: str | Path | None = None, **settings: Any) -> Path:
    """Train on a task and return the run's folder.

    Settings are the command line's flags by name (`model=`, `max_steps=`, `learning_rate=`, …) or whole
    sections (`optim={"epochs": 2}`).
    """
    leave_task_file(task)
    from groupwise.config import config_from_keywords, read_config
    from groupwise.training import train as run_training

    if resume is not None and not settings:
        config = read_config(Path(resume) / "config.yaml")
    else:
        config = config_from_keywords(**settings)
    config = replace(config, task=replace(config.task, name=task.name))
    return run_training(config, resume=Path(resume) if resume else None, task=task)
