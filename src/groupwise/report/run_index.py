"""Find the run folders to show, and read one run: its state, metrics, alarms and settings."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from groupwise.config import Config, read_config
from groupwise.errors import ConfigError
from groupwise.report.alarms import ALARM_RULES, alarms
from groupwise.report.history import EvaluationFiles, MetricsTail, as_columns
from groupwise.report.rollout_view import RolloutView
from groupwise.tracking.run_folder import EVOLUTION, SETTINGS, RunFolder, is_run, owner

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
