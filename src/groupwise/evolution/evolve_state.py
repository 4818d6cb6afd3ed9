"""The state of a search: members, events and progress; evolution.json; and how a search starts or resumes.

`SearchState` is what a checkpoint holds besides tensors. Field names are the keys of the files. The end of
the module writes the results: the table of members, the plots, the best member and the final summary.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from groupwise.config import Config, read_config
from groupwise.errors import CallbackError, ConfigError
from groupwise.evaluate.held_out import Evaluation
from groupwise.evaluate.intervals import Interval, mean_interval
from groupwise.evolution.population import Member
from groupwise.evolution.search_space import Values
from groupwise.files import write_atomically
from groupwise.learner.checkpoint import verify
from groupwise.report.model_card import CARD, CardSubject, model_card
from groupwise.report.static_report import COLOURS, INK, MUTED
from groupwise.tracking.number_format import number
from groupwise.tracking.run_folder import RunFolder
from groupwise.tracking.terminal import RunSummary, command, headline
from groupwise.training.prompt_selection import Rates
from groupwise.training.resume import last_checkpoint, refuse_edited_settings, refuse_other_settings, steps_in
from groupwise.training.run_end import made_in_python


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """A member of the population."""

    name: int
    """Unique number; never reused."""
    place: int
    """Slot in the population. A new member may take over the slot of another."""
    parent: int | None
    """Name of the member whose weights it copied; None: the base model."""
    born: int
    """Step after which it was created."""
    values: Values
    """Settings that it varies."""
    scores: tuple[float, ...] = ()
    """Accuracy on each selection prompt at the last evaluation."""
    measured: int = 0
    """Step of the last evaluation."""
    trouble: str | None = None
    """Why it is excluded; None if it is sound."""

    @property
    def fitness(self) -> Interval | None:
        return mean_interval(self.scores) if self.scores else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolutionEvent:
    """Something that happened to a member."""

    step: int
    name: int
    what: str
    """born, copied, changed, dropped, diverged."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulationSnapshot:
    """All members at one evaluation."""

    step: int
    tokens: int
    members: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    """The state of a search after a step.

    It has no random state: all randomness derives from the seed and the step.
    """

    step: int = 0
    cursor: int = 0
    rates: Rates = field(default_factory=dict)
    """Success rate of each kind of example over all members, for the curriculum."""
    tokens: int = 0
    """Tokens sampled so far by all members, in training and in evaluations."""
    names: int = 0
    """Number of member names assigned so far."""
    seconds: float = 0.0
    people: tuple[MemberRecord, ...] = ()
    """Current members. The slot of a dropped member is empty."""
    snapshots: tuple[PopulationSnapshot, ...] = ()
    events: tuple[EvolutionEvent, ...] = ()
    reached: bool = False
    """Whether the target or the token budget is reached, so that no step is left."""
    unselected: bool = False
    """Whether a selection was skipped because this was the last step. It runs if the search is extended."""
    data: str | None = None
    """Fingerprint of the examples; None in older checkpoints."""
    settings: Mapping[str, Any] | None = None
    """Settings by section; None in older checkpoints."""
    code: Mapping[str, str] | None = None
    """Fingerprints of the task's functions; None in older checkpoints."""

    def at(self, slot: int) -> MemberRecord:
        return next(record for record in self.people if record.place == slot)

    @property
    def best(self) -> MemberRecord | None:
        """The sound member with the highest accuracy; of equals, the one with the lower name."""
        sound = [record for record in self.people if record.trouble is None and record.scores]
        return min(sound, key=lambda p: (-sum(p.scores) / len(p.scores), p.name)) if sound else None

    def with_member(self, record: MemberRecord) -> SearchState:
        """Return the state with this record in its slot."""
        people = tuple(record if p.place == record.place else p for p in self.people)
        return replace(self, people=people)

    def with_event(self, name: int, what: str, detail: str) -> SearchState:
        event = EvolutionEvent(step=self.step, name=name, what=what, detail=detail)
        return replace(self, events=(*self.events, event))

    def snapshot(self) -> SearchState:
        """Return the state with a snapshot of all current members."""
        members = tuple(described(record) for record in self.people)
        current = PopulationSnapshot(step=self.step, tokens=self.tokens, members=members)
        earlier = tuple(s for s in self.snapshots if s.step != self.step)
        return replace(self, snapshots=(*earlier, current))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> SearchState:
        people = tuple(MemberRecord(**{**p, "scores": tuple(p["scores"])}) for p in content["people"])
        snapshots = tuple(
            PopulationSnapshot(**{**s, "members": tuple(s["members"])}) for s in content["snapshots"]
        )
        events = tuple(EvolutionEvent(**event) for event in content["events"])
        return cls(**{**content, "people": people, "snapshots": snapshots, "events": events})


def described(record: MemberRecord) -> dict[str, Any]:
    """Return a member as written to evolution.json."""
    fitness = record.fitness
    return {
        "name": record.name,
        "place": record.place,
        "parent": record.parent,
        "born": record.born,
        "values": dict(record.values),
        "fitness": None if fitness is None else [fitness.mean, fitness.low, fitness.high],
        "measured": record.measured,
        "trouble": record.trouble,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolutionLog:
    """The content of evolution.json: the whole search, for people and programs."""

    state: SearchState
    settings: Mapping[str, Any]
    judged: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the best member on prompts that selection did not use."""

    def to_json(self) -> dict[str, Any]:
        state, best = self.state, self.state.best
        return {
            "steps": state.step,
            "tokens": state.tokens,
            "settings": dict(self.settings),
            "best": None if best is None else described(best),
            "judged": dict(self.judged),
            "members": [described(record) for record in state.people],
            "snapshots": [asdict(snapshot) for snapshot in state.snapshots],
            "events": [asdict(event) for event in state.events],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStart:
    """A locked run folder and the state to start or resume from. Nothing has been written yet."""

    folder: RunFolder
    lock: IO[str]
    state: SearchState
    checkpoint: Path | None
    starts_again: bool = False
    """Whether a resumed search starts over because it has no checkpoint yet."""

    @classmethod
    def new(cls, config: Config, *, task: str) -> SearchStart:
        folder = RunFolder.create(
            config.run.output_dir, name=config.run.name, task=f"evolve-{task}", model=config.model.name
        ).absolute()
        return cls(folder=folder, lock=folder.lock(), state=SearchState(), checkpoint=None)

    @classmethod
    def resumed(cls, path: Path, config: Config) -> SearchStart:
        """Resume from the last checkpoint, after verifying it, or start over if there is none."""
        folder = RunFolder.open(path).absolute()
        folder.check_paths()
        lock = folder.lock()
        try:
            stored = read_config(folder.config)
            refuse_other_settings(stored, config)
            checkpoint = last_checkpoint(folder, stored)
            state = SearchState() if checkpoint is None else SearchState.from_json(verify(checkpoint))
            refuse_edited_settings(state.settings, stored, folder)
            if state.reached and config.run.max_steps > stored.run.max_steps:
                raise ConfigError(
                    f"{path} reached its target or token budget after {state.step} steps and cannot be "
                    "extended by run.max_steps: start a new search"
                )
        except BaseException:
            lock.close()
            raise
        again = checkpoint is None
        return cls(folder=folder, lock=lock, state=state, checkpoint=checkpoint, starts_again=again)

    def already_done(self, config: Config) -> str | None:
        """Return a message if no step is left and the final statistics are written; otherwise None."""
        over = self.state.reached or self.state.step >= config.run.max_steps
        if not over or steps_in(self.folder.stats) != self.state.step:
            return None
        steps = self.state.step
        finished = f"{self.folder.path} is finished after {steps} step{'s' * (steps != 1)}"
        if self.state.reached:
            return finished
        longer = command("evolve", "--resume", self.folder.path, f"run.max_steps={2 * steps}")
        return f"{finished}; to continue, {longer}"

    def withdraw_after(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Remove the folder of a new search that was refused before its first step."""
        new = self.checkpoint is None and not self.starts_again
        if new and kind is not None and issubclass(kind, ConfigError) and kind is not CallbackError:
            self.folder.remove_unstarted()


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


def write_elite(folder: RunFolder, member: Member, config: Config) -> None:
    """Save the best member atomically: write it to a temporary folder, then rename."""
    final = folder.elite
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    rank = config.lora.r or 0
    # With this prefix, the next checkpoint removes what a killed process left.
    temporary, old = (
        folder.checkpoints / f".step-000000.tmp-{what}-{os.getpid()}" for what in ("new", "old")
    )
    member.save(temporary)
    card = CardSubject(name=folder.name, base=config.model.name, rank=rank, config=config, run=folder)
    (temporary / CARD).write_text(model_card(card), encoding="utf-8")
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
