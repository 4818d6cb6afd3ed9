"""What a run leaves to look at: report.html and plots, from its folder alone."""

from __future__ import annotations

from pathlib import Path

from groupwise.report.catalogue import SeenRun
from groupwise.report.html import write_report
from groupwise.report.plots import write_plots
from groupwise.tracking.run_folder import RunFolder


def write_all(folder: RunFolder, *, own: bool) -> Path:
    """Write report and plots; `own` says that this very process trains in the folder."""
    run = SeenRun(folder)
    path = write_report(run, state=run.state_at_rest() if own else run.state())
    write_plots(run)
    return path
