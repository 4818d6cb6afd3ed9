"""What a run leaves to look at: report.html and plots, from its folder alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from groupwise.errors import ConfigError
from groupwise.report.catalogue import SeenRun
from groupwise.report.html import write_report
from groupwise.report.plots import write_plots
from groupwise.tracking.files import remove_temporaries
from groupwise.tracking.run_folder import RunFolder


def write_all(folder: RunFolder, *, own: bool, stats: Mapping[str, object] | None = None) -> Path:
    """Write report and plots; `own` says that this very process trains in the folder.

    `stats`: what training_stats.json will hold, where it is not written yet.
    """
    run = SeenRun(folder, stats=stats)
    try:
        for place in (folder.path, folder.plots):
            remove_temporaries(place)
        path = write_report(run, state=run.state_at_rest() if own else run.state())
        write_plots(run)
    except OSError as error:
        raise ConfigError(f"cannot write the report in {folder.path}: {error.strerror or error}") from error
    return path
