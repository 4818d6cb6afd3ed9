"""lineage.png and values.png: who came from whom, and what became of each setting."""

from __future__ import annotations

from collections import defaultdict
from io import BytesIO
from typing import Any

from groupwise.population.story import Story
from groupwise.population.table import short
from groupwise.report.plots import COLOURS, INK, MUTED
from groupwise.tracking.files import write_atomically
from groupwise.tracking.run_folder import RunFolder

FAR = 10
"""Values further apart than this, as a ratio, are drawn by their logarithm."""


def write_plots(folder: RunFolder, story: Story) -> None:
    """Write both pictures; nothing where nobody was measured."""
    if not story.snapshots:
        return
    write_atomically(folder.plots / "lineage.png", lineage(story))
    write_atomically(folder.plots / "values.png", values(story))


def lineage(story: Story) -> bytes:
    """A line for every member from its birth on, at its accuracy; a dashed one from its parent."""
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    seen: dict[int, list[tuple[int, float]]] = defaultdict(list)
    parents: dict[int, int | None] = {}
    for snapshot in story.snapshots:
        for member in snapshot.members:
            parents[member["name"]] = member["parent"]
            if member["fitness"] is not None and member["measured"] == snapshot.step:
                seen[member["name"]].append((snapshot.step, 100 * member["fitness"][0]))
    for name, points in sorted(seen.items()):
        colour = COLOURS[name % len(COLOURS)]
        steps, heights = zip(*points, strict=True)
        axes.plot(steps, heights, color=colour, marker="o", ms=4, linewidth=1.6)
        axes.annotate(str(name), points[-1], xytext=(4, 2), textcoords="offset points", color=colour, size=8)
        earlier = [p for p in seen.get(parents[name] or 0, ()) if p[0] < points[0][0]]
        if parents[name] is not None and earlier:
            (x, y), (to_x, to_y) = earlier[-1], points[0]
            axes.plot([x, to_x], [y, to_y], color=colour, linestyle=":", linewidth=1.2)
    tidy(axes, "accuracy on the prompts of selection, %")
    return as_png(figure)


def values(story: Story) -> bytes:
    """A panel for every setting: its value in each place over time."""
    names = list(story.snapshots[0].members[0]["values"])
    figure = new_figure(7, 1.8 * len(names) + 0.6)
    for index, name in enumerate(names):
        axes = figure.add_subplot(len(names), 1, index + 1)
        courses: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for snapshot in story.snapshots:
            for member in snapshot.members:
                courses[member["place"]].append((snapshot.step, member["values"][name]))
        for place, points in sorted(courses.items()):
            # A measurement is of the steps before it.
            steps, heights = zip((0, points[0][1]), *points, strict=True)
            axes.step(steps, heights, where="pre", color=COLOURS[place % len(COLOURS)], linewidth=1.6)
        seen = [value for points in courses.values() for _, value in points]
        if min(seen) > 0 and max(seen) > FAR * min(seen):
            axes.set_yscale("log")
        tidy(axes, short(name), last=index == len(names) - 1)
    return as_png(figure)


def new_figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def tidy(axes: Any, title: str, *, last: bool = True) -> None:
    axes.set_title(title, loc="left", size=9, color=INK)
    axes.tick_params(which="both", labelsize=8, colors=MUTED)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if last:
        axes.set_xlabel("step", size=8, color=MUTED)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def as_png(figure: Any) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()
