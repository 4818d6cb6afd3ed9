"""`groupwise compare`: what two runs measured, side by side, and in which settings they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.config import differences
from groupwise.evaluate.held_out import Evaluation
from groupwise.evaluate.held_out import compare as paired
from groupwise.evaluate.saved import read_evaluation
from groupwise.evaluate.statistics import Difference
from groupwise.report.catalogue import SeenRun
from groupwise.tracking.notation import duration, number
from groupwise.tracking.run_folder import RunFolder

LAST = 5
"""Steps at the end over which a metric is averaged."""
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
"""Settings that change nothing that is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two."""

    run: SeenRun
    last: Evaluation | None
    """The newest evaluation on all held-out examples: after training, else before."""
    metrics: dict[str, float]


def compare_lines(paths: Sequence[str | Path]) -> Iterator[str]:
    """Yield the comparison, line by line: the second run against the first."""
    a, b = (side(path) for path in paths)
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


def side(path: str | Path) -> Side:
    folder = RunFolder.open(path)
    run = SeenRun(folder)
    last = read_evaluation(folder, "after") or read_evaluation(folder, "before")
    return Side(run=run, last=last, metrics=means(run.tail.rows()[-LAST:]))


def means(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return each metric's mean over the rows that have it."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float):
                found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def state(one: Side) -> str:
    rows = one.run.tail.rows()
    seconds = one.run.stats().get("seconds")
    time = f", {duration(seconds)}" if isinstance(seconds, int | float) else ""
    return f"{one.run.state()}, step {rows[-1]['step'] if rows else 0}{time}"


def accuracy(a: Side, b: Side, width: int) -> Iterator[str]:
    """Yield each score of both, and their difference on the examples that both answered."""
    if a.last is None or b.last is None:
        yield "  not measured in " + " and ".join(one.run.folder.name for one in (a, b) if one.last is None)
        return
    left, right = a.last.intervals(), b.last.intervals()
    changes = paired(a.last, b.last)
    for name in dict.fromkeys((*left, *right)):
        cells = "".join(f"{side.get(name, '–')!s:<{width}}" for side in (left, right))
        yield f"  {name:<10}{cells}{told(changes[name]) if name in changes else ''}".rstrip()
    if not changes:
        yield "  the runs share no held-out examples, so they cannot be paired"
        return
    both = len(set(a.last.examples) & set(b.last.examples))
    counts = [len(one.examples) for one in (a.last, b.last)]
    if counts != [both, both]:
        yield f"  paired on the {both} questions that both answered (of {counts[0]} and {counts[1]})"


def told(difference: Difference) -> str:
    """Say a paired difference with what it rests on."""
    counts = f"{difference.improved} better, {difference.worsened} worse"
    return f"{difference}, {counts}, p = {difference.p_value:.2g}"


def change(before: float | None, after: float | None) -> str:
    """Say a change in percent or, where a value is not positive and has no percent, in the metric's unit."""
    if before is None or after is None:
        return ""
    if before <= 0 or after < 0:
        return f"{'+' if after > before else ''}{number(after - before)}"
    return f"{100 * (after - before) / abs(before):+.1f} %"


def settings(a: Side, b: Side) -> list[str]:
    if a.run.config is None or b.run.config is None:
        return ["  the settings of one run cannot be read"]
    changed = differences(a.run.config, b.run.config)
    return [f"  {line}" for line in changed if not line.startswith(QUIET)]
