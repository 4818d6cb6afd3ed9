"""The population as a table of text: who, since when, from whom, with which values, how fit."""

from __future__ import annotations

from collections.abc import Mapping

from groupwise.population.story import Individual, Story
from groupwise.tracking.notation import number

SHORT = {
    "optim.learning_rate": "rate",
    "optim.max_grad_norm": "grad norm",
    "rollout.group_size": "group",
    "rollout.temperature": "temp.",
    "algo.entropy_bonus": "entropy",
}


def short(name: str) -> str:
    return SHORT.get(name, name.partition(".")[2])


def value_text(value: float) -> str:
    return f"{value:.2g}" if value < 1e-2 else f"{value:.3g}"


def table(story: Story, rewards: Mapping[int, float]) -> str:
    """One line a member, the fittest marked; `rewards` are the last step's, by place."""
    names = list(story.people[0].values) if story.people else []
    header = ["member", "from", "since", *map(short, names), "reward", "accuracy"]
    rows = [header, *(row_of(person, names, rewards, best=story.best) for person in story.people)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([f"step {story.step} · {story.tokens:,} tokens", *lines])


def row_of(
    person: Individual, names: list[str], rewards: Mapping[int, float], *, best: Individual | None
) -> list[str]:
    mark = "*" if best is not None and best.name == person.name else ""
    fitness = person.trouble or ("" if person.fitness is None else str(person.fitness))
    reward = number(rewards[person.place]) if person.place in rewards else ""
    return [
        f"{mark}{person.name}",
        "base" if person.parent is None else str(person.parent),
        str(person.born),
        *(value_text(person.values[name]) for name in names),
        reward,
        fitness,
    ]
