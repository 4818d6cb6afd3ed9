"""`groupwise watch`: runs in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from groupwise.config import Config
from groupwise.config.checks import between
from groupwise.errors import ConfigError

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
    from groupwise.report.watch import watch as serve

    # The usual folder is made by the first run, which may begin after this.
    folders = runs or [Path(Config().run.output_dir)]
    serve(folders, host=host, port=port, token=token, must_exist=bool(runs), say=print)
