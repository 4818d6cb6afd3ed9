"""Selection: which members survive, and which members replace the others.

The methods are pure functions of paired scores; `Selector` applies their decisions. All members answer the
same held-out prompts with the same seeds, so two members are compared prompt by prompt. A difference counts
if its 95 % interval lies above 0; with `certain` off, if its mean does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from groupwise.config.runtime import EvolveConfig
from groupwise.config.schema import Config
from groupwise.evaluate.intervals import Difference, paired_difference
from groupwise.evolution.evolve_state import MemberRecord, SearchState, short, value_text
from groupwise.evolution.population import Population
from groupwise.evolution.search_space import SearchSpace, Values
from groupwise.records import derive_seed

Scores = Mapping[int, Sequence[float] | None]
"""A score for each prompt, by slot; None: the member has diverged."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one slot."""

    parent: int | None
    """Slot whose weights it gets: its own if the member survives. None: the slot is dropped."""
    changes: str = "no"
    """How its values change: "no"; "one", which may mutate one value; "all", which perturbs every value."""
    difference: Difference | None = None
    """How much better the parent is, if it is another member."""


def ranked(scores: Scores) -> list[int]:
    """Return the slots of sound members, the best first; of equals, the lower slot first."""
    sound = [slot for slot, own in scores.items() if own is not None]
    return sorted(sound, key=lambda slot: (-mean(scores, slot), slot))


def mean(scores: Scores, slot: int) -> float:
    own = scores[slot]
    assert own, f"member {slot} was not measured"
    return fmean(own)


def advantage(scores: Scores, better: int, worse: int) -> Difference | None:
    """Return how much better one member is than another; None if they cannot be compared."""
    one, two = scores[better], scores[worse]
    if one is None or two is None or len(one) < 2:
        return None
    return paired_difference(two, one)


def beats(difference: Difference | None, *, certain: bool) -> bool:
    return difference is not None and (difference.low if certain else difference.mean) > 0


def tournament(scores: Scores, rng: random.Random, config: EvolveConfig) -> dict[int, Decision]:
    """Keep the best member; every other slot goes to the winner of a tournament, if that is better."""
    order = ranked(scores)
    decisions: dict[int, Decision] = {}
    for slot in scores:
        # Sample for every slot, also the best, so that the random numbers of the others do not shift.
        drawn = [rng.choice(order) for _ in range(config.tournament)]
        if slot == order[0] and config.elitism:
            decisions[slot] = Decision(slot)
            continue
        winner = min(drawn, key=order.index)
        decisions[slot] = challenged(scores, slot, winner, config, changes="one")
    return decisions


def pbt(scores: Scores, rng: random.Random, config: EvolveConfig) -> dict[int, Decision]:
    """Replace the worst share by copies of members of the best share, with all values perturbed."""
    order = ranked(scores)
    count = math.ceil(config.share * len(order)) if len(order) > 1 else 0
    best, worst = order[:count], set(order[len(order) - count :]) - set(order[:count])
    decisions: dict[int, Decision] = {}
    for slot, own in scores.items():
        source = rng.choice(best or order)
        if own is None or slot in worst:
            decision = challenged(scores, slot, source, config, changes="all")
            decisions[slot] = (
                decision if decision.parent != slot else Decision(slot, difference=decision.difference)
            )
        else:
            decisions[slot] = Decision(slot)
    return decisions


def halving(scores: Scores, rng: random.Random, config: EvolveConfig) -> dict[int, Decision]:
    """Drop the members of the worse half that are worse than the best."""
    order = ranked(scores)
    survivors = order[: math.ceil(len(order) / 2)]
    decisions: dict[int, Decision] = {}
    for slot, own in scores.items():
        difference = None if slot == order[0] else advantage(scores, order[0], slot)
        dropped = own is None or (slot not in survivors and beats(difference, certain=config.certain))
        decisions[slot] = Decision(None if dropped else slot, difference=difference)
    return decisions


def keep_all(scores: Scores, rng: random.Random, config: EvolveConfig) -> dict[int, Decision]:
    """Keep all members except diverged ones."""
    return {slot: Decision(None if own is None else slot) for slot, own in scores.items()}


def challenged(scores: Scores, slot: int, winner: int, config: EvolveConfig, *, changes: str) -> Decision:
    """Give a slot to the winner if its member has diverged or is worse; otherwise keep the member."""
    if scores[slot] is None:
        return Decision(winner, changes)
    difference = None if winner == slot else advantage(scores, winner, slot)
    won = beats(difference, certain=config.certain)
    return Decision(winner if won else slot, changes, difference)


Select = Callable[[Scores, random.Random, EvolveConfig], dict[int, Decision]]
SELECTIONS: dict[str, Select] = {
    "tournament": tournament,
    "pbt": pbt,
    "halving": halving,
    "random": keep_all,
}


class Selector:
    """Selects with the configured method, and moves weights and values accordingly."""

    def __init__(self, config: Config, *, space: SearchSpace, population: Population) -> None:
        self.config, self.space, self.population = config, space, population

    def select(self, state: SearchState) -> SearchState:
        """Apply the decisions and return the new state.

        The worst members come first, so that no parent is replaced before it is copied.
        """
        evolve, seed = self.config.evolve, self.config.run.seed
        scores = {record.place: None if record.trouble else record.scores for record in state.people}
        rng = random.Random(derive_seed(seed, "select", state.step))
        decisions = SELECTIONS[evolve.method](scores, rng, evolve)
        before = {record.place: record for record in state.people}
        for slot in sorted(decisions, key=lambda slot: fmean(scores[slot] or (-1.0,))):
            slot_rng = random.Random(derive_seed(seed, "change", state.step, slot))
            if decisions[slot].parent is None:
                state = self._drop(state, before[slot], decisions[slot])
            else:
                state = self._keep_or_replace(state, before, slot, decisions[slot], slot_rng)
        return state

    def _drop(self, state: SearchState, record: MemberRecord, decision: Decision) -> SearchState:
        if record.trouble is None:
            self.population.drop(record.place)
        why = "it diverged" if record.trouble else f"the best is better by {decision.difference}"
        others = tuple(p for p in state.people if p.place != record.place)
        return replace(state, people=others).with_event(record.name, "dropped", why)

    def _keep_or_replace(
        self,
        state: SearchState,
        before: Mapping[int, MemberRecord],
        slot: int,
        decision: Decision,
        rng: random.Random,
    ) -> SearchState:
        """Keep the member in this slot, or replace it by a copy of its parent; its values may change."""
        assert decision.parent is not None
        record, parent = before[slot], before[decision.parent]
        values = self._changed(parent.values, decision, rng)
        if parent is not record:
            self.population.put(slot, values, parent=decision.parent)
            child = MemberRecord(
                name=state.names, place=slot, parent=parent.name, born=state.step, values=values
            )
            state = replace(state.with_member(child), names=state.names + 1)
            why = (
                "which diverged"
                if decision.difference is None
                else f"which is worse by {decision.difference}"
            )
            state = state.with_event(
                child.name, "copied", f"from {parent.name}, in place of {record.name}, {why}"
            )
        elif values != record.values:
            self.population.set_values(slot, values)
            state = state.with_member(replace(state.at(slot), values=values))
        if values != parent.values:
            state = state.with_event(state.at(slot).name, "changed", difference(parent.values, values))
        return state

    def _changed(self, values: Values, decision: Decision, rng: random.Random) -> Values:
        evolve = self.config.evolve
        factors = (evolve.smaller, evolve.larger)
        if decision.changes == "all":
            return self.space.perturb(values, rng, factors)
        if decision.changes == "one" and rng.random() < evolve.mutate:
            return self.space.mutate(values, rng, factors)
        return dict(values)


def difference(old: Values, new: Values) -> str:
    """Describe the values that changed: "lr 0.001 → 0.0012"."""
    return ", ".join(
        f"{short(name)} {value_text(old[name])} → {value_text(new[name])}"
        for name in old
        if old[name] != new[name]
    )
