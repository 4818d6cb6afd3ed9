"""A run's numbers over its steps: metrics.jsonl as it grows, and the evaluations beside it."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.tracking.run_folder import RunFolder, step_of

Row = dict[str, Any]


class MetricsTail:
    """The lines of a metrics file, of which each look reads only what is new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[Row] = []
        self._read = 0
        self._file: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def rows(self) -> list[Row]:
        """Return every complete line; a file that was replaced or cut is read anew."""
        with self._lock:
            try:
                with self.path.open("rb") as file:
                    self._catch_up(file)
            except FileNotFoundError:
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
            except (ValueError, KeyError, TypeError):
                continue  # a line that a crash cut; the trainer removes it when it resumes
            if isinstance(step, int):
                self._rows.append(row)


def as_columns(rows: Sequence[Row]) -> dict[str, Any]:
    """Return rows as {"step": […], "values": {name: […]}}, None where a step lacks a metric."""
    names = sorted({name for row in rows for name in row} - {"step"})
    return {
        "step": [row["step"] for row in rows],
        "values": {name: [row.get(name) for row in rows] for name in names},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One evaluation of the run: each score with its 95 % interval."""

    step: int
    name: str
    scores: dict[str, tuple[float, float, float]]
    """Mean, low, high; by name: greedy, avg@8, pass@8."""
    prompts: int


def evaluations(folder: RunFolder) -> list[Measured]:
    """Return what the run measured of itself before, during and after, in the order of steps."""
    found: dict[int, Measured] = {}
    for path in sorted(folder.evaluations.glob("*.json")):
        if path.stem not in ("before", "after") and step_of(path.stem) is None:
            continue  # measured later by `groupwise eval`
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            measured = as_measured(path.stem, record)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # being written, or not ours
        found[measured.step] = measured
    return [found[step] for step in sorted(found)]


def as_measured(name: str, record: dict[str, Any]) -> Measured:
    scores = {}
    for key in record:
        label = key.removeprefix("eval/")
        if key.startswith("eval/") and f"{key}_low" in record:
            scores[label] = (record[key], record[f"{key}_low"], record[f"{key}_high"])
    return Measured(step=int(record["step"]), name=name, scores=scores, prompts=len(record["examples"]))
