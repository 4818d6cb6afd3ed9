"""What a run trains on: rows that do not look like held-out ones, whatever else tells them apart."""

from __future__ import annotations

from dataclasses import replace

from groupwise.config.sections import Config
from groupwise.errors import ConfigError
from groupwise.tasks import Split, Stream, Task


def split_for(config: Config, task: Task) -> Split:
    """Split the task's examples and drop training rows that ask what a held-out one asks.

    Every prompt is made once here, so that a row that has none is found before the model loads. A
    stream makes its rows later and promises to keep the sides apart; each step checks that.
    """
    split = task.split(config.task, config.run.seed)
    if isinstance(split.train, Stream):
        return split
    held_out = {task.asks(example) for example in split.held_out}
    train = tuple(row for row in split.train if task.asks(row) not in held_out)
    if not train:
        raise ConfigError(f"task {task.name}: every training example asks what a held-out one asks")
    return replace(split, train=train, size=len(train), dropped=split.dropped + len(split.train) - len(train))
