"""Who goes on and whose weights whoever is replaced gets: pure decisions on paired scores.

Every member answers the same held-out prompts with the same noise, so two members are compared prompt by
prompt. A difference counts when its 95 % interval lies above 0; with `certain` off, when its mean does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from groupwise.config.schema import Config, EvolveConfig
from groupwise.evaluate.intervals import Difference, paired_difference
from groupwise.evolution.evolve_state import MemberRecord, SearchState
from groupwise.evolution.evolve_summary import short, value_text
from groupwise.evolution.population import Population
from groupwise.evolution.search_space import SearchSpace, Values
from groupwise.seeds import derive_seed

Scores = Mapping[int, Sequence[float] | None]
"""By member's place, a score for each prompt; None: the member is broken."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of the member in one place."""

    parent: int | None
    """The place that its weights come from: its own where it goes on. None: it is dropped."""
    changes: str = "no"
    """What happens to its values: no, one (perhaps changes), all (change)."""
    difference: Difference | None = None
    """How much better the parent is, where that is another."""


def ranked(scores: Scores) -> list[int]:
    """The places of sound members, the best first; of equals, the lower place."""
    sound = [place for place, found in scores.items() if found is not None]
    return sorted(sound, key=lambda place: (-mean(scores, place), place))


def mean(scores: Scores, place: int) -> float:
    found = scores[place]
    assert found, f"member {place} was not measured"
    return fmean(found)


def advantage(scores: Scores, better: int, worse: int) -> Difference | None:
    """How much better one member is than another; None where that cannot be said."""
    one, two = scores[better], scores[worse]
    if one is None or two is None or len(one) < 2:
        return None
    return paired_difference(two, one)


def beats(difference: Difference | None, *, certain: bool) -> bool:
    return difference is not None and (difference.low if certain else difference.mean) > 0


def tournament(scores: Scores, rng: random.Random, config: EvolveConfig) -> dict[int, Decision]:
    """The best goes on as it is; each other place goes to the winner of a tournament, if that is better."""
    order = ranked(scores)
    fates: dict[int, Decision] = {}
    for place in scores:
        drawn = [rng.choice(order) for _ in range(config.tournament)]  # by lot for all, so lots stay paired
        if place == order[0] and config.elitism:
            fates[place] = Decision(place)
            continue
        winner = min(drawn, key=order.index)
        fates[place] = challenged(scores, place, winner, config, changes="one")
    return fates


def pbt(scores: Scores, rng: random.Random, config: EvolveConfig) -> dict[int, Decision]:
    """The worst share copies from one of the best share, and all of its values change."""
    order = ranked(scores)
    count = math.ceil(config.share * len(order)) if len(order) > 1 else 0
    best, worst = order[:count], set(order[len(order) - count :]) - set(order[:count])
    fates: dict[int, Decision] = {}
    for place, found in scores.items():
        teacher = rng.choice(best or order)
        if found is None or place in worst:
            fate = challenged(scores, place, teacher, config, changes="all")
            fates[place] = fate if fate.parent != place else Decision(place, difference=fate.difference)
        else:
            fates[place] = Decision(place)
    return fates


def halving(scores: Scores, rng: random.Random, config: EvolveConfig) -> dict[int, Decision]:
    """The worse half is dropped: those of it that are worse than the best."""
    order = ranked(scores)
    kept = order[: math.ceil(len(order) / 2)]
    fates: dict[int, Decision] = {}
    for place, found in scores.items():
        difference = None if place == order[0] else advantage(scores, order[0], place)
        gone = found is None or (place not in kept and beats(difference, certain=config.certain))
        fates[place] = Decision(None if gone else place, difference=difference)
    return fates


def nobody(scores: Scores, rng: random.Random, config: EvolveConfig) -> dict[int, Decision]:
    """Everyone goes on but the broken."""
    return {place: Decision(None if found is None else place) for place, found in scores.items()}


def challenged(scores: Scores, place: int, winner: int, config: EvolveConfig, *, changes: str) -> Decision:
    """A place goes to the winner if its member is broken or worse; else the member goes on."""
    if scores[place] is None:
        return Decision(winner, changes)
    difference = None if winner == place else advantage(scores, winner, place)
    won = beats(difference, certain=config.certain)
    return Decision(winner if won else place, changes, difference)


Select = Callable[[Scores, random.Random, EvolveConfig], dict[int, Decision]]
SELECTIONS: dict[str, Select] = {
    "tournament": tournament,
    "pbt": pbt,
    "halving": halving,
    "random": nobody,
}


class Selector:
    """Decides by the method that the settings name, and moves weights and values."""

    def __init__(self, config: Config, *, space: SearchSpace, people: Population) -> None:
        self.config, self.space, self.people = config, space, people

    def select(self, story: SearchState) -> SearchState:
        """Return the story with everyone's fate met: the worst first, so no parent is replaced too early."""
        evolve, seed = self.config.evolve, self.config.run.seed
        scores = {person.place: None if person.trouble else person.scores for person in story.people}
        rng = random.Random(derive_seed(seed, "select", story.step))
        fates = SELECTIONS[evolve.method](scores, rng, evolve)
        before = {person.place: person for person in story.people}
        for place in sorted(fates, key=lambda place: fmean(scores[place] or (-1.0,))):
            lot = random.Random(derive_seed(seed, "change", story.step, place))
            if fates[place].parent is None:
                story = self._drop(story, before[place], fates[place])
            else:
                story = self._go_on(story, before, place, fates[place], lot)
        return story

    def _drop(self, story: SearchState, person: MemberRecord, fate: Decision) -> SearchState:
        if person.trouble is None:
            self.people.drop(person.place)
        why = "it diverged" if person.trouble else f"the best is better by {fate.difference}"
        others = tuple(p for p in story.people if p.place != person.place)
        return replace(story, people=others).told(person.name, "dropped", why)

    def _go_on(
        self,
        story: SearchState,
        before: Mapping[int, MemberRecord],
        place: int,
        fate: Decision,
        rng: random.Random,
    ) -> SearchState:
        """The member in this place stays, or a copy of its parent takes over; values may change."""
        assert fate.parent is not None
        person, parent = before[place], before[fate.parent]
        values = self._changed(parent.values, fate, rng)
        if parent is not person:
            self.people.place(place, values, parent=fate.parent)
            child = MemberRecord(
                name=story.names, place=place, parent=parent.name, born=story.step, values=values
            )
            story = replace(story.changed(child), names=story.names + 1)
            why = "which diverged" if fate.difference is None else f"which is worse by {fate.difference}"
            story = story.told(child.name, "copied", f"from {parent.name}, in place of {person.name}, {why}")
        elif values != person.values:
            self.people.set_values(place, values)
            story = story.changed(replace(story.at(place), values=values))
        if values != parent.values:
            story = story.told(story.at(place).name, "changed", difference(parent.values, values))
        return story

    def _changed(self, values: Values, fate: Decision, rng: random.Random) -> Values:
        evolve = self.config.evolve
        factors = (evolve.smaller, evolve.larger)
        if fate.changes == "all":
            return self.space.perturb(values, rng, factors)
        if fate.changes == "one" and rng.random() < evolve.mutate:
            return self.space.mutate(values, rng, factors)
        return dict(values)


def difference(old: Values, new: Values) -> str:
    """What changed: "rate 0.001 → 0.0012"."""
    return ", ".join(
        f"{short(name)} {value_text(old[name])} → {value_text(new[name])}"
        for name in old
        if old[name] != new[name]
    )
