"""Where a population stands and how it came there: what a checkpoint holds beside its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from groupwise.evaluate.statistics import Interval, mean_interval
from groupwise.population.space import Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Individual:
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
class Event:
    """Something that happened to a member."""

    step: int
    name: int
    what: str
    """born, copied, changed, dropped, diverged."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everyone at one measurement."""

    step: int
    tokens: int
    members: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The state of a search after a step. There is no random state: all noise derives from seed and step."""

    step: int = 0
    cursor: int = 0
    tokens: int = 0
    """Sampled so far, by all members, in training and in evaluations."""
    names: int = 0
    """Given out so far."""
    seconds: float = 0.0
    people: tuple[Individual, ...] = ()
    """Who holds which place; a dropped member's place is empty."""
    snapshots: tuple[Snapshot, ...] = ()
    events: tuple[Event, ...] = ()
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

    def at(self, place: int) -> Individual:
        return next(person for person in self.people if person.place == place)

    @property
    def best(self) -> Individual | None:
        """The fittest sound member; of equals, the one with the lower name."""
        sound = [person for person in self.people if person.trouble is None and person.scores]
        return min(sound, key=lambda p: (-sum(p.scores) / len(p.scores), p.name)) if sound else None

    def changed(self, person: Individual) -> Story:
        """The same with another record in that person's place."""
        people = tuple(person if p.place == person.place else p for p in self.people)
        return replace(self, people=people)

    def told(self, name: int, what: str, detail: str) -> Story:
        event = Event(step=self.step, name=name, what=what, detail=detail)
        return replace(self, events=(*self.events, event))

    def snapshot(self) -> Story:
        """Write down everyone as they are now."""
        members = tuple(described(person) for person in self.people)
        now = Snapshot(step=self.step, tokens=self.tokens, members=members)
        earlier = tuple(s for s in self.snapshots if s.step != self.step)
        return replace(self, snapshots=(*earlier, now))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Story:
        people = tuple(Individual(**{**p, "scores": tuple(p["scores"])}) for p in record["people"])
        snapshots = tuple(Snapshot(**{**s, "members": tuple(s["members"])}) for s in record["snapshots"])
        events = tuple(Event(**event) for event in record["events"])
        return cls(**{**record, "people": people, "snapshots": snapshots, "events": events})


def described(person: Individual) -> dict[str, Any]:
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
class Told:
    """evolution.json: the search from its first step to its last, for people and programs."""

    story: Story
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
