"""Log metrics to trackio, Weights & Biases, TensorBoard or MLflow. A failing tracker never stops a run."""

from __future__ import annotations

import contextvars
import io
import json
import logging
import math
import os
import re
import secrets
import time
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
                f"the tracker {name} is not installed; run pip install {PACKAGES.get(name, name)}, or change "
                "track.trackers"
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
            self._add_hparams(info)

    def _add_hparams(self, info: TrackerInfo) -> None:
        """Add the settings that runs are compared by, for the tab HPARAMS."""
        from torch.utils.tensorboard.summary import hparams

        compared = {name: info.config.get(name, {}) for name in COMPARED_SECTIONS}
        settings = {name: shown_hparam(value) for name, value in flat_settings(compared).items()}
        writer: Any = self.writer.file_writer
        for summary in hparams(settings, dict.fromkeys(COMPARED_METRICS, 0.0)):  # type: ignore[no-untyped-call]
            writer.add_summary(summary)

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


COMPARED_SECTIONS = ("model", "lora", "task", "rollout", "optim", "algo")
COMPARED_METRICS = ("reward/mean", "eval/greedy", "eval/reward", "policy/kl")
"""Sections of settings and metrics in TensorBoard's table of runs."""


def shown_hparam(value: Any) -> bool | float | str:
    return value if isinstance(value, bool | int | float | str) else json.dumps(value, default=str)


def verbatim(text: str) -> str:
    """Return text as a Markdown code block, so that completions are not rendered."""
    return "\n".join(f"    {line}" for line in text.splitlines())


class Mlflow:
    """MLflow: the server of MLFLOW_TRACKING_URI, or by default mlflow.db beside the run folders."""

    def __init__(self, info: TrackerInfo) -> None:
        logging.getLogger("mlflow").setLevel(logging.ERROR)  # it reports each table of a new database
        from mlflow import MlflowClient

        place = info.folder.resolve().parent
        named = os.environ.get("MLFLOW_TRACKING_URI")
        self.client = MlflowClient(tracking_uri=named or f"sqlite:///{place / 'mlflow.db'}")
        kept = info.folder / "mlflow" / "id"
        if info.resumed_from is not None and kept.is_file():
            self.run_id = kept.read_text(encoding="utf-8")
        else:
            self.run_id = self._new_run(info, artifacts=None if named else place / "mlflow-artifacts")
            write_atomically(kept, self.run_id)
        self.first_step = self._first_step()

    def _new_run(self, info: TrackerInfo, *, artifacts: Path | None) -> str:
        from mlflow.entities import Param

        experiment = self.client.get_experiment_by_name(info.project)
        where = None if artifacts is None else artifacts.as_uri()
        number = (
            experiment.experiment_id if experiment else self.client.create_experiment(info.project, where)
        )
        run_id: str = self.client.create_run(number, run_name=info.run_name).info.run_id
        settings = list(flat_settings(info.config).items())
        for start in range(0, len(settings), MLFLOW_PARAMS):
            part = settings[start : start + MLFLOW_PARAMS]
            self.client.log_batch(run_id, params=[Param(name, str(value)[:500]) for name, value in part])
        return run_id

    def _first_step(self) -> int:
        """Return the step after the last one that a killed session logged; MLflow would keep it twice."""
        names = list(self.client.get_run(self.run_id).data.metrics)
        steps = [one.step for name in names for one in self.client.get_metric_history(self.run_id, name)]
        return max(steps, default=-1) + 1

    def log(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        if step >= self.first_step:
            now = int(1000 * time.time())
            logged = [Metric(mlflow_name(name), value, now, step) for name, value in metrics.items()]
            self.client.log_batch(self.run_id, metrics=logged)

    def samples(self, step: int, rows: Rows) -> None:
        if step >= self.first_step:
            table = {name: [row[name] for row in rows] for name in rows[0]}
            self.client.log_table(self.run_id, table, f"samples/step-{step:06}.json")

    def finish(self) -> None:
        self.client.set_terminated(self.run_id)


MLFLOW_PARAMS = 100
"""Maximum number of parameters in a request to MLflow."""


def mlflow_name(name: str) -> str:
    """Return a metric's name without characters that MLflow refuses: eval/pass@8 -> eval/pass_at_8."""
    return re.sub(r"[^\w./ :-]", "_", name.replace("@", "_at_"))


def flat_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of all sections by full name, such as optim.learning_rate."""
    return {
        f"{section}.{name}": value
        for section, settings in config.items()
        if isinstance(settings, Mapping)
        for name, value in settings.items()
    }


TRACKERS: dict[str, Callable[[TrackerInfo], Tracker]] = {
    "trackio": Trackio,
    "wandb": Wandb,
    "tensorboard": TensorBoard,
    "mlflow": Mlflow,
}
PACKAGES = {"mlflow": "mlflow-skinny sqlalchemy alembic pandas"}
"""What to install for a tracker, if it is not called as the tracker is."""


def columns_and_data(rows: Rows) -> dict[str, Any]:
    """Return rows in the form that the table classes of trackers expect."""
    columns = list(rows[0])
    return {"columns": columns, "data": [[row[column] for column in columns] for row in rows]}
