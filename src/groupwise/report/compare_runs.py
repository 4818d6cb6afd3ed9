"""Compare two runs (`groupwise compare`), list runs and prune them (`groupwise runs`)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from groupwise.config import differences
from groupwise.errors import ConfigError
from groupwise.evaluate.held_out import Evaluation, read_evaluation
from groupwise.evaluate.held_out import compare as paired
from groupwise.evaluate.intervals import Difference
from groupwise.report.run_reader import RunReader, run_folders
from groupwise.tracking.number_format import duration, number
from groupwise.tracking.run_folder import RunFolder, owner, step_of

LAST = 5
"""Number of final steps over which metrics are averaged."""
METRICS = (
    ("reward", "reward/mean"),
    ("length", "rollout/length"),
    ("truncated", "rollout/truncated"),
    ("entropy", "policy/entropy"),
    ("KL", "policy/kl"),
    ("no signal", "advantage/zero_variance"),
    ("gap", "policy/gap"),
    ("tokens/s", "speed/tokens_per_second"),
    ("s/step", "time/step"),
    ("peak GB", "memory/peak_gb"),
)
QUIET = ("run.name", "run.output_dir", "track.")
"""Settings that do not affect results; they are not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One of the two runs."""

    run: RunReader
    last: Evaluation | None
    """The latest evaluation on all held-out examples: after training, else before."""
    metrics: dict[str, float]


def compare_lines(paths: Sequence[str | Path]) -> Iterator[str]:
    """Yield the lines of the comparison of the second run with the first."""
    a, b = (read_side(path) for path in paths)
    names = [a.run.folder.name, b.run.folder.name]
    states = [state(one) for one in (a, b)]
    width = 2 + max(20, *map(len, names + states))
    yield f"{'':<12}{names[0]:<{width}}{names[1]:<{width}}difference".rstrip()
    yield f"{'state':<12}{states[0]:<{width}}{states[1]:<{width}}".rstrip()
    yield from ("", "held-out accuracy, with 95 % intervals")
    yield from accuracy(a, b, width)
    yield from ("", f"mean of the last {LAST} steps")
    for label, metric in METRICS:
        if metric in a.metrics or metric in b.metrics:
            values = [one.metrics.get(metric) for one in (a, b)]
            cells = "".join(f"{'–' if value is None else number(value):<{width}}" for value in values)
            yield f"  {label:<10}{cells}{change(*values)}".rstrip()
    yield from ("", "settings that differ")
    changed = settings(a, b)
    yield from changed or ["  none"]


def read_side(path: str | Path) -> ComparedRun:
    folder = RunFolder.open(path)
    run = RunReader(folder)
    last = read_evaluation(folder, "after") or read_evaluation(folder, "before")
    return ComparedRun(run=run, last=last, metrics=means(run.tail.rows()[-LAST:]))


def means(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of each metric over the rows that have it."""
    by_name: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float):
                by_name.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in by_name.items()}


def state(one: ComparedRun) -> str:
    rows = one.run.tail.rows()
    seconds = one.run.stats().get("seconds")
    time = f", {duration(seconds)}" if isinstance(seconds, int | float) else ""
    return f"{one.run.state()}, step {rows[-1]['step'] if rows else 0}{time}"


def accuracy(a: ComparedRun, b: ComparedRun, width: int) -> Iterator[str]:
    """Yield the scores of both runs, and their paired difference on the examples they share."""
    if a.last is None or b.last is None:
        yield "  not measured in " + " and ".join(one.run.folder.name for one in (a, b) if one.last is None)
        return
    left, right = a.last.intervals(), b.last.intervals()
    changes = paired(a.last, b.last)
    for name in dict.fromkeys((*left, *right)):
        cells = "".join(f"{scores.get(name, '–')!s:<{width}}" for scores in (left, right))
        yield f"  {name:<10}{cells}{difference_text(changes[name]) if name in changes else ''}".rstrip()
    if not changes:
        yield "  the runs share no held-out examples: no paired difference"
        return
    both = len(set(a.last.examples) & set(b.last.examples))
    counts = [len(one.examples) for one in (a.last, b.last)]
    if counts != [both, both]:
        yield f"  paired on the {both} examples that the runs share (of {counts[0]} and {counts[1]})"


def difference_text(difference: Difference) -> str:
    """Format a paired difference with its counts and p-value."""
    counts = f"{difference.improved} better, {difference.worsened} worse"
    return f"{difference}, {counts}, p = {difference.p_value:.2g}"


def change(before: float | None, after: float | None) -> str:
    """Format a change in percent, or as a plain difference if a value is not positive."""
    if before is None or after is None:
        return ""
    if before <= 0 or after < 0:
        return f"{'+' if after > before else ''}{number(after - before)}"
    return f"{100 * (after - before) / abs(before):+.1f} %"


def settings(a: ComparedRun, b: ComparedRun) -> list[str]:
    if a.run.config is None or b.run.config is None:
        return ["  the settings of one run cannot be read"]
    changed = differences(a.run.config, b.run.config)
    return [f"  {line}" for line in changed if not line.startswith(QUIET)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One line of the list of runs."""

    name: str
    state: str
    steps: str
    best: str
    """The best held-out accuracy of the run, and its step."""
    size: int
    started: datetime


def listed(folder: Path) -> list[RunRow]:
    """Return every run in a folder, the newest first."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    return [as_listed(RunReader(RunFolder(path))) for path in run_folders(folder)]


def as_listed(run: RunReader) -> RunRow:
    overview = run.glance()
    return RunRow(
        name=run.folder.name,
        state=overview["state"],
        steps=f"{overview['step']}/{overview['max_steps'] or '?'}",
        best=best(run),
        size=size(run.folder.path),
        started=datetime.fromtimestamp(run.folder.config.stat().st_mtime),
    )


def best(run: RunReader) -> str:
    """Return the best sampled accuracy, or the best greedy one if nothing was sampled."""
    measured = run.measured()
    names = [name for one in measured for name in one.scores if name.startswith("avg@")] or ["greedy"]
    scored = [(one.scores[names[0]][0], one.step) for one in measured if names[0] in one.scores]
    if not scored:
        return "–"
    value, step = max(scored)
    return f"{100 * value:.1f} % {names[0]} at {step}"


def size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() or path.is_symlink())


def list_lines(runs: Sequence[RunRow]) -> Iterator[str]:
    """Yield the list in columns."""
    table = [("run", "state", "steps", "best held-out", "size", "started")]
    table += [
        (run.name, run.state, run.steps, run.best, in_words(run.size), f"{run.started:%Y-%m-%d %H:%M}")
        for run in runs
    ]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def in_words(size: int) -> str:
    for unit, length in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= length:
            return f"{size / length:.1f} {unit}"
    return f"{size} B"


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneItem:
    """A folder to remove."""

    path: Path
    why: str
    size: int


def to_prune(folder: Path, *, keep: int | None, rollouts: bool) -> list[PruneItem]:
    """Return what to remove: runs without a step, and all runs but the last `keep`, or only their rollouts.

    Runs that are training are never removed.
    """
    items: list[PruneItem] = []
    runs_seen = 0
    for path in run_folders(folder):
        run = RunReader(RunFolder(path))
        # A config.yaml alone is not proof of a run: other programs write files of that name too.
        ours = (run.folder.path / ".lock", run.folder.log, run.folder.metrics)
        if path == folder or not any(file.exists() for file in ours) or owner(run.folder) is not None:
            continue
        if not run.tail.rows() and not any(run.folder.checkpoints.glob("step-*")):
            items.append(PruneItem(path=path, why="no step was completed", size=size(path)))
            continue
        runs_seen += 1
        if keep is not None and runs_seen > keep:
            if rollouts:
                items += step_files(run.folder)
            else:
                items.append(PruneItem(path=path, why=f"not among the last {keep} runs", size=size(path)))
    return items


def step_files(run: RunFolder) -> Iterator[PruneItem]:
    """Yield the folders of a run's rollouts: the largest part of a run, and not needed to resume it."""
    for folder in (run.rollouts, run.updates):
        if folder.is_dir() and all(step_of(path.name) is not None for path in folder.iterdir()):
            yield PruneItem(path=folder, why="rollouts of an older run", size=size(folder))


def remove(items: Sequence[PruneItem]) -> None:
    for one in items:
        shutil.rmtree(one.path)
