"""Word problems without end: short stories whose answer is worked out in whole, positive steps."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from groupwise.errors import ConfigError
from groupwise.records import Example

NAMES = ("Ana", "Ben", "Chen", "Dara", "Elif", "Femi", "Gita", "Hugo", "Ines", "Jonas", "Kofi", "Lena")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "tickets")
HELD_OUT_ONE_IN = 8
MAX_DRAWS = 20_000
"""Draws without a new held-out problem after which there are taken to be no more."""

T = TypeVar("T")


@dataclass(slots=True)
class Story:
    """A problem as it grows: what was told, what was worked out, how many there are now."""

    name: str
    things: str
    told: list[str]
    worked: list[str]
    total: int

    def work(self, operator: str, other: int, result: int) -> None:
        self.worked.append(f"{self.total} {operator} {other} = {result}")
        self.total = result


def start(rng: random.Random, largest: int) -> Story:
    name, things = pick(rng, NAMES), pick(rng, THINGS)
    count = between(rng, 2, largest)
    return Story(name, things, [f"{name} has {count} {things}."], [], count)


def gain(story: Story, rng: random.Random, largest: int) -> None:
    more = between(rng, 2, largest)
    story.told.append(f"{story.name} gets {more} more from a friend.")
    story.work("+", more, story.total + more)


def loss(story: Story, rng: random.Random, largest: int) -> None:
    fewer = between(rng, 1, min(largest, story.total - 1))
    story.told.append(f"Then {story.name} gives {fewer} away.")
    story.work("-", fewer, story.total - fewer)


def growth(story: Story, rng: random.Random, largest: int) -> None:
    times = between(rng, 2, 4)
    story.told.append(f"A week later there are {times} times as many.")
    story.work("*", times, story.total * times)


def sharing(story: Story, rng: random.Random, largest: int) -> None:
    parts = pick(rng, [d for d in range(2, story.total) if story.total % d == 0])
    story.told.append(f"{story.name} puts them into {parts} equal boxes and keeps one of the boxes.")
    story.work("/", parts, story.total // parts)


Event = Callable[[Story, random.Random, int], None]


def possible(story: Story) -> list[Event]:
    """Return what may happen next: every result stays a whole number above 0."""
    events: list[Event] = [gain]
    if story.total > 2:
        events.append(loss)
    if story.total <= 200:
        events.append(growth)
    if any(story.total % d == 0 for d in range(2, story.total)):
        events.append(sharing)
    return events


def draw_problem(rng: random.Random, *, steps: int, largest: int) -> Example:
    """Draw a story of so many steps; the solution is written as GSM8K writes it, with `####`."""
    story = start(rng, largest)
    for _ in range(steps):
        pick(rng, possible(story))(story, rng, largest)
    question = f"{' '.join(story.told)} How many {story.things} does {story.name} have now?"
    solution = "\n".join([*story.worked, f"#### {story.total}"])
    return Example({"question": question, "answer": str(story.total), "solution": solution})


@dataclass(frozen=True, slots=True, kw_only=True)
class WordProblems:
    """A `Stream` of problems; which side one is on is decided by its text."""

    steps: tuple[int, int]
    largest: int

    def train(self, index: int, *, seed: int) -> Example:
        rng = random.Random(f"word problem {seed} {index}")
        while is_held_out(example := self.draw(rng)):
            pass
        return example

    def held_out(self, count: int) -> Sequence[Example]:
        rng = random.Random("held-out word problems")
        found: dict[str, Example] = {}
        in_vain = 0
        while len(found) < count:
            example = self.draw(rng)
            in_vain += 1
            if is_held_out(example) and example["question"] not in found:
                found[example["question"]] = example
                in_vain = 0
            if in_vain > MAX_DRAWS:
                raise ConfigError(
                    f"gsm8k: steps={self.steps} and largest={self.largest} make about {len(found)} held-out "
                    f"problems, not {count}; lower task.held_out, or raise steps or largest"
                )
        return list(found.values())

    def draw(self, rng: random.Random) -> Example:
        return draw_problem(rng, steps=between(rng, *self.steps), largest=self.largest)


def is_held_out(example: Example) -> bool:
    return hashlib.sha256(example["question"].encode()).digest()[0] % HELD_OUT_ONE_IN == 0


# Only `random()` is promised to stay the same from one Python version to the next.


def between(rng: random.Random, least: int, most: int) -> int:
    return least + int(rng.random() * (most - least + 1))


def pick(rng: random.Random, choices: Sequence[T]) -> T:
    return choices[int(rng.random() * len(choices))]
