"""Sending metrics to trackio, Weights & Biases or TensorBoard, none of which can stop a run."""

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
"""Sampled rollouts to read, all with the same columns."""
Warn = Callable[[str], None]


class Tracker(Protocol):
    """Anything that takes what a step logs."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def samples(self, step: int, rows: Rows) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerInfo:
    """What a tracker is told about the run when it opens."""

    project: str
    run_name: str
    config: Mapping[str, Any]
    folder: Path
    resumed_from: int | None
    """The last step that counts of an earlier session; None in a new run."""


def open_trackers(
    track: TrackConfig,
    *,
    run_name: str,
    config: Mapping[str, Any],
    folder: Path,
    resumed_from: int | None = None,
    warn: Warn = logger.warning,
) -> list[Tracker]:
    """Open the trackers the user named, or trackio when none is named and it is installed."""
    opening = TrackerInfo(
        project=track.project, run_name=run_name, config=config, folder=folder, resumed_from=resumed_from
    )
    return [SafeTracker(name, TRACKERS[name], opening, warn=warn) for name in tracker_names(track)]


def tracker_names(track: TrackConfig) -> tuple[str, ...]:
    """Return the trackers to open; one that is named must be installed."""
    if track.trackers is None:
        return ("trackio",) if find_spec("trackio") else ()
    for name in track.trackers:
        if find_spec(name) is None:
            raise ConfigError(f"track.trackers names {name}, which is not installed: pip install {name}")
    return track.trackers


class SafeTracker:
    """A tracker whose first failure is told and turns it off: training goes on without it."""

    def __init__(
        self, name: str, open_tracker: Callable[[TrackerInfo], Tracker], opening: TrackerInfo, *, warn: Warn
    ) -> None:
        self.name = name
        self.warn = warn
        self.tracker: Tracker | None = None
        with self.guard():
            self.tracker = open_tracker(opening)

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
            self.warn(f"{self.name} failed and is off for the rest of this run: {error!r}")


class Trackio:
    """Local experiment tracking in one SQLite file (TRACKIO_DIR): `trackio show` draws it."""

    def __init__(self, opening: TrackerInfo) -> None:
        # A context of its own: trackio keeps a current run per context, and would finish the one it finds
        # in the main context once more when the process exits, with a message.
        with redirect_stdout(io.StringIO()), local_only():
            self.run = contextvars.copy_context().run(self.open, opening)
        # A killed run, resumed, makes some steps once more: those that trackio holds, it holds for good.
        self.first_step: int = getattr(self.run, "_next_step", 0)

    @staticmethod
    def open(opening: TrackerInfo) -> Any:
        import trackio

        return trackio.init(
            project=opening.project,
            name=opening.run_name,
            config=dict(opening.config),
            resume="never" if opening.resumed_from is None else "allow",
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
    """Keep trackio from asking the Hub for the user's name, unless the user sends its logs to a server."""
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
    """Weights & Biases; WANDB_MODE=offline keeps everything on this machine."""

    def __init__(self, opening: TrackerInfo) -> None:
        import wandb

        settings = wandb.Settings(
            console="off",
            silent=True,
            # When its server is gone, wandb by itself waits for it without end before the process may end.
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
        )
        # For the whole process: told to the run alone, wandb asks for a missing key under the live display.
        wandb.setup(settings)
        self.run = wandb.init(
            project=opening.project,
            name=opening.run_name,
            id=lasting_id(opening.folder / "wandb" / "id"),
            resume="allow",
            config=dict(opening.config),
            dir=str(opening.folder),
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
"""Time that Weights & Biases gets to send what is left; `wandb sync` sends the rest later."""


def lasting_id(path: Path) -> str:
    """An id kept with the run: its name may have belonged to another run, which must not be continued."""
    if not path.is_file():
        write_atomically(path, secrets.token_hex(4))
    return path.read_text(encoding="utf-8")


class TensorBoard:
    """Event files in the run folder: `tensorboard --logdir runs` draws them."""

    def __init__(self, opening: TrackerInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if opening.resumed_from is None else opening.resumed_from + 1
        self.writer = SummaryWriter(str(opening.folder / "tensorboard"), purge_step=purge)
        if opening.resumed_from is None:
            self.writer.add_text("config", verbatim(json.dumps(opening.config, indent=1, default=str)), 0)

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
    """The text as Markdown that shows it as it is: what a model wrote is not to be rendered."""
    return "\n".join(f"    {line}" for line in text.splitlines())


TRACKERS: dict[str, Callable[[TrackerInfo], Tracker]] = {
    "trackio": Trackio,
    "wandb": Wandb,
    "tensorboard": TensorBoard,
}


def columns_and_data(rows: Rows) -> dict[str, Any]:
    """Rows in the form that table classes take."""
    columns = list(rows[0])
    return {"columns": columns, "data": [[row[column] for column in columns] for row in rows]}
