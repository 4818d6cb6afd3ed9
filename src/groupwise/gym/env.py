"""The spaces of prompts and of answers; Gymnasium's own spaces of text know neither chats nor groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from groupwise.algo.reward_combination import with_combined
from groupwise.config.coerce import between
from groupwise.config.schema import Config, RunConfig, TaskConfig
from groupwise.errors import ConfigError
from groupwise.records import Example, Group, Rollout
from groupwise.rewards.runner import score_group
from groupwise.tasks import Task, load_task
from groupwise.tasks.task import Prompt, is_prompt

if TYPE_CHECKING:
    Gym = object
else:
    try:
        from gymnasium import Env as Gym
    except ImportError:
        Gym = object


WORDS = ("one", "two", "three", "plus", "minus", "is", "<answer>", "</answer>", "?")


class PromptSpace(Space[tuple[Any, ...]]):
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


class AnswerSpace(PromptSpace):
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


Answer = str | Rollout
Prompts = tuple[Prompt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvState:
    """Where the environment stands: all of its state, so that putting it back puts everything back."""

    examples: tuple[Example, ...] = ()
    """What the next answers are scored against."""
    cursor: int = 0
    """Examples taken since the seed was set."""
    held_out: bool = False


class PromptEnv(Gym):
    """Asks a task's prompts in batches and scores groups of answers to each."""

    metadata: Mapping[str, Any] = {"render_modes": []}

    def __init__(
        self,
        task: Task | str,
        *,
        batch_size: int = 8,
        group_size: int = 8,
        held_out: int = 128,
        seed: int = 0,
        prompt: Callable[[Example], Prompt] | None = None,
        collate: Callable[[Sequence[Example]], Any] | None = None,
        options: Mapping[str, Any] | None = None,
        reward_seconds: float = 5.0,
    ) -> None:
        """`task` is one of your own, or the name of a built-in one, which `options` are for.

        `prompt` is asked in place of the task's own; what `collate` makes of a batch is `info["batch"]`.
        `group_size` says what a sampled action looks like; a step takes groups of any size.
        """
        between("batch_size", batch_size, 1)
        between("group_size", group_size, 1)
        settings = TaskConfig(
            name=task if isinstance(task, str) else task.name,
            held_out=held_out,
            options=options or {},
            reward_seconds=reward_seconds,
        )
        self._config = Config(task=settings, run=RunConfig(seed=seed)).resolve()
        if options and not isinstance(task, str):
            raise ConfigError(f"options belong to a task that is named; {task.name} was made with its own")
        self.task = load_task(self._config.task) if isinstance(task, str) else task
        if prompt is not None:
            self.task = replace(self.task, prompt=prompt)
        if self.task.tools:
            raise ConfigError(f"task {self.task.name} has tools: a conversation is more than one step")
        self.batch_size, self.group_size = batch_size, group_size
        self._collate = collate
        self.split = self.task.split(self._config.task, self._config.run.seed)
        self._asked = EnvState()
        self._make_spaces()

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Prompts, dict[str, Any]]:
        """Ask the next prompts; with a seed, from the start of the order that it stands for."""
        if Gym is not object:
            super().reset(seed=seed)  # type: ignore[misc]
        if seed is not None:
            self._config = replace(self._config, run=replace(self._config.run, seed=seed))
            self.split = self.task.split(self._config.task, self._config.run.seed)
            self._asked = EnvState(held_out=self._asked.held_out)
        self._ask()
        return self._prompts(), self._info()

    def step(
        self, answers: Sequence[Sequence[Answer]]
    ) -> tuple[Prompts, NDArray[np.float64], bool, bool, dict[str, Any]]:
        """Score a group of answers to each prompt and ask the next prompts.

        An answer is text, or the rollout that an agent made. One that could not be scored has reward nan.
        """
        examples = self._asked.examples
        sizes = {0 if isinstance(group, str) else len(group) for group in answers}
        if len(answers) != len(examples) or len(sizes) != 1 or 0 in sizes:
            raise ConfigError(
                f"a step takes a group of answers to each of the {len(examples)} prompts, all of one size"
            )
        scored = [self._score(e, group) for e, group in zip(examples, answers, strict=True)]
        rewards_BG = np.array([[reward_of(r) for r in group.rollouts] for group in scored])
        before = self.passes
        self._ask()
        parts = tuple(tuple(dict(rollout.rewards) for rollout in group.rollouts) for group in scored)
        info = {**self._info(), "rewards": parts, "right": self._right(scored)}
        return self._prompts(), rewards_BG, False, self.passes > before, info

    @contextmanager
    def eval_mode(self) -> Iterator[PromptEnv]:
        """Ask held-out examples, from their first; afterwards everything is as it was."""
        before, split, config = self._asked, self.split, self._config
        self._asked = EnvState(held_out=True)
        try:
            yield self
        finally:
            self._asked, self.split, self._config = before, split, config

    def __len__(self) -> int:
        """Examples in a pass over the training data, or over the held-out ones in `eval_mode`."""
        if self._asked.held_out:
            return len(self.split.held_out)
        if self.split.size is None:
            raise TypeError(f"task {self.task.name} makes examples without end")
        return self.split.size

    @property
    def passes(self) -> int:
        """Whole passes over the data since the seed was set."""
        endless = self.split.size is None and not self._asked.held_out
        return 0 if endless else self._asked.cursor // len(self)

    def close(self) -> None:
        """Nothing is held."""

    def _ask(self) -> None:
        now, count = self._asked, self.batch_size
        if now.held_out:
            rows = self.split.held_out
            if not rows:
                raise ConfigError(f"task {self.task.name} has no held-out examples")
            # The last batch of a pass may be short: no example counts twice.
            start = now.cursor % len(rows)
            examples = list(rows[start : start + count])
        else:
            examples, _ = self.split.take(now.cursor, count)
        self._asked = replace(now, examples=tuple(examples), cursor=now.cursor + len(examples))

    def _prompts(self) -> Prompts:
        return tuple(self.task.ask(example) for example in self._asked.examples)

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"passes": self.passes, "examples": self._asked.examples}
        return info if self._collate is None else {**info, "batch": self._collate(self._asked.examples)}

    def _score(self, example: Example, answers: Sequence[Answer]) -> Group:
        prompt = self.task.ask(example)
        rollouts = tuple(
            as_rollout(answer, prompt=prompt, member=member) for member, answer in enumerate(answers)
        )
        group = score_group(
            Group(example=example, rollouts=rollouts),
            rewards=self.task.rewards,
            weights=self.task.weights,
            seconds=self._config.task.reward_seconds,
        )
        return with_combined(group, kind=self._config.algo.combine, weights=self.task.weights)

    def _right(self, groups: Sequence[Group]) -> tuple[tuple[bool, ...], ...]:
        return tuple(tuple(self.task.is_right(rollout) for rollout in group.rollouts) for group in groups)

    def _make_spaces(self) -> None:
        if Gym is object:
            return

        self.observation_space = PromptSpace(self.batch_size)
        self.action_space = AnswerSpace(self.batch_size, self.group_size)


def as_rollout(answer: Answer, *, prompt: Prompt, member: int) -> Rollout:
    """An answer as rewards see it; of mere text nothing is known but the text."""
    if isinstance(answer, Rollout):
        return replace(answer, prompt=prompt, member=member)
    return Rollout(
        prompt=prompt,
        text=answer,
        tokens=(),
        trained=(),
        logprobs=(),
        entropies=(),
        prompt_length=0,
        finish="end",
        member=member,
    )


def reward_of(rollout: Rollout) -> float:
    return rollout.reward if rollout.error is None else float("nan")
