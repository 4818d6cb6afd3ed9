"""The curriculum: choose examples whose answers will vary, by how often each kind of example succeeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from groupwise.errors import ConfigError
from groupwise.records import Example, Group
from groupwise.seeds import derive_seed
from groupwise.tasks import ExampleStream, Split, Task

Rates = Mapping[str, Sequence[float]]
"""For each kind of example: counts of scored and of right answers, with exponential decay."""
NOTHING_KNOWN: Rates = {}
FADING = 0.9
"""Decay factor of the counts at each group of the same kind."""
LEAST = 0.05
"""Lowest weight of a kind. It is still sampled now and then, because the policy changes."""


def check_kinds(task: Task, split: Split) -> None:
    """Refuse a curriculum if no two examples are of the same kind."""
    if isinstance(split.train, ExampleStream) and task.difficulty is None:
        raise ConfigError(
            f"rollout.curriculum: task {task.name} makes endless examples and does not say how they are "
            "alike; give it difficulty=…, a function from an example to a kind"
        )


def kind_of(task: Task, example: Example) -> str:
    """Return the kind of an example: its difficulty, or its fingerprint if the task defines none."""
    named = task.difficulty(example) if task.difficulty else None
    return named if named is not None else example.fingerprint


def success(rates: Rates, kind: str) -> float:
    """Return the estimated success rate of a kind; 0.5 before the first answer."""
    given, right = rates.get(kind, (0.0, 0.0))
    return (right + 1) / (given + 2)


def choose(
    candidates: Sequence[Example], count: int, *, task: Task, rates: Rates, seed_parts: tuple[int | str, ...]
) -> list[Example]:
    """Sample `count` candidates without replacement, weighted by the expected variance of their answers.

    Every candidate draws u^(1/weight) and the largest win (Efraimidis & Spirakis 2006).
    """

    def lot(place: int) -> float:
        p = success(rates, kind_of(task, candidates[place]))
        uniform = (derive_seed(*seed_parts, "curriculum", place) % 2**53 + 0.5) / 2**53
        return float(uniform ** (1 / max(LEAST, 4 * p * (1 - p))))

    winners = sorted(range(len(candidates)), key=lot, reverse=True)[:count]
    return [candidates[place] for place in sorted(winners)]


def updated(rates: Rates, groups: Iterable[Group], *, task: Task) -> dict[str, Sequence[float]]:
    """Return the rates with these groups counted. Failed rollouts are not counted."""
    known = dict(rates)
    for group in groups:
        kind = kind_of(task, group.example)
        given, right = known.get(kind, (0.0, 0.0))
        known[kind] = (
            FADING * given + len(group.valid),
            FADING * right + sum(map(task.is_right, group.valid)),
        )
    return known
