"""`groupwise runs` and `groupwise runs prune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from groupwise.config import Config
from groupwise.config.coerce import between
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
        from groupwise.report.compare_runs import list_lines, listed

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
    from groupwise.report.compare_runs import in_words, remove, to_prune

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


def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]) -> None:
    """Write report.html, one file to keep or to send, and the plots of a run."""
    from groupwise.report.static_report import write_all
    from groupwise.tracking.run_folder import RunFolder

    folder = RunFolder.open(run)
    print(write_all(folder, own=False))
    for path in sorted(folder.plots.glob("*.png")):
        print(path)


def compare(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="The run to compare with.")],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="The run to compare.")],
) -> None:
    """Compare two runs: held-out results paired, metrics and settings side by side."""
    from groupwise.report.compare_runs import compare_lines

    for line in compare_lines([first, second]):
        print(line)


SHORTEST_TOKEN = 16


def watch(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN…", help="Runs, or folders of runs; runs by default.")
    ] = None,
    port: Annotated[int | None, typer.Option(show_default=False, help="8477, or any that is free.")] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; anywhere but on this machine a token is needed.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(show_default=False, help="The token; one is made where it is needed.")
    ] = None,
) -> None:
    """Show runs in the browser, live: curves, rewards, groups, tokens, alarms."""
    between("--port", port, 0, 65535)
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"--token must have at least {SHORTEST_TOKEN} characters")
    from groupwise.report.watch_server import watch as serve

    # The usual folder is made by the first run, which may begin after this.
    folders = runs or [Path(Config().run.output_dir)]
    serve(folders, host=host, port=port, token=token, must_exist=bool(runs), say=print)
