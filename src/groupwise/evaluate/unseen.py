"""What a run has trained on, so that it is not measured on that."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.config import Config
from groupwise.errors import ConfigError
from groupwise.records import Example
from groupwise.tasks import Stream, Task, load_task


def unseen(rows: Sequence[Example], *, task: Task, trained: Config, cursor: int) -> list[Example]:
    """Return the rows that ask nothing that a run asked in training.

    `trained` are the run's settings and `cursor` says how many examples it has drawn. Of finite data all
    training rows count as drawn.
    """
    if trained.task.name != task.name:
        return list(rows)
    split = load_task(trained.task).split(trained.task, trained.run.seed)
    drawn = split.take(0, cursor)[0] if isinstance(split.train, Stream) else split.train
    asked = {task.asks(example) for example in drawn}
    left = [row for row in rows if task.asks(row) not in asked]
    if not left:
        raise ConfigError("every one of these examples was trained on: give others")
    return left
