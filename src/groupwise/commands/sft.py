"""`groupwise sft`: supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from groupwise.commands.options import (
    LearningRate,
    NoTrackio,
    OutputDir,
    ProjectName,
    RunName,
    Seed,
    Track,
    check_names,
    loading,
    settings_file,
    train_option,
    with_task,
)
from groupwise.config import Config, read_config
from groupwise.config.loading import read_file
from groupwise.config.schema import NO_TASK
from groupwise.errors import ConfigError
from groupwise.tracking.run_folder import RunFolder

data_option = partial(typer.Option, show_default=False, rich_help_panel="Configuration and data")

SETTINGS = {
    "data": "sft.data",
    "from_run": "sft.from_run",
    "task": "task.name",
    "model": "model.name",
    "batch_size": "sft.batch",
    "epochs": "sft.passes",
    "max_steps": "run.max_steps",
    "learning_rate": "optim.learning_rate",
    "max_length": "sft.max_length",
    "lora_r": "lora.r",
    "seed": "run.seed",
    "output_dir": "run.output_dir",
    "run_name": "run.name",
}
"""The setting that each flag sets."""


def sft(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK_FILE|SECTION.KEY=VALUE",
            help="Python file that defines `task`; settings to override.",
        ),
    ] = None,
    config: Annotated[Path | None, data_option(help="YAML file with settings.")] = None,
    resume: Annotated[
        Path | None,
        data_option(
            metavar="RUN",
            help="Run to resume. From one of its checkpoints, a copy continues in a new folder.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        data_option(help="Data file or Hugging Face dataset: rows {prompt, completion} or {messages}."),
    ] = None,
    from_run: Annotated[
        str | None, data_option(metavar="RUN", help="GRPO run whose best completions to train on.")
    ] = None,
    task: Annotated[
        str | None,
        data_option(help="Task to evaluate; its worked solutions are the data if no other is given."),
    ] = None,
    model: Annotated[
        str | None,
        train_option(
            help="tiny (built in), a Hugging Face model ID, or the folder of a model or LoRA adapter."
        ),
    ] = None,
    batch_size: Annotated[int | None, train_option(help="Demonstrations per step.")] = None,
    epochs: Annotated[
        int | None, train_option("--epochs", "--num-epochs", help="Epochs over the demonstrations.")
    ] = None,
    max_steps: Annotated[int | None, train_option(help="Number of steps, if --epochs is not given.")] = None,
    learning_rate: LearningRate = None,
    max_length: Annotated[
        int | None, train_option(help="Maximum length of a demonstration in tokens.")
    ] = None,
    max_examples: Annotated[
        int | None, train_option(help="Maximum examples of --task to train on; 0: all.")
    ] = None,
    max_tokens: Annotated[
        int | None, train_option(help="Maximum completion length in held-out evaluations.")
    ] = None,
    lora_r: Annotated[int | None, train_option(help="LoRA rank; 0: full fine-tuning.")] = None,
    seed: Seed = None,
    output_dir: OutputDir = None,
    run_name: RunName = None,
    skip_evaluation: Annotated[
        bool, train_option("--skip-evaluation", help="Skip all held-out evaluations.")
    ] = False,
    project_name: ProjectName = None,
    track: Track = None,
    no_trackio: NoTrackio = None,
) -> None:
    """Supervised fine-tuning on demonstrations, as a warm start for `groupwise train`."""
    given = {name: context.params[name] for name in SETTINGS if context.params[name] is not None}
    shared = ("skip_evaluation", "no_trackio", "project_name", "track", "max_examples", "max_tokens")
    flags = {name: context.params[name] for name in shared if context.params[name]}
    settings = sft_config(arguments or [], config=config, resume=resume, given=given, flags=flags)
    check_names(settings)
    from groupwise.tasks.sft_data import plan_warm_start

    # Read the data before torch, so that mistakes in it are reported immediately.
    plan = plan_warm_start(settings, resumed=resume is not None)
    with loading(f"PyTorch and {settings.model.name}"):
        from groupwise.training.sft_run import run_sft

    run_sft(plan, resume=resume)


def sft_config(
    arguments: Sequence[str],
    *,
    config: Path | None,
    resume: Path | None,
    given: dict[str, Any],
    flags: dict[str, Any],
) -> Config:
    """Return the settings given by positional arguments and flags."""
    files = [argument for argument in arguments if argument.endswith(".py") and "=" not in argument]
    overrides = [argument for argument in arguments if argument not in files]
    given = with_task(given, files)
    config = settings_file(config, resume)
    named = (
        "task" in given
        or config is not None
        or any(argument.startswith("task.name=") for argument in arguments)
    )
    if not named and ({"data", "from_run"} & given.keys()):
        given = given | {"task": NO_TASK}
    kind = ["run.kind=sft"] if resume is None else []
    settings = [f"{SETTINGS[name]}={value}" for name, value in given.items()]
    read = read_config(config, overrides=[*kind, *settings, *overrides], flags=flags)
    if read.run.kind != "sft":
        raise ConfigError(
            f"{resume or config} is not an SFT run; groupwise sft can only resume runs that it started"
        )
    if read.sft.from_run is None:
        return read
    own = read_config(RunFolder.open(read.sft.from_run).config)
    if own.run.kind == "evolve":
        raise ConfigError(
            f"{read.sft.from_run} is an evolve run, whose completions come from several members; "
            "use a groupwise train run"
        )
    named = "model" in given or any(argument.startswith("model.name=") for argument in arguments)
    if named or (config is not None and "model.name" in read_file(config)):
        return read
    # The completions are token ids of the run's own model; another tokenizer would not fit.
    return replace(read, model=replace(read.model, name=own.model.name))
