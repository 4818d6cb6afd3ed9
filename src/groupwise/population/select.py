"""Who goes on and whose weights whoever is replaced gets: pure decisions on paired scores.

Every member answers the same held-out prompts with the same noise, so two members are compared prompt by
prompt. A difference counts when its 95 % interval lies above 0; with `certain` off, when its mean does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from groupwise.config.evolve import EvolveConfig
from groupwise.evaluate.statistics import Difference, paired_difference

Scores = Mapping[int, Sequence[float] | None]
"""By member's place, a score for each prompt; None: the member is broken."""


@dataclass(frozen=True, slots=True)
class Fate:
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


def tournament(scores: Scores, rng: random.Random, config: EvolveConfig) -> dict[int, Fate]:
    """The best goes on as it is; each other place goes to the winner of a tournament, if that is better."""
    order = ranked(scores)
    fates: dict[int, Fate] = {}
    for place in scores:
        drawn = [rng.choice(order) for _ in range(config.tournament)]  # by lot for all, so lots stay paired
        if place == order[0] and config.elitism:
            fates[place] = Fate(place)
            continue
        winner = min(drawn, key=order.index)
        fates[place] = challenged(scores, place, winner, config, changes="one")
    return fates


def pbt(scores: Scores, rng: random.Random, config: EvolveConfig) -> dict[int, Fate]:
    """The worst share copies from one of the best share, and all of its values change."""
    order = ranked(scores)
    count = math.ceil(config.share * len(order)) if len(order) > 1 else 0
    best, worst = order[:count], set(order[len(order) - count :]) - set(order[:count])
    fates: dict[int, Fate] = {}
    for place, found in scores.items():
        teacher = rng.choice(best or order)
        if found is None or place in worst:
            fate = challenged(scores, place, teacher, config, changes="all")
            fates[place] = fate if fate.parent != place else Fate(place, difference=fate.difference)
        else:
            fates[place] = Fate(place)
    return fates


def halving(scores: Scores, rng: random.Random, config: EvolveConfig) -> dict[int, Fate]:
    """The worse half is dropped: those of it that are worse than the best."""
    order = ranked(scores)
    kept = order[: math.ceil(len(order) / 2)]
    fates: dict[int, Fate] = {}
    for place, found in scores.items():
        difference = None if place == order[0] else advantage(scores, order[0], place)
        gone = found is None or (place not in kept and beats(difference, certain=config.certain))
        fates[place] = Fate(None if gone else place, difference=difference)
    return fates


def nobody(scores: Scores, rng: random.Random, config: EvolveConfig) -> dict[int, Fate]:
    """Everyone goes on but the broken."""
    return {place: Fate(None if found is None else place) for place, found in scores.items()}


def challenged(scores: Scores, place: int, winner: int, config: EvolveConfig, *, changes: str) -> Fate:
    """A place goes to the winner if its member is broken or worse; else the member goes on."""
    if scores[place] is None:
        return Fate(winner, changes)
    difference = None if winner == place else advantage(scores, winner, place)
    won = beats(difference, certain=config.certain)
    return Fate(winner if won else place, changes, difference)


Select = Callable[[Scores, random.Random, EvolveConfig], dict[int, Fate]]
SELECTIONS: dict[str, Select] = {
    "tournament": tournament,
    "pbt": pbt,
    "halving": halving,
    "random": nobody,
}
