"""Arguments and options that several commands share, and what they check before torch loads."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from groupwise.config import Config
from groupwise.errors import ConfigError
from groupwise.tracking.number_format import printable
from groupwise.tracking.run_folder import refuse_agent, run_of_checkpoint

Target = Annotated[
    str, typer.Argument(metavar="RUN|MODEL", help="Run, checkpoint, adapter or model (folder or name).")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings to override.")
]

TaskOrOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TASK|SECTION.KEY=VALUE", help="Built-in task or Python file; settings to override."
    ),
]

model_option = partial(typer.Option, show_default=False, rich_help_panel="Model and task")
TaskName = Annotated[str | None, model_option(help="Built-in task; see `groupwise tasks`.")]
Data = Annotated[
    str | None,
    model_option(help="Examples: a file (JSON, JSONL, CSV, Parquet), a Hugging Face dataset or a saved one."),
]

train_option = partial(typer.Option, show_default=False, rich_help_panel="Training")
NumEpochs = Annotated[
    int | None, train_option(help="Epochs over the training examples, instead of --max-steps.")
]
LearningRate = Annotated[float | None, train_option(help="AdamW learning rate.")]
BatchSize = Annotated[int | None, train_option(help="Prompts per step.")]
GroupSize = Annotated[int | None, train_option(help="Completions per prompt.")]
MaxTokens = Annotated[int | None, train_option(help="Maximum completion length in tokens.")]
Temperature = Annotated[float | None, train_option(help="Sampling temperature.")]
Beta = Annotated[float | None, train_option(help="KL penalty coefficient; 0: no penalty.")]
Seed = Annotated[int | None, train_option(help="Random seed.")]

output_option = partial(typer.Option, show_default=False, rich_help_panel="Output and tracking")
OutputDir = Annotated[str | None, output_option(help="Parent folder of all runs.")]
RunName = Annotated[str | None, output_option(help="Name of the run's folder in --output-dir.")]
ProjectName = Annotated[str | None, output_option(help="Project name in the trackers.")]
Track = Annotated[
    list[str] | None,
    output_option(metavar="NAME", help="Tracker: trackio, wandb, tensorboard or mlflow; repeatable."),
]
NoTrackio = Annotated[
    bool | None, output_option("--no-trackio", help="Use no tracker; log to the run folder only.")
]


def with_task(given: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, Any]:
    """Add a task given as a positional argument to the flags."""
    if len(tasks) > 1 or (tasks and "task" in given):
        raise ConfigError(f"a run has one task; remove all but {tasks[0]}")
    return {**given, **({"task": tasks[0]} if tasks else {})}


def settings_file(config: Path | None, resume: Path | None) -> Path | None:
    """Return the settings file: that of the resumed run or checkpoint, or the user's."""
    if resume is None:
        return config
    if config is not None:
        raise ConfigError("--resume uses the settings of its run; remove --config")
    if (run := run_of_checkpoint(resume)) is not None:
        return run.config
    refuse_agent(resume)
    if not resume.is_dir():
        raise ConfigError(f"there is no run folder {resume}; `groupwise runs` lists the runs")
    if not (resume / "config.yaml").is_file():
        raise ConfigError(f"{resume} is not a run folder: it has no config.yaml")
    return resume / "config.yaml"


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Tell a person at a terminal what takes the next seconds; anything else that reads the output is spared.

    Put heavy imports into this context: torch and transformers alone may take ten seconds. Nothing imported
    becomes garbage, so nothing is collected meanwhile. In a process of the command's own, which starts with
    collections off, what is imported is left out of later ones too: the first would take a second.
    """
    if sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"loading {printable(what)} …", file=sys.stderr, flush=True)
    own_process = not gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if own_process:
            gc.freeze()
        gc.enable()


def check_names(settings: Config) -> None:
    """Raise ConfigError if a tracker is unknown, or if the model is a folder that is not there."""
    from groupwise.model.resolve import local_folder
    from groupwise.tracking.trackers import tracker_names

    tracker_names(settings.track)
    local_folder(settings.model.name)
