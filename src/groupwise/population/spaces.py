"""The spaces of prompts and of answers; Gymnasium's own spaces of text know neither chats nor groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium import Space

from groupwise.records import Rollout
from groupwise.tasks.task import is_prompt

WORDS = ("one", "two", "three", "plus", "minus", "is", "<answer>", "</answer>", "?")


class Asking(Space[tuple[Any, ...]]):
    """Batches of prompts, each a text or a chat."""

    def __init__(self, batch: int) -> None:
        super().__init__(shape=None, dtype=None)
        self.batch = batch

    def contains(self, x: Any) -> bool:
        return isinstance(x, tuple) and 0 < len(x) <= self.batch and all(map(is_prompt, x))

    def sample(self, mask: Any = None, probability: Any = None) -> tuple[Any, ...]:
        return tuple(self.words() for _ in range(self.batch))

    def words(self) -> str:
        return " ".join(self.np_random.choice(WORDS, size=4).tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.__dict__.keys() == other.__dict__.keys()

    __hash__ = None  # type: ignore[assignment]


class Answers(Asking):
    """A group of answers to each prompt of a batch, each a text or an agent's rollout."""

    def __init__(self, batch: int, group: int) -> None:
        super().__init__(batch)
        self.group = group

    def contains(self, x: Any) -> bool:
        return (
            isinstance(x, Sequence)
            and 0 < len(x) <= self.batch
            and all(isinstance(group, Sequence) and len(group) > 0 for group in x)
            and all(isinstance(answer, str | Rollout) for group in x for answer in group)
        )

    def sample(self, mask: Any = None, probability: Any = None) -> tuple[Any, ...]:
        return tuple(tuple(self.words() for _ in range(self.group)) for _ in range(self.batch))
