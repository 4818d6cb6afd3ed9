"""`groupwise evolve`: a population on one base."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from groupwise.commands.sft import settings_file, with_task
from groupwise.config import Config, read_config
from groupwise.errors import ConfigError

what = partial(typer.Option, show_default=False, rich_help_panel="What to learn")
how = partial(typer.Option, show_default=False, rich_help_panel="How to search")
where = partial(typer.Option, show_default=False, rich_help_panel="Where it goes")

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
"""Each flag and the setting it sets."""


def evolve(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK|SECTION.KEY=VALUE", help="A task, built in or a Python file; any settings."
        ),
    ] = None,
    config: Annotated[Path | None, what(help="Settings from a YAML file.")] = None,
    resume: Annotated[Path | None, what(metavar="RUN", help="Go on with the search in this folder.")] = None,
    task: Annotated[str | None, what(help="A built-in task: see `groupwise tasks`.")] = None,
    data: Annotated[str | None, what(help="Examples from a file or a Hugging Face dataset.")] = None,
    model: Annotated[str | None, what(help="tiny (built in), a Hugging Face name, or a folder.")] = None,
    method: Annotated[str | None, how(help="halving, tournament, pbt or random.")] = None,
    population: Annotated[int | None, how(help="Members.")] = None,
    every: Annotated[int | None, how(help="Steps between selections.")] = None,
    vary: Annotated[
        list[str] | None,
        how(metavar="NAME=LOW:HIGH", help="What differs: a setting or weights.REWARD; repeatable."),
    ] = None,
    even_if_uncertain: Annotated[
        bool, how("--even-if-uncertain", help="Replace a member also when the difference may be noise.")
    ] = False,
    max_steps: Annotated[int | None, how(help="Steps that each member trains.")] = None,
    tokens: Annotated[int | None, how(help="Stop after so many tokens of all members together.")] = None,
    target: Annotated[float | None, how(help="Stop when the best reaches this accuracy.")] = None,
    lora_r: Annotated[int | None, how(help="Rank of the adapters.")] = None,
    seed: Annotated[int | None, how(help="Of all randomness.")] = None,
    output_dir: Annotated[str | None, where(help="Folder of all runs.")] = None,
    run_name: Annotated[str | None, where(help="Folder of this search, under the output folder.")] = None,
    no_trackio: Annotated[bool, where("--no-trackio", help="Track in the run folder only.")] = False,
) -> None:
    """Train a population of adapters on one base, and let the better ones go on."""
    given = {name: context.params[name] for name in SETTINGS if context.params[name] is not None}
    extra = [bounds_setting(vary)] if vary else []
    extra += ["evolve.certain=false"] if even_if_uncertain else []
    flags = {"no_trackio": True} if no_trackio else {}
    settings = evolve_config(words or [], config=config, resume=resume, given=given, extra=extra, flags=flags)
    from groupwise.model.resolve import local_folder
    from groupwise.tasks import load_task
    from groupwise.tracking.trackers import tracker_names

    loaded = load_task(settings.task)  # before torch, so that a mistake is answered at once
    tracker_names(settings.track)
    local_folder(settings.model.name)
    from groupwise.evolution.evolve_run import evolve as run_search

    run_search(settings, resume=resume, task=loaded)


def bounds_setting(vary: Sequence[str]) -> str:
    """The flags as one setting: learning_rate=1e-5:1e-3 -> evolve.vary={learning_rate: [1e-05, 0.001]}."""
    bounds: list[str] = []
    for word in vary:
        name, _, between = word.partition("=")
        low, _, high = between.partition(":")
        if any(known.startswith(f"{name.strip()}: ") for known in bounds):
            raise ConfigError(f"--vary gives {name.strip()} twice")
        try:
            bounds.append(f"{name.strip()}: [{float(low)}, {float(high)}]")
        except ValueError:
            raise ConfigError(
                f"--vary is written NAME=LOW:HIGH, such as beta=1e-4:1e-2; got {word!r}"
            ) from None
    return f"evolve.vary={{{', '.join(bounds)}}}"


def evolve_config(
    words: Sequence[str],
    *,
    config: Path | None,
    resume: Path | None,
    given: dict[str, Any],
    extra: Sequence[str],
    flags: dict[str, Any],
) -> Config:
    """Return the settings that the words and flags add up to."""
    tasks = [word for word in words if "=" not in word]
    given = with_task(given, tasks)
    kind = ["run.kind=evolve"] if resume is None else []
    settings = [f"{SETTINGS[name]}={value}" for name, value in given.items()]
    overrides = [*kind, *settings, *extra, *(word for word in words if "=" in word)]
    read = read_config(settings_file(config, resume), overrides=overrides, flags=flags)
    if read.run.kind != "evolve":
        raise ConfigError(
            f"{resume or config} is not a population, which is all that groupwise evolve goes on with"
        )
    return read.resolve()
