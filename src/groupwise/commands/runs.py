"""Commands for finished and running runs: `groupwise runs`, `runs prune`, `report`, `compare` and `watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from groupwise.config import Config
from groupwise.config.coerce import between
from groupwise.errors import ConfigError

runs = typer.Typer(invoke_without_command=True, help="List runs with state, best result and size.")


@runs.callback()
def show(
    context: typer.Context,
    output_dir: Annotated[
        Path | None, typer.Option(show_default=False, help="Parent folder of all runs.")
    ] = None,
) -> None:
    context.obj = output_dir or Path(Config().run.output_dir)
    if context.invoked_subcommand is None:
        if output_dir is None and not context.obj.exists():
            print(f"no runs yet in {context.obj}; start one with groupwise train")
            return
        from groupwise.report.compare_runs import list_lines, listed

        for line in list_lines(listed(context.obj)):
            print(line)


@runs.command()
def prune(
    context: typer.Context,
    keep: Annotated[
        int | None,
        typer.Option(show_default=False, help="Number of newest runs to keep; older runs are removed."),
    ] = None,
    rollouts: Annotated[
        bool, typer.Option("--rollouts", help="Remove only the rollouts of the older runs.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove the files; without it, only list them.")] = False,
) -> None:
    """Remove runs without a finished step, and older runs with --keep. Active runs are never removed."""
    between("--keep", keep, 0)
    if rollouts and keep is None:
        raise ConfigError("--rollouts requires --keep, the number of newest runs that keep their rollouts")
    from groupwise.report.compare_runs import in_words, remove, to_prune

    items = to_prune(context.obj, keep=keep, rollouts=rollouts)
    for item in items:
        print(f"{item.path}  {in_words(item.size)}  {item.why}")
    total = in_words(sum(item.size for item in items))
    if not items:
        print("nothing to remove")
    elif yes:
        remove(items)
        print(f"removed {total}")
    else:
        print(f"{total} would be removed; add --yes to remove it")


def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")]) -> None:
    """Write the report of a run: a self-contained report.html, and plots."""
    from groupwise.report.static_report import write_all
    from groupwise.tracking.run_folder import RunFolder

    folder = RunFolder.open(run)
    print(write_all(folder, own=False))
    for path in sorted(folder.plots.glob("*.png")):
        print(path)


def compare(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="Baseline run.")],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="Run to compare with the baseline.")],
) -> None:
    """Compare two runs: paired held-out results, metrics and settings."""
    from groupwise.report.compare_runs import compare_lines

    for line in compare_lines([first, second]):
        print(line)


SHORTEST_TOKEN = 16


def watch(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN…", help="Runs, or folders of runs; by default, the folder runs."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            show_default=False, help="Port to listen on; by default 8477, or any free port if 8477 is taken."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; addresses other than loopback require a token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(show_default=False, help="Access token; generated if one is required.")
    ] = None,
) -> None:
    """Monitor runs live in the browser: curves, rewards, groups, tokens, alarms."""
    between("--port", port, 0, 65535)
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"--token must have at least {SHORTEST_TOKEN} characters")
    from groupwise.report.watch_server import watch as serve

    # The default folder need not exist yet: the first run creates it.
    folders = runs or [Path(Config().run.output_dir)]
    serve(folders, host=host, port=port, token=token, must_exist=bool(runs), say=print)
