"""The results of a search: the table of members, the plots, the best member and the final summary."""

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
    "optim.learning_rate": "lr",
    "optim.max_grad_norm": "grad norm",
    "rollout.group_size": "group",
    "rollout.temperature": "temperature",
    "algo.entropy_bonus": "entropy",
}


def short(name: str) -> str:
    return SHORT.get(name, name.partition(".")[2])


def value_text(value: float) -> str:
    return f"{value:.2g}" if value < 1e-2 else f"{value:.3g}"


def table(state: SearchState, rewards: Mapping[int, float]) -> str:
    """Return one line per member, with the best marked; `rewards` are those of the last step, by slot."""
    names = list(state.people[0].values) if state.people else []
    header = ["member", "parent", "born", *map(short, names), "reward", "accuracy"]
    rows = [header, *(row_of(record, names, rewards, best=state.best) for record in state.people)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([f"step {state.step} · {state.tokens:,} tokens", *lines])


def row_of(
    record: MemberRecord, names: list[str], rewards: Mapping[int, float], *, best: MemberRecord | None
) -> list[str]:
    mark = "*" if best is not None and best.name == record.name else ""
    fitness = record.trouble or ("" if record.fitness is None else str(record.fitness))
    reward = number(rewards[record.place]) if record.place in rewards else ""
    return [
        f"{mark}{record.name}",
        "base" if record.parent is None else str(record.parent),
        str(record.born),
        *(value_text(record.values[name]) for name in names),
        reward,
        fitness,
    ]


FAR = 10
"""Values with a larger ratio than this are plotted on a logarithmic axis."""


def write_plots(folder: RunFolder, state: SearchState) -> None:
    """Write both plots, or nothing if no member has been evaluated."""
    if not state.snapshots:
        return
    write_atomically(folder.plots / "lineage.png", lineage(state))
    write_atomically(folder.plots / "values.png", values(state))


def lineage(state: SearchState) -> bytes:
    """Plot the accuracy of every member over time; a dotted line connects it to its parent."""
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    seen: dict[int, list[tuple[int, float]]] = defaultdict(list)
    parents: dict[int, int | None] = {}
    for snapshot in state.snapshots:
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
    tidy(axes, "accuracy on the selection prompts, %")
    return as_png(figure)


def values(state: SearchState) -> bytes:
    """Plot every setting in its own panel: its value in each slot over time."""
    names = list(state.snapshots[0].members[0]["values"])
    figure = new_figure(7, 1.8 * len(names) + 0.6)
    for index, name in enumerate(names):
        axes = figure.add_subplot(len(names), 1, index + 1)
        series: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for snapshot in state.snapshots:
            for member in snapshot.members:
                series[member["place"]].append((snapshot.step, member["values"][name]))
        for slot, points in sorted(series.items()):
            # A snapshot describes the steps before it.
            steps, heights = zip((0, points[0][1]), *points, strict=True)
            axes.step(steps, heights, where="pre", color=COLOURS[slot % len(COLOURS)], linewidth=1.6)
        seen = [value for points in series.values() for _, value in points]
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
    """Save the best member atomically: write it to a temporary folder, then rename."""
    final = folder.elite
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    # With this prefix, the next checkpoint removes what a killed process left.
    temporary, old = (
        folder.checkpoints / f".step-000000.tmp-{what}-{os.getpid()}" for what in ("new", "old")
    )
    member.save(temporary)
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def stats_of(state: SearchState, *, before: Evaluation | None, after: Evaluation | None) -> dict[str, object]:
    """Return the content of training_stats.json."""
    best = state.best
    return {
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 3),
        "best": None if best is None else described(best),
        "before": before.metrics() if before else None,
        "after": after.metrics() if after else None,
    }


def file_of(config: Config) -> tuple[str, ...]:
    """Return the option that names the task's file, if the task was defined in Python."""
    return ("--task", "FILE.py") if made_in_python(config) else ()


def summary_of(
    config: Config,
    state: SearchState,
    *,
    folder: RunFolder,
    before: Evaluation | None,
    after: Evaluation | None,
) -> RunSummary:
    """Return the summary that the terminal shows at the end."""
    done = state.reached or state.step >= config.run.max_steps
    best = state.best
    best_text = "" if best is None else f"; the best member is {best.name}"
    commands = [
        (command("eval", folder.elite, *file_of(config)), "evaluates the best member"),
        (command("chat", folder.elite), "chats with it"),
    ]
    resume = command("evolve", "--resume", folder.path)
    if made_in_python(config):
        resume = f"groupwise.evolve(task, resume={str(folder.path)!r})"
    if not state.step:
        commands = [(resume, "starts again")]
    elif not done:
        commands.insert(0, (resume, "resumes the search"))
    return RunSummary(
        headline=f"{headline(state.step, done=done)}{best_text}",
        seconds=state.seconds,
        folder=folder.path,
        before=before.intervals() if before else {},
        after=after.intervals() if after else {},
        next_commands=tuple(commands),
    )
