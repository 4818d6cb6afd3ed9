"""What a run has trained on, so that it is not measured on that."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.config import Config
from groupwise.errors import ConfigError
from groupwise.records import Example
from groupwise.tasks import TASKS, Stream, Task, load_task, with_data
from groupwise.tasks.demonstrations import plan_warm_start
from groupwise.tasks.task import what_is_asked


def unseen(rows: Sequence[Example], *, task: Task, asked: set[str]) -> list[Example]:
    """Return the rows of a task that ask nothing that was asked in training."""
    left = [row for row in rows if task.asks(row) not in asked]
    if not left:
        raise ConfigError("every one of these examples was trained on: give others")
    return left


def asked_in_training(trained: Config, *, cursor: int, task: Task, named: str) -> set[str]:
    """Return every prompt of a run, as far as one could be asked again by a task that is named so.

    `trained` are the run's settings and `cursor` says how many examples it has drawn. Of finite data all
    training rows count as drawn. Raises ConfigError where the run's task or data cannot be had any more.
    """
    name = trained.task.name
    defined_in_python = name not in TASKS and not name.endswith(".py")
    given = with_data(task, trained.task) if defined_in_python and name == task.name else None
    if trained.run.kind == "sft":
        return imitated(trained, cursor=cursor, task=given)
    if name != named and name in TASKS and named in TASKS:
        return set()  # each asks in its own way
    own = given or load_task(trained.task)
    split = own.split(trained.task, trained.run.seed)
    drawn = split.take(0, cursor)[0] if isinstance(split.train, Stream) else split.train
    return {own.asks(example) for example in drawn}


def imitated(trained: Config, *, cursor: int, task: Task | None) -> set[str]:
    """The prompts of the demonstrations that a warm start has seen."""
    demonstrations = plan_warm_start(trained, task=task, resumed=True).demonstrations
    size = demonstrations.split.size
    seen = demonstrations.between(0, cursor if size is None else size)
    return {what_is_asked(demonstration.prompt) for demonstration in seen}
