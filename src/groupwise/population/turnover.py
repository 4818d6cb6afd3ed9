"""A selection carried out: places that change hands, values that change, and what is told of it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

from groupwise.config.sections import Config
from groupwise.engine.sampler import derive_seed
from groupwise.population.people import People
from groupwise.population.select import SELECTIONS, Fate
from groupwise.population.space import Space, Values
from groupwise.population.story import Individual, Story
from groupwise.population.table import short, value_text


class Turnover:
    """Decides by the method that the settings name, and moves weights and values."""

    def __init__(self, config: Config, *, space: Space, people: People) -> None:
        self.config, self.space, self.people = config, space, people

    def select(self, story: Story) -> Story:
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

    def _drop(self, story: Story, person: Individual, fate: Fate) -> Story:
        if person.trouble is None:
            self.people.drop(person.place)
        why = "it diverged" if person.trouble else f"the best is better by {fate.difference}"
        others = tuple(p for p in story.people if p.place != person.place)
        return replace(story, people=others).told(person.name, "dropped", why)

    def _go_on(
        self, story: Story, before: Mapping[int, Individual], place: int, fate: Fate, rng: random.Random
    ) -> Story:
        """The member in this place stays, or a copy of its parent takes over; values may change."""
        assert fate.parent is not None
        person, parent = before[place], before[fate.parent]
        values = self._changed(parent.values, fate, rng)
        if parent is not person:
            self.people.place(place, values, parent=fate.parent)
            child = Individual(
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

    def _changed(self, values: Values, fate: Fate, rng: random.Random) -> Values:
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
