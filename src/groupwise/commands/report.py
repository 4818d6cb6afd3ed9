"""`groupwise report` and `groupwise compare`: a run, or two, from their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]) -> None:
    """Write report.html, one file to keep or to send, and the plots of a run."""
    from groupwise.report.write import write_all
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
    from groupwise.report.compare import compare_lines

    for line in compare_lines([first, second]):
        print(line)
