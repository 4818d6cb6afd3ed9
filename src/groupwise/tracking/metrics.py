"""metrics.jsonl: one line a step, readable while the run goes on and after it crashed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError
from groupwise.tracking.files import write_atomically


@dataclass(frozen=True, slots=True)
class MetricsFile:
    """The metrics of one run.

    Example: append(3, {"reward/mean": 0.5, "policy/kl": nan}) writes
        {"step": 3, "reward/mean": 0.5, "policy/kl": null}
    """

    path: Path

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the line of one step; a value that is not finite becomes null and keeps its name."""
        line = json.dumps({"step": step, **{name: finite(value) for name, value in metrics.items()}})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def truncate_after(self, step: int) -> None:
        """Forget what came after `step`, and the half line of a crash: a resumed run writes it again."""
        if self.path.exists():
            kept = [line for line, row in complete_lines(self.path) if row["step"] <= step]
            write_atomically(self.path, "".join(f"{line}\n" for line in kept))


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
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise ConfigError(f"line {number} of {path} is damaged: remove that line") from error
        rows.append((line, row))
    return rows


def finite(value: float) -> float | None:
    """The number as JSON can hold it."""
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None
