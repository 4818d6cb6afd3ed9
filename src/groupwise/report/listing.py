"""`groupwise runs` and `runs prune`: what lies in the folder of runs, and making room in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from groupwise.errors import ConfigError
from groupwise.report.catalogue import SeenRun, run_folders
from groupwise.tracking.run_folder import RunFolder, owner, step_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One line of the list."""

    name: str
    state: str
    steps: str
    best: str
    """The best held-out accuracy that the run measured, and where."""
    size: int
    started: datetime


def listed(folder: Path) -> list[Listed]:
    """Return every run in a folder, the newest first."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    return [as_listed(SeenRun(RunFolder(path))) for path in run_folders(folder)]


def as_listed(run: SeenRun) -> Listed:
    found = run.glance()
    return Listed(
        name=run.folder.name,
        state=found["state"],
        steps=f"{found['step']}/{found['max_steps'] or '?'}",
        best=best(run),
        size=size(run.folder.path),
        started=datetime.fromtimestamp(run.folder.config.stat().st_mtime),
    )


def best(run: SeenRun) -> str:
    """Return the best sampled accuracy, or greedy where nothing was sampled."""
    measured = run.measured()
    names = [name for one in measured for name in one.scores if name.startswith("avg@")] or ["greedy"]
    scored = [(one.scores[names[0]][0], one.step) for one in measured if names[0] in one.scores]
    if not scored:
        return "–"
    value, step = max(scored)
    return f"{100 * value:.1f} % {names[0]} at {step}"


def size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() or path.is_symlink())


def list_lines(runs: Sequence[Listed]) -> Iterator[str]:
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
class Pruned:
    """Something to remove."""

    path: Path
    why: str
    size: int


def to_prune(folder: Path, *, keep: int | None, rollouts: bool) -> list[Pruned]:
    """Return what can go: runs without a step; of others, all but the last `keep`, or only their rollouts.

    A run in which somebody trains is never touched.
    """
    found: list[Pruned] = []
    kept = 0
    for path in run_folders(folder):
        run = SeenRun(RunFolder(path))
        # Settings alone are no run: other programs have a config.yaml too, beside what nobody wants to lose.
        ours = (run.folder.path / ".lock", run.folder.log, run.folder.metrics)
        if path == folder or not any(file.exists() for file in ours) or owner(run.folder) is not None:
            continue
        if not run.tail.rows() and not any(run.folder.checkpoints.glob("step-*")):
            found.append(Pruned(path=path, why="no step was made", size=size(path)))
            continue
        kept += 1
        if keep is not None and kept > keep:
            if rollouts:
                found += step_files(run.folder)
            else:
                found.append(Pruned(path=path, why=f"older than the last {keep}", size=size(path)))
    return found


def step_files(run: RunFolder) -> Iterator[Pruned]:
    """Yield a run's folders of rollouts: the largest part that no resumed run needs."""
    for folder in (run.rollouts, run.updates):
        if folder.is_dir() and all(step_of(path.name) is not None for path in folder.iterdir()):
            yield Pruned(path=folder, why="rollouts of an older run", size=size(folder))


def remove(found: Sequence[Pruned]) -> None:
    for one in found:
        shutil.rmtree(one.path)
