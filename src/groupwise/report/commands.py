"""The commands that look at runs; `cli` adds them to its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from groupwise.config import Config
from groupwise.config.checks import between
from groupwise.errors import ConfigError

Say = Callable[[str], None]
Place = Annotated[Path | None, typer.Option("--output-dir", show_default=False, help="Folder of all runs.")]


def add_commands(app: typer.Typer, *, say: Say) -> None:
    """Add watch, report, compare and runs; what they have to tell goes to `say`."""
    add_watch(app, say)
    add_report(app, say)
    add_runs(app, say)


def add_watch(app: typer.Typer, say: Say) -> None:
    @app.command()
    def watch(
        runs: Annotated[
            list[Path] | None,
            typer.Argument(metavar="RUN…", help="Runs, or folders of runs; runs by default."),
        ] = None,
        port: Annotated[
            int | None, typer.Option(show_default=False, help="8477, or any that is free.")
        ] = None,
        host: Annotated[
            str, typer.Option(help="Where to listen; anywhere but on this machine a token is needed.")
        ] = "127.0.0.1",
        token: Annotated[
            str | None, typer.Option(show_default=False, help="The token; one is made where it is needed.")
        ] = None,
    ) -> None:
        """Show runs in the browser, live: curves, rewards, groups, tokens, alarms."""
        between("--port", port, 0, 65535)
        if token is not None and len(token) < 16:
            raise ConfigError("--token must have at least 16 characters")
        from groupwise.report.watch import watch as serve

        serve(runs or [Path(Config().run.output_dir)], host=host, port=port, token=token, say=say)


def add_report(app: typer.Typer, say: Say) -> None:
    @app.command()
    def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]) -> None:
        """Write report.html, one file to keep or to send, and the plots of a run."""
        from groupwise.report.write import write_all
        from groupwise.tracking.run_folder import RunFolder

        folder = RunFolder.open(run)
        say(str(write_all(folder, own=False)))
        for path in sorted(folder.plots.glob("*.png")):
            say(str(path))

    @app.command()
    def compare(
        first: Annotated[Path, typer.Argument(metavar="RUN", help="The run to compare with.")],
        second: Annotated[Path, typer.Argument(metavar="RUN", help="The run to compare.")],
    ) -> None:
        """Compare two runs: held-out results paired, metrics and settings side by side."""
        from groupwise.report.compare import compare_lines

        for line in compare_lines([first, second]):
            say(line)


def add_runs(app: typer.Typer, say: Say) -> None:
    runs = typer.Typer(invoke_without_command=True, help="List runs: state, best result, size.")
    app.add_typer(runs, name="runs")

    @runs.callback()
    def show(context: typer.Context, output_dir: Place = None) -> None:
        context.obj = output_dir or Path(Config().run.output_dir)
        if context.invoked_subcommand is None:
            from groupwise.report.listing import list_lines, listed

            for line in list_lines(listed(context.obj)):
                say(line)

    @runs.command()
    def prune(
        context: typer.Context,
        keep: Annotated[
            int | None,
            typer.Option(show_default=False, help="Also remove all but this many of the newest runs."),
        ] = None,
        rollouts: Annotated[
            bool, typer.Option("--rollouts", help="Of those, remove the rollouts only.")
        ] = False,
        yes: Annotated[
            bool, typer.Option("--yes", help="Remove; without it, only say what would go.")
        ] = False,
    ) -> None:
        """Remove runs without a step, and older runs if asked. One that is training is never touched."""
        between("--keep", keep, 0)
        if rollouts and keep is None:
            raise ConfigError("--rollouts needs --keep: how many of the newest runs stay whole")
        from groupwise.report.listing import in_words, remove, to_prune

        found = to_prune(context.obj, keep=keep, rollouts=rollouts)
        for one in found:
            say(f"{one.path}  {in_words(one.size)}  {one.why}")
        total = in_words(sum(one.size for one in found))
        if not found:
            say("nothing to remove")
        elif yes:
            remove(found)
            say(f"removed {total}")
        else:
            say(f"{total} would go: add --yes to remove")
