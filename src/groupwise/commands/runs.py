"""`groupwise runs` and `groupwise runs prune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from groupwise.config import Config
from groupwise.config.checks import between
from groupwise.errors import ConfigError

runs = typer.Typer(invoke_without_command=True, help="List runs: state, best result, size.")


@runs.callback()
def show(
    context: typer.Context,
    output_dir: Annotated[Path | None, typer.Option(show_default=False, help="Folder of all runs.")] = None,
) -> None:
    context.obj = output_dir or Path(Config().run.output_dir)
    if context.invoked_subcommand is None:
        if output_dir is None and not context.obj.exists():
            print(f"no runs yet: groupwise train makes the first in {context.obj}")
            return
        from groupwise.report.listing import list_lines, listed

        for line in list_lines(listed(context.obj)):
            print(line)


@runs.command()
def prune(
    context: typer.Context,
    keep: Annotated[
        int | None,
        typer.Option(show_default=False, help="Also remove all but this many of the newest runs."),
    ] = None,
    rollouts: Annotated[bool, typer.Option("--rollouts", help="Of those, remove the rollouts only.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it, only say what would go.")] = False,
) -> None:
    """Remove runs without a step, and older runs if asked. One that is training is never touched."""
    between("--keep", keep, 0)
    if rollouts and keep is None:
        raise ConfigError("--rollouts needs --keep: how many of the newest runs stay whole")
    from groupwise.report.listing import in_words, remove, to_prune

    found = to_prune(context.obj, keep=keep, rollouts=rollouts)
    for one in found:
        print(f"{one.path}  {in_words(one.size)}  {one.why}")
    total = in_words(sum(one.size for one in found))
    if not found:
        print("nothing to remove")
    elif yes:
        remove(found)
        print(f"removed {total}")
    else:
        print(f"{total} would go: add --yes to remove")
