"""The files that a run writes: metrics.jsonl and completions as text; `rollout_files` has the others.

All of them can be read during the run and after a crash. `BackgroundWriter` writes files while training
continues.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError
from groupwise.files import sync, write_atomically
from groupwise.records import Group, Rollout
from groupwise.tracking.run_folder import step_of


@dataclass(frozen=True, slots=True)
class MetricsFile:
    """The metrics file of one run: one line of JSON per step.

    Example: append(3, {"reward/mean": 0.5, "policy/kl": nan}) writes
        {"step": 3, "reward/mean": 0.5, "policy/kl": null}
    """

    path: Path

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of one step. Values that are not finite become null.

        The line is synced to disk before this returns, so that no checkpoint exists without its metrics.
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
        """Remove the lines after `step`, which a resumed run writes again, and an incomplete last line.

        Of several lines of one step, the last stays. Returns the steps up to `step` that have no line. Their
        metrics are lost.
        """
        lines = complete_lines(self.path) if self.path.exists() else []
        remaining = {row["step"]: line for line, row in lines if row["step"] <= step}
        if self.path.exists():
            write_atomically(self.path, "".join(f"{line}\n" for line in remaining.values()))
        return sorted(set(range(1, step + 1)) - remaining.keys())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return every complete line of a metrics file."""
    return [row for _, row in complete_lines(path)]


def last_step(path: Path) -> int:
    """Return the last step with a complete line; 0 if there is none."""
    rows = read_metrics(path) if path.is_file() else []
    return max((int(row["step"]) for row in rows), default=0)


def complete_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return each line as text and parsed; an incomplete last line, as after a crash, is skipped."""
    lines = path.read_bytes().decode(errors="replace").split("\n")
    if lines[-1] == "":
        lines.pop()
    rows: list[tuple[str, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if type(row["step"]) is not int:
                raise TypeError("a step is a whole number")
        except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
            if number == len(lines):
                break
            raise ConfigError(f"line {number} of {path} is damaged; delete that line") from error
        rows.append((line, row))
    return rows


def as_ranges(steps: Sequence[int]) -> str:
    """Format steps as ranges: [3, 4, 5, 9] -> "3 – 5, 9"."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return ", ".join(str(first) if first == last else f"{first} – {last}" for first, last in ranges)


def finite(value: float) -> float | None:
    """Return the number, or None if it is not finite, which JSON cannot represent."""
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


def remove_steps_after(folder: Path, step: int) -> None:
    """Remove the files of later steps, which a resumed run writes again."""
    for path in folder.glob("step-*"):
        file_step = step_of(path.name)
        if file_step is not None and file_step > step:
            path.unlink()


RULE = "=" * 50


def write_completions(path: Path, groups: Sequence[Group], *, is_perfect: Callable[[Rollout], bool]) -> None:
    """Write prompt and completion of every perfect rollout. Without any, no file is written."""
    perfect = [rollout for group in groups for rollout in group.valid if is_perfect(rollout)]
    if perfect:
        write_atomically(path, "".join(f"{prompt_text(r)}\n{r.transcript}\n{RULE}\n" for r in perfect))


def prompt_text(rollout: Rollout) -> str:
    """Return the prompt as text, without the system message."""
    if isinstance(rollout.prompt, str):
        return f"Prompt {rollout.prompt}"
    contents = (message["content"] for message in rollout.prompt if message["role"] != "system")
    return f"Prompt {chr(10).join(map(str, contents))}"


MOST_WAITING = 2
"""Maximum pending writes: a slow disk slows the run down instead of filling memory."""


class BackgroundWriter:
    """Runs writes in order on a background thread. A failed write raises at the next call."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="groupwise-writer")
        self._waiting: deque[Future[None]] = deque()

    def submit(self, write: Callable[..., None], *values: Any, **named: Any) -> None:
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= MOST_WAITING):
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(write, *values, **named))

    def flush(self) -> None:
        """Wait until everything is written."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """Finish pending writes and stop the thread. Safe to call more than once."""
        try:
            self.flush()
        finally:
            self._thread.shutdown(wait=True)
