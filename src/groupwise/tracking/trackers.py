"""Log metrics to trackio, Weights & Biases or TensorBoard. A failing tracker never stops a run."""

from __future__ import annotations

import contextvars
import io
import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from groupwise.config.schema import TrackConfig
from groupwise.errors import ConfigError
from groupwise.files import write_atomically

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float]
Rows = Sequence[Mapping[str, Any]]
"""Sampled rollouts as table rows, all with the same columns."""
Warn = Callable[[str], None]


class Tracker(Protocol):
    """The interface of an experiment tracker."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def samples(self, step: int, rows: Rows) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerInfo:
    """The run's metadata, passed to a tracker when it opens."""

    project: str
    run_name: str
    config: Mapping[str, Any]
    folder: Path
    resumed_from: int | None
    """The step that the run was resumed from; None in a new run."""


def open_trackers(
    track: TrackConfig,
    *,
    run_name: str,
    config: Mapping[str, Any],
    folder: Path,
    resumed_from: int | None = None,
    warn: Warn = logger.warning,
) -> list[Tracker]:
    """Open the configured trackers; by default trackio, if it is installed."""
    info = TrackerInfo(
        project=track.project, run_name=run_name, config=config, folder=folder, resumed_from=resumed_from
    )
    return [SafeTracker(name, TRACKERS[name], info, warn=warn) for name in tracker_names(track)]


def tracker_names(track: TrackConfig) -> tuple[str, ...]:
    """Return the names of the trackers to open; raise an error if a configured one is not installed."""
    if track.trackers is None:
        return ("trackio",) if find_spec("trackio") else ()
    for name in track.trackers:
        if find_spec(name) is None:
            raise ConfigError(
                f"the tracker {name} is not installed; run pip install {name}, or change track.trackers"
            )
    return track.trackers


class SafeTracker:
    """A tracker that is disabled, with a warning, at its first failure. Training continues without it."""

    def __init__(
        self, name: str, open_tracker: Callable[[TrackerInfo], Tracker], info: TrackerInfo, *, warn: Warn
    ) -> None:
        self.name = name
        self.warn = warn
        self.tracker: Tracker | None = None
        with self.guard():
            self.tracker = open_tracker(info)

    def log(self, step: int, metrics: Metrics) -> None:
        if self.tracker:
            with self.guard():
                self.tracker.log(
                    step, {name: value for name, value in metrics.items() if math.isfinite(value)}
                )

    def samples(self, step: int, rows: Rows) -> None:
        if self.tracker and rows:
            with self.guard():
                self.tracker.samples(step, rows)

    def finish(self) -> None:
        if self.tracker:
            with self.guard():
                self.tracker.finish()
            self.tracker = None

    @contextmanager
    def guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.tracker = None
            self.warn(f"{self.name} failed and is disabled for the rest of this run: {error!r}")


class Trackio:
    """Local experiment tracking in a SQLite file (TRACKIO_DIR); view it with `trackio show`."""

    def __init__(self, info: TrackerInfo) -> None:
        # Use a separate context: trackio keeps a current run per context, and at exit it would finish the run
        # of the main context a second time and print a message.
        with redirect_stdout(io.StringIO()), local_only():
            self.run = contextvars.copy_context().run(self.open, info)
        # A run resumed after a kill repeats some steps; trackio cannot overwrite those it already has.
        self.first_step: int = getattr(self.run, "_next_step", 0)

    @staticmethod
    def open(info: TrackerInfo) -> Any:
        import trackio

        return trackio.init(
            project=info.project,
            name=info.run_name,
            config=dict(info.config),
            resume="never" if info.resumed_from is None else "allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, metrics: Metrics) -> None:
        if step >= self.first_step:
            self.run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Rows) -> None:
        import trackio

        if step >= self.first_step:
            self.run.log({"samples": trackio.Table(**columns_and_data(rows))}, step=step)

    def finish(self) -> None:
        with redirect_stdout(io.StringIO()):
            self.run.finish()


@contextmanager
def local_only() -> Iterator[None]:
    """Keep trackio from contacting the Hub, unless the user has configured a remote server."""
    if os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL"):
        yield
        return
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


class Wandb:
    """Weights & Biases; WANDB_MODE=offline logs to local files only."""

    def __init__(self, info: TrackerInfo) -> None:
        import wandb

        settings = wandb.Settings(
            console="off",
            silent=True,
            # Without a timeout, wandb waits forever for an unreachable server before the process can exit.
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
        )
        # Set up the whole process: with run settings only, wandb prompts for a missing key under the panel.
        wandb.setup(settings)
        self.run = wandb.init(
            project=info.project,
            name=info.run_name,
            id=lasting_id(info.folder / "wandb" / "id"),
            resume="allow",
            config=dict(info.config),
            dir=str(info.folder),
            settings=settings,
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self.run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Rows) -> None:
        import wandb

        self.run.log({"samples": wandb.Table(**columns_and_data(rows))}, step=step)

    def finish(self) -> None:
        self.run.finish()


FINISH_SECONDS = 60.0
"""Time limit for the final upload to Weights & Biases; `wandb sync` uploads the rest later."""


def lasting_id(path: Path) -> str:
    """Return an id stored with the run. Names are not unique: another run's log must not be continued."""
    if not path.is_file():
        write_atomically(path, secrets.token_hex(4))
    return path.read_text(encoding="utf-8")


class TensorBoard:
    """Event files in the run folder; view them with `tensorboard --logdir runs`."""

    def __init__(self, info: TrackerInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if info.resumed_from is None else info.resumed_from + 1
        self.writer = SummaryWriter(str(info.folder / "tensorboard"), purge_step=purge)
        if info.resumed_from is None:
            self.writer.add_text("config", verbatim(json.dumps(info.config, indent=1, default=str)), 0)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def samples(self, step: int, rows: Rows) -> None:
        for index, row in enumerate(rows):
            text = "\n\n".join(f"**{name}**\n\n{verbatim(str(value))}" for name, value in row.items())
            self.writer.add_text(f"samples/{index}", text, step)

    def finish(self) -> None:
        self.writer.close()


def verbatim(text: str) -> str:
    """Return text as a Markdown code block, so that completions are not rendered."""
    return "\n".join(f"    {line}" for line in text.splitlines())


TRACKERS: dict[str, Callable[[TrackerInfo], Tracker]] = {
    "trackio": Trackio,
    "wandb": Wandb,
    "tensorboard": TensorBoard,
}


def columns_and_data(rows: Rows) -> dict[str, Any]:
    """Return rows in the form that the table classes of trackers expect."""
    columns = list(rows[0])
    return {"columns": columns, "data": [[row[column] for column in columns] for row in rows]}
