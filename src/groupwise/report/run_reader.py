"""Read a run from its files: state, settings, alarms, metrics.jsonl as it grows, evaluations, and rewards.

`RunIndex` finds the run folders to show, and `RunReader` reads one of them.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import threading
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from groupwise.config import Config, read_config
from groupwise.errors import ConfigError
from groupwise.report.alarms import ALARM_RULES, alarms
from groupwise.report.rollout_view import RolloutView
from groupwise.tracking.run_folder import EVOLUTION, SETTINGS, RunFolder, is_run, owner, step_of

logger = logging.getLogger(__name__)


class RunReader:
    """One run, with readers for its files."""

    def __init__(self, folder: RunFolder, *, stats: Mapping[str, object] | None = None) -> None:
        self.folder = folder
        self.ending = stats
        """The content of training_stats.json, if this process is about to write it."""
        self.tail = MetricsTail(folder.metrics)
        self.measured = EvaluationFiles(folder).read
        self.rollouts = RolloutView(folder)
        try:
            self.config: Config | None = read_config(folder.config)
        except (ConfigError, OSError, RecursionError):
            self.config = None  # written by another version; metrics can still be shown

    @property
    def title(self) -> str:
        return f"{self.config.task.name} · {self.config.model.name}" if self.config else self.folder.name

    @property
    def max_steps(self) -> int | None:
        return self.config.run.max_steps if self.config else None

    def alarmed(self) -> dict[str, Any]:
        """Return all alarms, the titles of all rules, and the number of steps checked."""
        rows = self.tail.rows()
        return {
            "alarms": [asdict(alarm) for alarm in alarms(rows, self.measured())],
            "watched": [rule.title for rule in ALARM_RULES],
            "steps": len(rows),
        }

    def state(self) -> str:
        """Return training, finished or stopped."""
        return "training" if owner(self.folder) is not None else self.state_at_rest()

    def state_at_rest(self) -> str:
        """Return finished or stopped, without checking the lock; for use by the training process itself."""
        rows = self.tail.rows()
        done = bool(rows) and self.max_steps is not None and rows[-1]["step"] >= self.max_steps
        return "finished" if done and self.is_stored(rows[-1]["step"]) else "stopped"

    def is_stored(self, step: int) -> bool:
        """Whether a step has a checkpoint, or had one that was deleted after the run finished."""
        return self.folder.checkpoint_at(step).is_dir() or self.stats().get("steps") == step

    def overview(self, *, state: str | None = None) -> dict[str, Any]:
        """Return the summary of a run in the list of runs."""
        rows = self.tail.rows()
        return {
            "name": self.folder.name,
            "title": self.title,
            "state": state or self.state(),
            "step": rows[-1]["step"] if rows else 0,
            "max_steps": self.max_steps,
            "steps": self.rollouts.steps(),
            "stats": self.stats(),
            "search": self.rollouts.is_search,
        }

    def glance(self) -> dict[str, Any]:
        """Return the overview; if the run cannot be read, mark it as damaged rather than fail the list."""
        try:
            return self.overview()
        except Exception as error:
            logger.warning("cannot read run %s: %r", self.folder.path, error)
            name = self.folder.name
            empty: dict[str, Any] = {"step": 0, "max_steps": None, "steps": [], "stats": {}, "search": False}
            return {"name": name, "title": name, "state": "damaged", **empty}

    def settings(self) -> dict[str, Any]:
        """Return config.yaml as text. Links out of the folder are not followed: they may expose any file."""
        if not self.folder.config.resolve().is_relative_to(self.folder.path.resolve()):
            raise FileNotFoundError(self.folder.config)
        return {"text": self.folder.config.read_text(encoding="utf-8")}

    def stats(self) -> dict[str, Any]:
        """Return training_stats.json; empty until the run has ended."""
        if self.ending is not None:
            return dict(self.ending)
        try:
            content = json.loads(self.folder.stats.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def population(self) -> dict[str, Any] | None:
        """Return the members of a search and what happened to them; None for another run."""
        path = self.folder.path / EVOLUTION
        if not path.resolve().is_relative_to(self.folder.path.resolve()):
            return None  # a link out of the folder may expose any file
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        return content if isinstance(content, dict) else None

    def curves(self, *, after: int = -1) -> dict[str, Any]:
        """Return the metrics of the steps after `after`, and all evaluations."""
        rows = [row for row in self.tail.rows() if row["step"] > after]
        return {**as_columns(rows), "evaluations": [asdict(one) for one in self.measured()]}

    def change(self) -> tuple[Any, ...]:
        """Return a value that changes whenever the run's files change."""
        folder = self.folder
        watched = (
            *(folder.metrics, folder.rollouts, folder.evaluations, folder.stats),
            folder.path / EVOLUTION,
        )
        return (*tuple(stamp(path) for path in watched), owner(self.folder))


def stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return status.st_mtime_ns, status.st_size


class RunIndex:
    """The runs to show: run folders, and all runs inside folders of runs."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots
        self.runs: dict[str, RunReader] = {}
        """Runs by name. Replaced rather than modified, because other threads may be reading it."""
        self._refresh_lock = threading.Lock()

    @classmethod
    def of(cls, paths: Sequence[str | Path], *, must_exist: bool = True) -> RunIndex:
        for path in paths:
            if must_exist and not Path(path).is_dir():
                raise ConfigError(f"there is no folder {path}: give a run, or a folder of runs")
        index = cls([Path(path) for path in paths])
        index.refresh()
        return index

    def refresh(self) -> dict[str, RunReader]:
        """Add new runs and drop removed ones."""
        with self._refresh_lock:
            present = dict.fromkeys(path for root in self.roots for path in run_folders(root))
            runs = {name: run for name, run in self.runs.items() if run.folder.path in present}
            known = {run.folder.path: name for name, run in runs.items()}
            for path in present:
                if path not in known:
                    known[path] = free_name(path.resolve().name, runs)
                    runs[known[path]] = RunReader(RunFolder(path))
            # In the order of `run_folders`, the newest first.
            self.runs = {known[path]: runs[known[path]] for path in present}
            return self.runs


def free_name(name: str, taken: Container[str]) -> str:
    """Return the name, with a number appended if it is taken."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}-{number}"
    return free


def run_folders(root: Path) -> list[Path]:
    """Return the folder itself if it is a run, otherwise the runs in it, the newest first.

    The age of a run is that of its settings, which are written when it starts or resumes.
    """
    if is_run(root):
        return [root]
    try:
        paths = [path for path in root.iterdir() if is_run(path) and not path.is_symlink()]
    except OSError:
        return []
    return sorted(paths, key=lambda path: stamp(path / SETTINGS), reverse=True)


Row = dict[str, Any]
LARGEST_STEP = 10**15
"""Upper bound of a step; a line with a larger one is damaged and would overflow arrays."""


class MetricsTail:
    """Incremental reader of a metrics file: each call reads only the new lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[Row] = []
        self._read = 0
        self._file: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def rows(self) -> list[Row]:
        """Return all complete lines; a file that was replaced or truncated is read from the start."""
        with self._lock:
            try:
                with self.path.open("rb") as file:
                    self._catch_up(file)
            except OSError:  # missing, or not a file
                self._rows, self._read, self._file = [], 0, None
            return list(self._rows)

    def _catch_up(self, file: Any) -> None:
        status = self.path.stat()
        identity = (status.st_dev, status.st_ino)
        if identity != self._file or status.st_size < self._read:
            self._rows, self._read, self._file = [], 0, identity
        file.seek(self._read)
        new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._read += len(complete)
        for line in complete.splitlines():
            try:
                row = json.loads(line)
                step = row["step"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # truncated by a crash; the trainer removes it when it resumes
            if type(step) is int and abs(step) < LARGEST_STEP:
                self._rows.append(row)


def as_columns(rows: Sequence[Row]) -> dict[str, Any]:
    """Return rows as {"step": […], "values": {name: […]}}, with None for missing values."""
    names = sorted({name for row in rows for name in row} - {"step"})
    return {
        "step": [row["step"] for row in rows],
        "values": {name: [row.get(name) for row in rows] for name in names},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvaluation:
    """A stored evaluation of a run: each score with its 95 % interval."""

    step: int
    name: str
    scores: dict[str, tuple[float, float, float]]
    """(mean, low, high) by name: greedy, avg@8, pass@8."""
    prompts: int
    reward: tuple[float, float, float] | None = None
    """(mean, low, high) of the held-out reward, if it is not the accuracy."""
    changes: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """(mean, low, high) of the change since before training, paired by prompt, by score name."""


class EvaluationFiles:
    """Reader of a run's evaluations before, during and after training; each file is read once."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._read: dict[Path, tuple[int, StoredEvaluation | None]] = {}

    def read(self) -> list[StoredEvaluation]:
        """Return the evaluations in order of steps."""
        stored = [one for path in self._own() if (one := self._one(path)) is not None]
        by_step = {one.step: one for one in stored}
        return [by_step[step] for step in sorted(by_step)]

    def _own(self) -> list[Path]:
        """Return the files that training wrote; `groupwise eval` writes others to the same folder."""
        paths = sorted(self.folder.evaluations.glob("*.json"))
        return [path for path in paths if path.stem in ("before", "after") or step_of(path.stem) is not None]

    def _one(self, path: Path) -> StoredEvaluation | None:
        try:
            modified = path.stat().st_mtime_ns
            if path not in self._read or self._read[path][0] != modified:
                self._read[path] = modified, read_measured(path)
        except OSError:
            return None  # removed in the meantime
        return self._read[path][1]


def evaluations(folder: RunFolder) -> list[StoredEvaluation]:
    return EvaluationFiles(folder).read()


def read_measured(path: Path) -> StoredEvaluation | None:
    """Read one evaluation; return None if the file is not one."""
    try:
        return as_measured(path.stem, json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def as_measured(name: str, record: dict[str, Any]) -> StoredEvaluation:
    scores = {}
    for key in record:
        label = key.removeprefix("eval/")
        if key.startswith("eval/") and f"{key}_low" in record:
            scores[label] = (record[key], record[f"{key}_low"], record[f"{key}_high"])
    reward = scores.pop("reward", None)
    changes = {
        label: (change["mean"], change["low"], change["high"])
        for label, change in record.get("change", {}).items()
        if label in scores
    }
    return StoredEvaluation(
        step=int(record["step"]),
        name=name,
        scores=scores,
        reward=reward,
        prompts=len(record["examples"]),
        changes=changes,
    )


MOST_STEPS = 100
"""Maximum number of steps in one plot; longer runs are subsampled evenly."""
FEW_VALUES = 12
"""Up to this number of distinct rewards, each value is its own bin."""
BINS = 24
QUARTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def distribution(view: RolloutView, *, first: int | None = None, last: int | None = None) -> dict[str, Any]:
    """Return how often each reward occurs in each step, and quantiles.

    {"steps": [1, 2], "bins": [[0.0, 0.0], [1.0, 1.0]], "counts": [[3, 5], [8, 0]], …}: in step 1, three
    rollouts got reward 0 and eight got reward 1. `counts` has one row per bin.
    """
    inside = [
        step for step in view.steps() if (first is None or step >= first) and (last is None or step <= last)
    ]
    steps, rewards = [], []
    for step in spread(inside, MOST_STEPS):
        try:
            values = view.rewards(step)
        except OSError:
            continue  # removed when the run resumed from an earlier step
        if len(values):
            steps.append(step)
            rewards.append(values)
    bins = bins_of(rewards)
    return {
        "steps": steps,
        "of": len(inside),
        "bins": bins,
        "counts": count(rewards, bins),
        "mean": [float(values.mean()) for values in rewards],
        "quantiles": {
            f"{share:g}": [float(np.quantile(values, share)) for values in rewards] for share in QUARTILES
        },
    }


def spread(steps: Sequence[int], most: int) -> list[int]:
    """Return at most `most` evenly spread steps, including the first and the last."""
    if len(steps) <= most:
        return list(steps)
    indices = np.linspace(0, len(steps) - 1, most).round().astype(int)
    return [steps[index] for index in indices]


def bins_of(rewards: Sequence[NDArray[np.float64]]) -> list[list[float]]:
    """Return the bins from low to high as (low, high); a single value has equal ends."""
    if not rewards:
        return []
    values = np.unique(np.concatenate([np.unique(step.round(6)) for step in rewards]))
    if len(values) <= FEW_VALUES:
        return [[float(value), float(value)] for value in values]
    edges = np.linspace(values[0], values[-1], BINS + 1)
    return [[float(low), float(high)] for low, high in itertools.pairwise(edges)]


def count(rewards: Sequence[NDArray[np.float64]], bins: Sequence[Sequence[float]]) -> list[list[int]]:
    """Return the number of rewards per bin (rows) and step (columns)."""
    if not bins:
        return []
    # A reward belongs to the last bin that starts at or below it; allow for rounding.
    starts = np.array([low for low, _ in bins]) - 1e-6
    columns = [
        np.bincount(np.searchsorted(starts, values, side="right") - 1, minlength=len(bins))
        for values in rewards
    ]
    table: list[list[int]] = np.stack(columns, axis=1).tolist()
    return table


def as_json(value: Any) -> str:
    """Return a value as JSON in one line; NaN and infinity become null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(without_nan(value), ensure_ascii=False, separators=(",", ":"))


def without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [without_nan(inner) for inner in value]
    return value
