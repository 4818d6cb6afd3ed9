"""`groupwise evolve`: train a population of adapters on one base model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from groupwise.commands.options import (
    BatchSize,
    Beta,
    Data,
    GroupSize,
    LearningRate,
    MaxTokens,
    NoTrackio,
    NumEpochs,
    OutputDir,
    ProjectName,
    RunName,
    Seed,
    TaskName,
    TaskOrOverrides,
    Temperature,
    Track,
    check_names,
    loading,
    model_option,
    settings_file,
    train_option,
    with_task,
)
from groupwise.config import Config, read_config
from groupwise.errors import ConfigError
from groupwise.tracking.run_folder import refuse_checkpoint

search_option = partial(typer.Option, show_default=False, rich_help_panel="Search")

SETTINGS = {
    "task": "task.name",
    "data": "task.data",
    "model": "model.name",
    "method": "evolve.method",
    "population": "evolve.population",
    "every": "evolve.every",
    "tokens": "evolve.tokens",
    "target": "evolve.target",
    "max_steps": "run.max_steps",
    "lora_r": "lora.r",
    "seed": "run.seed",
    "output_dir": "run.output_dir",
    "run_name": "run.name",
}
"""The setting that each flag sets."""
SHARED = (
    *("num_epochs", "max_examples", "learning_rate", "batch_size", "group_size", "max_tokens"),
    *("temperature", "beta", "project_name", "track", "no_trackio"),
)
"""Flags that mean what they mean for `groupwise train`."""


def evolve(
    context: typer.Context,
    arguments: TaskOrOverrides = None,
    config: Annotated[Path | None, model_option(help="YAML file with settings.")] = None,
    resume: Annotated[
        Path | None, model_option(metavar="RUN", help="Resume the search in this folder.")
    ] = None,
    task: TaskName = None,
    data: Data = None,
    model: Annotated[
        str | None, model_option(help="tiny (built in), a Hugging Face model ID, or a folder.")
    ] = None,
    method: Annotated[
        str | None, search_option(help="Selection method: halving, tournament, pbt or random.")
    ] = None,
    population: Annotated[
        int | None, search_option(help="Number of members (adapters that train side by side).")
    ] = None,
    every: Annotated[
        int | None, search_option(help="Steps after which the worst members are replaced.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        search_option(
            metavar="NAME=LOW:HIGH",
            help="Setting that differs between members, or weights.REWARD, with its bounds; repeatable.",
        ),
    ] = None,
    even_if_uncertain: Annotated[
        bool,
        search_option(
            "--even-if-uncertain", help="Replace members even if the difference is not significant."
        ),
    ] = False,
    max_steps: Annotated[int | None, train_option(help="Training steps per member.")] = None,
    num_epochs: NumEpochs = None,
    max_examples: Annotated[
        int | None, train_option(help="Maximum number of training examples; 0: all.")
    ] = None,
    learning_rate: LearningRate = None,
    batch_size: BatchSize = None,
    group_size: GroupSize = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    beta: Beta = None,
    tokens: Annotated[
        int | None, search_option(help="Stop after all members together have sampled this many tokens.")
    ] = None,
    target: Annotated[
        float | None, search_option(help="Stop when the best member reaches this accuracy.")
    ] = None,
    lora_r: Annotated[int | None, train_option(help="LoRA rank.")] = None,
    seed: Seed = None,
    output_dir: OutputDir = None,
    run_name: RunName = None,
    project_name: ProjectName = None,
    track: Track = None,
    no_trackio: NoTrackio = None,
) -> None:
    """Train a population of adapters on one base model, and keep the best (hyperparameter search)."""
    given = {name: context.params[name] for name in SETTINGS if context.params[name] is not None}
    extra = [bounds_setting(vary)] if vary else []
    extra += ["evolve.certain=false"] if even_if_uncertain else []
    flags = {name: context.params[name] for name in SHARED if context.params[name] not in (None, [], False)}
    settings = evolve_config(
        arguments or [], config=config, resume=resume, given=given, extra=extra, flags=flags
    )
    from groupwise.tasks import load_task

    loaded = load_task(settings.task)  # before torch, so that mistakes are reported immediately
    check_names(settings)
    with loading(f"PyTorch and {settings.model.name}"):
        from groupwise.evolution.evolve_run import evolve as run_search

    run_search(settings, resume=resume, task=loaded)


def bounds_setting(vary: Sequence[str]) -> str:
    """Return the flags as one setting: beta=1e-5:1e-3 -> evolve.vary={beta: [1e-05, 0.001]}."""
    bounds: list[str] = []
    for argument in vary:
        name, _, between = argument.partition("=")
        low, _, high = between.partition(":")
        if any(bound.startswith(f"{name.strip()}: ") for bound in bounds):
            raise ConfigError(f"--vary {name.strip()} is given twice; remove one of them")
        try:
            bounds.append(f"{name.strip()}: [{float(low)}, {float(high)}]")
        except ValueError:
            raise ConfigError(
                f"--vary must have the form NAME=LOW:HIGH, such as beta=1e-4:1e-2; got {argument!r}"
            ) from None
    return f"evolve.vary={{{', '.join(bounds)}}}"


def evolve_config(
    arguments: Sequence[str],
    *,
    config: Path | None,
    resume: Path | None,
    given: dict[str, Any],
    extra: Sequence[str],
    flags: dict[str, Any],
) -> Config:
    """Return the settings given by positional arguments and flags."""
    if resume is not None:
        refuse_checkpoint(resume)
    tasks = [argument for argument in arguments if "=" not in argument]
    given = with_task(given, tasks)
    kind = ["run.kind=evolve"] if resume is None else []
    settings = [f"{SETTINGS[name]}={value}" for name, value in given.items()]
    overrides = [*kind, *settings, *extra, *(argument for argument in arguments if "=" in argument)]
    read = read_config(settings_file(config, resume), overrides=overrides, flags=flags)
    if read.run.kind != "evolve":
        raise ConfigError(
            f"{resume or config} is not an evolve run; groupwise evolve can only resume runs that it started"
        )
    return read.resolve()
