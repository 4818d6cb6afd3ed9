"""The state of a search: members, events and progress; evolution.json; and how a search starts or resumes.

`SearchState` is what a checkpoint holds besides tensors. Field names are the keys of the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from groupwise.config import Config, read_config
from groupwise.errors import ConfigError
from groupwise.evaluate.intervals import Interval, mean_interval
from groupwise.evolution.search_space import Values
from groupwise.learner.checkpoint import verify
from groupwise.tracking.run_folder import RunFolder
from groupwise.tracking.terminal import command
from groupwise.training.resume import last_checkpoint, refuse_edited_settings, refuse_other_settings, steps_in


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
    begins_again: bool = False
    """Whether a resumed search starts over because it has no checkpoint yet."""

    @classmethod
    def new(cls, config: Config, *, task: str) -> SearchStart:
        folder = RunFolder.create(
            config.run.output_dir, name=config.run.name, task=f"evolve-{task}", model=config.model.name
        ).absolute()
        return cls(folder=folder, lock=folder.lock(), state=SearchState(), checkpoint=None)

    @classmethod
    def again(cls, path: Path, config: Config) -> SearchStart:
        """Resume from the last checkpoint, after verifying it, or start over if there is none."""
        folder = RunFolder.open(path).absolute()
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
        return cls(folder=folder, lock=lock, state=state, checkpoint=checkpoint, begins_again=again)

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

    def withdraw(self) -> None:
        """Remove a new folder if nothing was written to it."""
        if not self.folder.config.exists():
            with suppress(OSError):
                (self.folder.path / ".lock").unlink(missing_ok=True)
                self.folder.path.rmdir()
