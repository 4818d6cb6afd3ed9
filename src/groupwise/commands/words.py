"""What `train` and `sft` make of the words and flags that both take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError
from groupwise.tracking.run_folder import refuse_agent, refuse_checkpoint


def with_task(given: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, Any]:
    """Add the task that stands among the words to what the flags gave."""
    if len(tasks) > 1 or (tasks and "task" in given):
        raise ConfigError(f"one run has one task; leave out all but {tasks[0]}")
    return {**given, **({"task": tasks[0]} if tasks else {})}


def settings_file(config: Path | None, resume: Path | None) -> Path | None:
    """The file to read settings from: that of the run to go on with, or the user's own."""
    if resume is None:
        return config
    if config is not None:
        raise ConfigError("--resume takes the settings of its run; leave --config out")
    refuse_agent(resume)
    refuse_checkpoint(resume)
    if not (resume / "config.yaml").is_file():
        raise ConfigError(f"{resume} is not the folder of a run: it has no config.yaml")
    return resume / "config.yaml"
