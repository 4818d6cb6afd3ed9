"""The population as a table of text: who, since when, from whom, with which values, how fit."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Mapping
from io import BytesIO
from typing import Any

from groupwise.config import Config
from groupwise.evaluate.held_out import Evaluation
from groupwise.evolution.evolve_state import MemberRecord, SearchState, described
from groupwise.evolution.population import Member
from groupwise.files import write_atomically
from groupwise.report.static_report import COLOURS, INK, MUTED
from groupwise.tracking.number_format import number
from groupwise.tracking.run_folder import RunFolder
from groupwise.tracking.terminal import RunSummary, command, headline
from groupwise.training.run_summary import made_in_python

SHORT = {
    "optim.learning_rate": "rate",
    "optim.max_grad_norm": "grad norm",
    "rollout.group_size": "group",
    "rollout.temperature": "temp.",
    "algo.entropy_bonus": "entropy",
}


def short(name: str) -> str:
    return SHORT.get(name, name.partition(".")[2])


def value_text(value: float) -> str:
    return f"{value:.2g}" if value < 1e-2 else f"{value:.3g}"


def table(story: SearchState, rewards: Mapping[int, float]) -> str:
    """One line a member, the fittest marked; `rewards` are the last step's, by place."""
    names = list(story.people[0].values) if story.people else []
    header = ["member", "from", "since", *map(short, names), "reward", "accuracy"]
    rows = [header, *(row_of(person, names, rewards, best=story.best) for person in story.people)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([f"step {story.step} · {story.tokens:,} tokens", *lines])


def row_of(
    person: MemberRecord, names: list[str], rewards: Mapping[int, float], *, best: MemberRecord | None
) -> list[str]:
    mark = "*" if best is not None and best.name == person.name else ""
    fitness = person.trouble or ("" if person.fitness is None else str(person.fitness))
    reward = number(rewards[person.place]) if person.place in rewards else ""
    return [
        f"{mark}{person.name}",
        "base" if person.parent is None else str(person.parent),
        str(person.born),
        *(value_text(person.values[name]) for name in names),
        reward,
        fitness,
    ]


FAR = 10
"""Values further apart than this, as a ratio, are drawn by their logarithm."""


def write_plots(folder: RunFolder, story: SearchState) -> None:
    """Write both pictures; nothing where nobody was measured."""
    if not story.snapshots:
        return
    write_atomically(folder.plots / "lineage.png", lineage(story))
    write_atomically(folder.plots / "values.png", values(story))


def lineage(story: SearchState) -> bytes:
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


def values(story: SearchState) -> bytes:
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


def write_elite(folder: RunFolder, member: Member) -> None:
    """Write the best member whole, then give it its name: there is never half of one."""
    final = folder.elite
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    # Under a name by which the next checkpoint clears away what a killed process left.
    temporary, old = (
        folder.checkpoints / f".step-000000.tmp-{what}-{os.getpid()}" for what in ("new", "old")
    )
    member.save(temporary)
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def stats_of(story: SearchState, *, before: Evaluation | None, after: Evaluation | None) -> dict[str, object]:
    """Return what training_stats.json holds."""
    best = story.best
    return {
        "steps": story.step,
        "tokens": story.tokens,
        "seconds": round(story.seconds, 3),
        "best": None if best is None else described(best),
        "before": before.metrics() if before else None,
        "after": after.metrics() if after else None,
    }


def file_of(config: Config) -> tuple[str, ...]:
    """A task that lives in the caller's program is found by the file that defines it."""
    return ("--task", "FILE.py") if made_in_python(config) else ()


def summary_of(
    config: Config,
    story: SearchState,
    *,
    folder: RunFolder,
    before: Evaluation | None,
    after: Evaluation | None,
) -> RunSummary:
    """Return what the terminal shows last."""
    done = story.reached or story.step >= config.run.max_steps
    best = story.best
    who = "" if best is None else f"; the best is member {best.name}"
    commands = [
        (command("eval", folder.elite, *file_of(config)), "measures the best member again"),
        (command("chat", folder.elite), "talks to it"),
    ]
    resume = command("evolve", "--resume", folder.path)
    if made_in_python(config):
        resume = f"groupwise.evolve(task, resume={str(folder.path)!r})"
    if not story.step:
        commands = [(resume, "begins again")]
    elif not done:
        commands.insert(0, (resume, "goes on from here"))
    return RunSummary(
        headline=f"{headline(story.step, done=done)}{who}",
        seconds=story.seconds,
        folder=folder.path,
        before=before.intervals() if before else {},
        after=after.intervals() if after else {},
        next_commands=tuple(commands),
    )
