"""A Gymnasium environment over a task, with its spaces of prompts and answers.

The spaces are defined here because Gymnasium's text spaces support neither chats nor groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from groupwise.algo.reward_combination import with_combined
from groupwise.config.coerce import between
from groupwise.config.schema import Config, RunConfig, TaskConfig
from groupwise.errors import ConfigError
from groupwise.evaluate.held_out import score_groups
from groupwise.records import Example, Group, Rollout
from groupwise.tasks import Task, load_task
from groupwise.tasks.task import Prompt, is_prompt

T = TypeVar("T")

if TYPE_CHECKING:
    from gymnasium import Space

    Gym = object
else:
    try:
        from gymnasium import Env as Gym
        from gymnasium import Space
    except ImportError:  # the environment works without Gymnasium, but has no spaces then
        Gym = object

        class Space(Generic[T]):
            """Stands in for Gymnasium's class."""


WORDS = ("one", "two", "three", "plus", "minus", "is", "<answer>", "</answer>", "?")


class PromptSpace(Space[tuple[Any, ...]]):
    """Batches of prompts, each a string or a chat."""

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
    """A group of answers for each prompt of a batch, each a string or a rollout of an agent."""

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


class PromptBatch(tuple[Prompt, ...]):
    """A tuple of prompts with their task, where `Agent.get_action` finds the tools and the environment."""

    task: Task
    examples: tuple[Example, ...]

    @classmethod
    def of(cls, task: Task, examples: Sequence[Example]) -> PromptBatch:
        batch = cls(task.ask(example) for example in examples)
        batch.task, batch.examples = task, tuple(examples)
        return batch

    def __getitem__(self, index: Any) -> Any:
        """Return one prompt; a slice is a batch of the same task."""
        if not isinstance(index, slice):
            return super().__getitem__(index)
        return PromptBatch.of(self.task, self.examples[index])

    def __reduce__(self) -> Any:
        return tuple, (list(self),)  # a task cannot be pickled

    def __deepcopy__(self, memo: Any) -> PromptBatch:
        return self  # immutable


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvState:
    """The complete position of the environment, so that it can be saved and restored."""

    examples: tuple[Example, ...] = ()
    """Examples of the current prompts; the next answers are scored against them."""
    cursor: int = 0
    """Number of examples taken since the seed was set."""
    held_out: bool = False


class PromptEnv(Gym):
    """Returns a task's prompts in batches and scores a group of answers for each."""

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
        """Create an environment.

        task: a `Task`, or the name of a built-in one
        options: options of a built-in task
        prompt: replaces the task's prompt function
        collate: makes `info["batch"]` out of a batch of examples
        group_size: group size of sampled actions; `step` accepts groups of any size
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
            raise ConfigError(
                f"options apply to built-in tasks only; pass them to {task.name} when you create it"
            )
        self.task = load_task(self._config.task) if isinstance(task, str) else task
        if prompt is not None:
            self.task = replace(self.task, prompt=prompt)
        self.batch_size, self.group_size = batch_size, group_size
        self._collate = collate
        self.split = self.task.split(self._config.task, self._config.run.seed)
        self._state = EnvState()
        self._make_spaces()

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[PromptBatch, dict[str, Any]]:
        """Return the next prompts; with a seed, restart from the beginning of its order."""
        if Gym is not object:
            super().reset(seed=seed)  # type: ignore[misc]
        if seed is not None:
            self._config = replace(self._config, run=replace(self._config.run, seed=seed))
            self.split = self.task.split(self._config.task, self._config.run.seed)
            self._state = EnvState(held_out=self._state.held_out)
        self._advance()
        return self._prompts(), self._info()

    def step(
        self, answers: Sequence[Sequence[Answer]]
    ) -> tuple[PromptBatch, NDArray[np.float64], bool, bool, dict[str, Any]]:
        """Score a group of answers for each prompt and return the next prompts.

        An answer is a string or a rollout of an agent. An answer that could not be scored has reward NaN. If
        the task has tools or an environment, a rollout is the whole conversation, and a string is refused.
        """
        examples = self._state.examples
        sizes = {0 if isinstance(group, str) else len(group) for group in answers}
        if len(answers) != len(examples) or len(sizes) != 1 or 0 in sizes:
            raise ConfigError(
                f"step expects one group of answers for each of the {len(examples)} prompts, of equal size"
            )
        scored = self._score([self._group(e, group) for e, group in zip(examples, answers, strict=True)])
        rewards_BG = np.array([[reward_of(r) for r in group.rollouts] for group in scored])
        before = self.passes
        self._advance()
        parts = tuple(tuple(dict(rollout.rewards) for rollout in group.rollouts) for group in scored)
        info = {**self._info(), "rewards": parts, "right": self._right(scored)}
        return self._prompts(), rewards_BG, False, self.passes > before, info

    @contextmanager
    def eval_mode(self) -> Iterator[PromptEnv]:
        """Use the held-out examples, from the first; restore the environment's state on exit."""
        before, split, config = self._state, self.split, self._config
        self._state = EnvState(held_out=True)
        try:
            yield self
        finally:
            self._state, self.split, self._config = before, split, config

    def __len__(self) -> int:
        """The number of training examples, or of held-out examples in `eval_mode`."""
        if self._state.held_out:
            return len(self.split.held_out)
        if self.split.size is None:
            raise TypeError(f"task {self.task.name} generates examples without end: it has no length")
        return self.split.size

    @property
    def passes(self) -> int:
        """Complete passes over the data since the seed was set."""
        endless = self.split.size is None and not self._state.held_out
        return 0 if endless else self._state.cursor // len(self)

    def close(self) -> None:
        """Do nothing: the environment holds no resources."""

    def _advance(self) -> None:
        state, count = self._state, self.batch_size
        if state.held_out:
            rows = self.split.held_out
            if not rows:
                raise ConfigError(f"task {self.task.name} has no held-out examples")
            # The last batch of a pass may be shorter, so that no example counts twice.
            start = state.cursor % len(rows)
            examples = list(rows[start : start + count])
        else:
            examples, _ = self.split.take(state.cursor, count)
        self._state = replace(state, examples=tuple(examples), cursor=state.cursor + len(examples))

    def _prompts(self) -> PromptBatch:
        return PromptBatch.of(self.task, self._state.examples)

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"passes": self.passes, "examples": self._state.examples}
        return info if self._collate is None else {**info, "batch": self._collate(self._state.examples)}

    def _group(self, example: Example, answers: Sequence[Answer]) -> Group:
        prompt = self.task.ask(example)
        if self.task.is_multi_turn and not all(getattr(answer, "turns", ()) for answer in answers):
            raise ConfigError(
                f"task {self.task.name} has tools or an environment: step needs the rollouts of an agent; "
                "pass it the prompts of the environment unchanged"
            )
        rollouts = tuple(
            as_rollout(answer, prompt=prompt, member=member) for member, answer in enumerate(answers)
        )
        return Group(example=example, rollouts=rollouts)

    def _score(self, groups: Sequence[Group]) -> list[Group]:
        """Score all groups; asynchronous rewards of several answers run at the same time."""
        limits, combine = self._config.task, self._config.algo.combine
        scored = score_groups(
            self.task, groups, seconds=limits.reward_seconds, concurrency=limits.reward_concurrency
        )
        return [with_combined(group, kind=combine, weights=self.task.weights) for group in scored]

    def _right(self, groups: Sequence[Group]) -> tuple[tuple[bool, ...], ...]:
        return tuple(tuple(self.task.is_right(rollout) for rollout in group.rollouts) for group in groups)

    def _make_spaces(self) -> None:
        if Gym is object:
            return

        self.observation_space = PromptSpace(self.batch_size)
        self.action_space = AnswerSpace(self.batch_size, self.group_size)


def as_rollout(answer: Answer, *, prompt: Prompt, member: int) -> Rollout:
    """Return an answer as a rollout for the rewards; a string has no tokens."""
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
