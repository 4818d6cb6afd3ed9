"""What `train` and `sft` make of the words and flags that both take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from groupwise.config import Config, read_config
from groupwise.config.loading import read_file
from groupwise.config.schema import NO_TASK
from groupwise.errors import ConfigError
from groupwise.tracking.run_folder import RunFolder, refuse_agent, refuse_checkpoint


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


what = partial(typer.Option, show_default=False, rich_help_panel="What to imitate")
how = partial(typer.Option, show_default=False, rich_help_panel="How to learn")
where = partial(typer.Option, show_default=False, rich_help_panel="Where it goes")

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
"""Each flag and the setting it sets."""


def sft(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK_FILE|SECTION.KEY=VALUE", help="A Python file with a `task`; any settings."
        ),
    ] = None,
    config: Annotated[Path | None, what(help="Settings from a YAML file.")] = None,
    resume: Annotated[Path | None, what(metavar="RUN", help="Go on with the run in this folder.")] = None,
    data: Annotated[
        str | None, what(help="Rows {prompt, completion} or {messages}: file or dataset.")
    ] = None,
    from_run: Annotated[str | None, what(metavar="RUN", help="The best answers of a GRPO run.")] = None,
    task: Annotated[
        str | None, what(help="Its worked answers, unless --data or --from-run; and what to measure.")
    ] = None,
    model: Annotated[str | None, how(help="tiny (built in), a Hugging Face name, or a folder.")] = None,
    batch_size: Annotated[int | None, how(help="Demonstrations in a step.")] = None,
    epochs: Annotated[int | None, how(help="Passes over the demonstrations.")] = None,
    max_steps: Annotated[int | None, how(help="Steps, where --epochs does not say.")] = None,
    learning_rate: Annotated[float | None, how(help="Of AdamW.")] = None,
    max_length: Annotated[int | None, how(help="Longest demonstration in tokens.")] = None,
    lora_r: Annotated[int | None, how(help="Rank of the adapters; 0 trains every weight.")] = None,
    seed: Annotated[int | None, how(help="Of all randomness.")] = None,
    output_dir: Annotated[str | None, where(help="Folder of all runs.")] = None,
    run_name: Annotated[str | None, where(help="Folder of this run, under the output folder.")] = None,
    skip_evaluation: Annotated[bool, how("--skip-evaluation", help="No held-out measurement.")] = False,
    no_trackio: Annotated[bool, where("--no-trackio", help="Track in the run folder only.")] = False,
) -> None:
    """Warm start: imitate worked answers, before `groupwise train` reinforces. Loss on the answers alone."""
    given = {name: context.params[name] for name in SETTINGS if context.params[name] is not None}
    flags = {name: True for name in ("skip_evaluation", "no_trackio") if context.params[name]}
    settings = sft_config(words or [], config=config, resume=resume, given=given, flags=flags)
    from groupwise.model.resolve import local_folder
    from groupwise.tasks.sft_data import plan_warm_start
    from groupwise.tracking.trackers import tracker_names

    tracker_names(settings.track)
    local_folder(settings.model.name)
    # Before torch, so that a mistake in the data is answered at once.
    plan = plan_warm_start(settings, resumed=resume is not None)
    from groupwise.training.sft_run import run_sft

    run_sft(plan, resume=resume)


def sft_config(
    words: Sequence[str],
    *,
    config: Path | None,
    resume: Path | None,
    given: dict[str, Any],
    flags: dict[str, Any],
) -> Config:
    """Return the settings that the words and flags add up to."""
    files = [word for word in words if word.endswith(".py") and "=" not in word]
    overrides = [word for word in words if word not in files]
    given = with_task(given, files)
    config = settings_file(config, resume)
    named = "task" in given or config is not None or any(word.startswith("task.name=") for word in words)
    if not named and ({"data", "from_run"} & given.keys()):
        given = given | {"task": NO_TASK}
    kind = ["run.kind=sft"] if resume is None else []
    settings = [f"{SETTINGS[name]}={value}" for name, value in given.items()]
    read = read_config(config, overrides=[*kind, *settings, *overrides], flags=flags)
    if read.run.kind != "sft":
        raise ConfigError(
            f"{resume or config} is not a warm start, which is all that groupwise sft goes on with"
        )
    if read.sft.from_run is None:
        return read
    own = read_config(RunFolder.open(read.sft.from_run).config)
    if own.run.kind == "evolve":
        raise ConfigError(
            f"{read.sft.from_run} is a search, which records no answers: name a run of groupwise train"
        )
    named = "model" in given or any(word.startswith("model.name=") for word in words)
    if named or (config is not None and "model.name" in read_file(config)):
        return read
    # A run's answers are its model's: the very tokens fit no other.
    return replace(read, model=replace(read.model, name=own.model.name))
