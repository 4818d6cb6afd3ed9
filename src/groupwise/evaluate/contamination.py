"""Exclude examples that a run has trained on from its evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.config import Config
from groupwise.errors import ConfigError
from groupwise.records import Example
from groupwise.tasks import TASKS, ExampleStream, Task, load_task, with_data, without_data
from groupwise.tasks.sft_data import plan_warm_start
from groupwise.tasks.task import prompt_key


def unseen(rows: Sequence[Example], *, task: Task, asked: set[str]) -> list[Example]:
    """Return the rows of a task whose key and prompt do not occur in training."""
    left = [row for row in rows if asked.isdisjoint((task.key_of(row), prompt_key(task.ask(row))))]
    if not left:
        raise ConfigError("the run was trained on every one of these examples: use others")
    return left


def asked_in_training(trained: Config, *, cursor: int, task: Task, named: str) -> set[str]:
    """Return the keys of the examples that a run trained on, if the task `named` could ask them again.

    `trained` are the run's settings, and `cursor` is the number of examples it has drawn. For finite data all
    training rows count as drawn; for demonstrations, their prompts. Raises ConfigError if the run's task or
    data cannot be loaded any more.
    """
    name = trained.task.name
    defined_in_python = name not in TASKS and not name.endswith(".py")
    given = with_data(task, trained.task) if defined_in_python and name == task.name else None
    if trained.run.kind == "sft":
        return imitated(trained, cursor=cursor, task=given)
    if name != named and name in TASKS and named in TASKS and not shares_key(trained, task):
        return set()  # the tasks have no prompts in common
    own = given or load_task(trained.task)
    split = own.split(trained.task, trained.run.seed)
    drawn = split.take(0, cursor)[0] if isinstance(split.train, ExampleStream) else split.train
    return {own.key_of(example) for example in drawn}


def shares_key(trained: Config, task: Task) -> bool:
    """Whether a built-in task uses the same key function as the run's task, as `gsm8k` and `math` do."""
    return task.key is not None and load_task(without_data(trained.task)).key is task.key


def imitated(trained: Config, *, cursor: int, task: Task | None) -> set[str]:
    """Return the prompts of the demonstrations that a warm start has seen."""
    plan = plan_warm_start(trained, task=task, resumed=True)
    split = plan.demonstrations.split
    end = cursor if split.size is None else split.size
    prompts = {prompt_key(shown.prompt) for shown in plan.demonstrations.between(0, end)}
    if plan.task is None or trained.sft.data is not None or trained.sft.from_run is not None:
        return prompts
    return prompts | {plan.task.key_of(split.at(position)) for position in range(end)}
