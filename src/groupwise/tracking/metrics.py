"""metrics.jsonl: one line a step, readable while the run goes on and after it crashed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError
from groupwise.tracking.files import sync, write_atomically


@dataclass(frozen=True, slots=True)
class MetricsFile:
    """The metrics of one run.

    Example: append(3, {"reward/mean": 0.5, "policy/kl": nan}) writes
        {"step": 3, "reward/mean": 0.5, "policy/kl": null}
    """

    path: Path

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the line of one step; a value that is not finite becomes null and keeps its name.

        The line is on the disk when this returns: a checkpoint of the step must not outlive it.
        """
        new = not self.path.exists()
        line = json.dumps({"step": step, **{name: finite(value) for name, value in metrics.items()}})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync(self.path.parent)

    def truncate_after(self, step: int) -> list[int]:
        """Forget what came after `step`, and the half line of a crash: a resumed run writes it again.

        Returns the steps up to `step` that have no line: they were lost, and no one writes them again.
        """
        lines = complete_lines(self.path) if self.path.exists() else []
        kept = [(line, row["step"]) for line, row in lines if row["step"] <= step]
        if self.path.exists():
            write_atomically(self.path, "".join(f"{line}\n" for line, _ in kept))
        return sorted(set(range(1, step + 1)) - {number for _, number in kept})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every complete line of a metrics file."""
    return [row for _, row in complete_lines(path)]


def last_step(path: Path) -> int:
    """The last step with a complete line; 0 where there is none."""
    rows = read_metrics(path) if path.is_file() else []
    return max((int(row["step"]) for row in rows), default=0)


def complete_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Each line as written and as read; a last line that a crash cut short is left out."""
    lines = path.read_bytes().decode(errors="replace").split("\n")
    if lines[-1] == "":
        lines.pop()
    rows: list[tuple[str, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["step"]
        except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
            if number == len(lines):
                break
            raise ConfigError(f"line {number} of {path} is damaged: remove that line") from error
        rows.append((line, row))
    return rows


def as_ranges(steps: Sequence[int]) -> str:
    """Write steps in few words: [3, 4, 5, 9] -> "3 – 5, 9"."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return ", ".join(str(first) if first == last else f"{first} – {last}" for first, last in ranges)


def finite(value: float) -> float | None:
    """The number as JSON can hold it."""
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None
