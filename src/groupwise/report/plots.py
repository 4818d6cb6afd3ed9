"""rewards.png and reward_distribution.png: a run's story as two pictures for papers and messages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np

from groupwise.errors import ConfigError
from groupwise.report.catalogue import SeenRun
from groupwise.report.distribution import distribution
from groupwise.report.history import Measured, Row
from groupwise.tracking.files import write_atomically

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b0578d", "#8a6d00", "#3b9dd6", "#5a646c")
"""Okabe and Ito's, told apart by every kind of sight."""
INK, MUTED, GRID = "#1c2226", "#5a646c", "#e4e5e1"
SMOOTHING = 0.8
"""Of the line over the points, from this many steps on."""
MANY = 60


def write_plots(run: SeenRun) -> None:
    """Write both pictures into the run's folder of plots."""
    rows = run.tail.rows()
    if rows:
        write_atomically(run.folder.plots / "rewards.png", rewards(run.title, rows, run.measured()))
    found = distribution(run.slices)
    if found["steps"]:
        write_atomically(run.folder.plots / "reward_distribution.png", distributed(run.title, found))


def rewards(title: str, rows: Sequence[Row], measured: Sequence[Measured]) -> bytes:
    """Draw reward and its parts, and held-out accuracy with its intervals beside them."""
    figure, (left, right) = new_figure(title, columns=2)
    steps = [row["step"] for row in rows]
    names = [name for name in rows[-1] if name.startswith("reward/") and name.endswith("/mean")]
    for index, name in enumerate(names):
        values = np.array([np.nan if row.get(name) is None else row[name] for row in rows], dtype=float)
        colour = COLOURS[index % len(COLOURS)]
        label = "total" if name == "reward/mean" else name.removeprefix("reward/").removesuffix("/mean")
        if len(steps) > MANY:
            left.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
            values = smooth(values, SMOOTHING)
        left.plot(steps, values, color=colour, label=label, linewidth=1.8)
    finish(left, "reward", legend=len(names) > 1)
    for index, name in enumerate(measured[0].scores if measured else ()):
        having = [one for one in measured if name in one.scores]
        mean, low, high = (np.array([100 * one.scores[name][i] for one in having]) for i in range(3))
        colour = COLOURS[index % len(COLOURS)]
        right.fill_between([one.step for one in having], low, high, color=colour, alpha=0.15, linewidth=0)
        right.plot(
            [one.step for one in having], mean, color=colour, label=name, linewidth=1.8, marker="o", ms=4
        )
    finish(right, "held-out accuracy, %, with 95 % intervals", legend=bool(measured))
    return as_png(figure)


def distributed(title: str, found: dict[str, Any]) -> bytes:
    """Draw how often each reward was given in each step; darker is more often."""
    figure, (axes,) = new_figure(title, columns=1)
    counts = np.array(found["counts"], dtype=float)
    shares = counts / np.maximum(counts.sum(axis=0, keepdims=True), 1)
    middles = [(low + high) / 2 for low, high in found["bins"]]
    steps = found["steps"]
    image = axes.pcolormesh(
        edges(steps), edges(middles), np.sqrt(shares), cmap="Blues", vmin=0, vmax=1.25, linewidth=0
    )
    axes.plot(steps, found["mean"], color=COLOURS[1], linewidth=1.8, label="mean")
    axes.plot(
        steps, found["quantiles"]["0.5"], color=INK, linewidth=1.2, linestyle=(0, (3, 2)), label="median"
    )
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    bar.set_ticks([0, 0.5, 0.7071, 1], labels=["0 %", "25 %", "50 %", "100 %"])
    bar.set_label("share of the step's answers", color=MUTED, fontsize=9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=MUTED, labelsize=8, length=0)
    bar.ax.set_ylim(0, 1)
    finish(axes, "reward", legend=False, grid=False)
    figure.legend(loc="upper right", ncols=2, frameon=False, fontsize=8, labelcolor=MUTED)
    return as_png(figure)


def edges(middles: Sequence[float]) -> list[float]:
    """Return the borders between neighbours, and one beyond either end."""
    if len(middles) == 1:
        return [middles[0] - 0.5, middles[0] + 0.5]
    between = [(a + b) / 2 for a, b in itertools.pairwise(middles)]
    return [2 * middles[0] - between[0], *between, 2 * middles[-1] - between[-1]]


def smooth(values: Any, weight: float) -> Any:
    """Return an exponential average that starts unbiased."""
    total = norm = 0.0
    smoothed = []
    for value in values:
        if not np.isnan(value):
            total = weight * total + (1 - weight) * value
            norm = weight * norm + (1 - weight)
        smoothed.append(total / norm if norm else np.nan)
    return np.array(smoothed)


def new_figure(title: str, *, columns: int) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install matplotlib") from error
    # Without pyplot: no window, no state shared with the user's own plots.
    figure = Figure(figsize=(5.4 * columns if columns > 1 else 8.0, 3.9), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, color=INK, fontsize=11, x=0.01, ha="left")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def finish(axes: Any, label: str, *, legend: bool, grid: bool = True) -> None:
    axes.set_title(label, color=MUTED, fontsize=9, loc="left")
    axes.set_xlabel("step", color=MUTED, fontsize=9)
    axes.tick_params(colors=MUTED, labelsize=8, length=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    for side in axes.spines.values():
        side.set_visible(False)
    if grid:
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    if legend:
        axes.legend(frameon=False, fontsize=8, labelcolor=MUTED)


def as_png(figure: Any) -> bytes:
    buffer = BytesIO()
    # Without the software's version: the same run gives the same bytes.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
