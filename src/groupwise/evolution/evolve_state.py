"""Where a population stands and how it came there: what a checkpoint holds beside its tensors."""

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
    """Whoever holds a place, until another takes it."""

    name: int
    """Never used twice."""
    place: int
    parent: int | None
    """The name of whom its weights come from; None: the base."""
    born: int
    """After which step."""
    values: Values
    scores: tuple[float, ...] = ()
    """Accuracy on each prompt that selection looks at, when last measured."""
    measured: int = 0
    """After which step."""
    trouble: str | None = None
    """Why it is out of the running."""

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
    """Everyone at one measurement."""

    step: int
    tokens: int
    members: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    """The state of a search after a step. There is no random state: all noise derives from seed and step."""

    step: int = 0
    cursor: int = 0
    tokens: int = 0
    """Sampled so far, by all members, in training and in evaluations."""
    names: int = 0
    """Given out so far."""
    seconds: float = 0.0
    people: tuple[MemberRecord, ...] = ()
    """Who holds which place; a dropped member's place is empty."""
    snapshots: tuple[PopulationSnapshot, ...] = ()
    events: tuple[EvolutionEvent, ...] = ()
    reached: bool = False
    """The target, or the end of the tokens: no step is left."""
    unselected: bool = False
    """The selection that was due is not made: it was the last step, and is not if more are asked for."""
    data: str | None = None
    """The fingerprint of the examples; None: of a search that began before it was kept."""
    settings: Mapping[str, Any] | None = None
    """The settings, by section; None: of a search that began before they were kept here."""
    code: Mapping[str, str] | None = None
    """The fingerprints of the task's functions; None: of a search that began before they were kept."""

    def at(self, place: int) -> MemberRecord:
        return next(person for person in self.people if person.place == place)

    @property
    def best(self) -> MemberRecord | None:
        """The fittest sound member; of equals, the one with the lower name."""
        sound = [person for person in self.people if person.trouble is None and person.scores]
        return min(sound, key=lambda p: (-sum(p.scores) / len(p.scores), p.name)) if sound else None

    def changed(self, person: MemberRecord) -> SearchState:
        """The same with another record in that person's place."""
        people = tuple(person if p.place == person.place else p for p in self.people)
        return replace(self, people=people)

    def told(self, name: int, what: str, detail: str) -> SearchState:
        event = EvolutionEvent(step=self.step, name=name, what=what, detail=detail)
        return replace(self, events=(*self.events, event))

    def snapshot(self) -> SearchState:
        """Write down everyone as they are now."""
        members = tuple(described(person) for person in self.people)
        now = PopulationSnapshot(step=self.step, tokens=self.tokens, members=members)
        earlier = tuple(s for s in self.snapshots if s.step != self.step)
        return replace(self, snapshots=(*earlier, now))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> SearchState:
        people = tuple(MemberRecord(**{**p, "scores": tuple(p["scores"])}) for p in record["people"])
        snapshots = tuple(
            PopulationSnapshot(**{**s, "members": tuple(s["members"])}) for s in record["snapshots"]
        )
        events = tuple(EvolutionEvent(**event) for event in record["events"])
        return cls(**{**record, "people": people, "snapshots": snapshots, "events": events})


def described(person: MemberRecord) -> dict[str, Any]:
    """A member as evolution.json has it."""
    fitness = person.fitness
    return {
        "name": person.name,
        "place": person.place,
        "parent": person.parent,
        "born": person.born,
        "values": dict(person.values),
        "fitness": None if fitness is None else [fitness.mean, fitness.low, fitness.high],
        "measured": person.measured,
        "trouble": person.trouble,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class EvolutionLog:
    """evolution.json: the search from its first step to its last, for people and programs."""

    story: SearchState
    settings: Mapping[str, Any]
    judged: Mapping[str, float] = field(default_factory=dict)
    """The best member on prompts that played no part in selection."""

    def to_json(self) -> dict[str, Any]:
        story, best = self.story, self.story.best
        return {
            "steps": story.step,
            "tokens": story.tokens,
            "settings": dict(self.settings),
            "best": None if best is None else described(best),
            "judged": dict(self.judged),
            "members": [described(person) for person in story.people],
            "snapshots": [asdict(snapshot) for snapshot in story.snapshots],
            "events": [asdict(event) for event in story.events],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStart:
    """A folder, claimed for this process, and where in it to go on. Nothing is written yet."""

    folder: RunFolder
    lock: IO[str]
    story: SearchState
    checkpoint: Path | None
    begins_again: bool = False
    """Whether an old search begins anew, because it was stopped before its first checkpoint."""

    @classmethod
    def new(cls, config: Config, *, task: str) -> SearchStart:
        folder = RunFolder.create(
            config.run.output_dir, name=config.run.name, task=f"evolve-{task}", model=config.model.name
        ).absolute()
        return cls(folder=folder, lock=folder.lock(), story=SearchState(), checkpoint=None)

    @classmethod
    def again(cls, path: Path, config: Config) -> SearchStart:
        """Go on after the last checkpoint, every byte of it checked, or anew where none was written yet."""
        folder = RunFolder.open(path).absolute()
        lock = folder.lock()
        try:
            stored = read_config(folder.config)
            refuse_other_settings(stored, config)
            checkpoint = last_checkpoint(folder, stored)
            story = SearchState() if checkpoint is None else SearchState.from_json(verify(checkpoint))
            refuse_edited_settings(story.settings, stored, folder)
            if story.reached and config.run.max_steps > stored.run.max_steps:
                raise ConfigError(
                    f"{path} ended for good after {story.step} steps: a larger run.max_steps does not "
                    "make it go on; start a new search"
                )
        except BaseException:
            lock.close()
            raise
        again = checkpoint is None
        return cls(folder=folder, lock=lock, story=story, checkpoint=checkpoint, begins_again=again)

    def already_done(self, config: Config) -> str | None:
        """Say so when no step is left and the last session told its story to the end."""
        over = self.story.reached or self.story.step >= config.run.max_steps
        if not over or steps_in(self.folder.stats) != self.story.step:
            return None
        steps = self.story.step
        finished = f"{self.folder.path} is finished after {steps} step{'s' * (steps != 1)}"
        if self.story.reached:
            return finished
        longer = command("evolve", "--resume", self.folder.path, f"run.max_steps={2 * steps}")
        return f"{finished}; to go on, {longer}"

    def withdraw(self) -> None:
        """Take a new folder back if nothing came of it."""
        if not self.folder.config.exists():
            with suppress(OSError):
                (self.folder.path / ".lock").unlink(missing_ok=True)
                self.folder.path.rmdir()
