"""A task: examples, a prompt and rewards. The only place where the three meet."""

from __future__ import annotations

import difflib
import json
import math
import operator
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.config.schema import TaskConfig
from groupwise.errors import ConfigError
from groupwise.records import Example, Message, Rollout
from groupwise.rewards.runner import RewardFunction, weighted_sum
from groupwise.rollout.tools import tool_of
from groupwise.tasks.examples import Columns, ExampleStream, Split, as_examples, split_rows, split_stream

Prompt = str | Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to learn, in one place."""

    name: str
    examples: Sequence[Mapping[str, Any]] | ExampleStream
    """Rows (see `load_examples`), or a stream that makes them."""
    prompt: Callable[[Example], Prompt]
    """A string, or chat messages; a last message of the assistant's is a prefill to continue."""
    rewards: Mapping[str, RewardFunction]
    """Functions of either style that `rewards.score` describes, by name."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of each reward in the sum; 1 where not given, 0 for a mere metric."""
    key: Callable[[Example], str] | None = None
    """The same for examples that ask the same: they stay on one side of the split. None: `same_prompt`."""
    held_out: Sequence[Mapping[str, Any]] | None = None
    """Examples for evaluation. None: some are kept back from `examples`."""
    accuracy: str | None = None
    """The reward that says whether an answer is right (1 or more). None: the first."""
    format: str | None = None
    """The reward that says whether an answer has the form that was asked for (more than 0)."""
    columns: Columns = field(default_factory=dict)
    """What rows must hold, checked and renamed when they are read from `task.data`."""
    predicted: Callable[[str], str | None] | None = None
    """The answer that a completion states, to show and to vote on."""
    alike: Callable[[str, str], bool] = operator.eq
    """Whether two stated answers are one and the same, when they are counted as votes."""
    ends_thinking: str | None = None
    """What completions have between thinking and answering, such as `</think>`."""
    gold: Callable[[Example], str] | None = None
    """A completion that is right, by which rewards are tested. None: the column `answer` as it stands."""
    difficulty: Callable[[Example], str | None] | None = None
    """What makes examples alike to a curriculum, which learns how often each kind succeeds."""
    worked: Callable[[Example, random.Random], str | Sequence[Message] | None] | None = None
    """An answer to imitate in a warm start, or None where an example has none. None: the gold.

    Text is one turn. An answer that calls tools is a list of messages: the assistant's with `tool_calls`,
    one of role `tool` for each result, and the assistant's last word. Each continues what the prompt begins.
    """
    perfect: float | None = None
    """The reward of an answer with nothing left to improve; each one is kept to read."""
    tools: Sequence[Callable[..., Any]] = ()
    """Typed functions that the policy may call."""
    state: Callable[[Example], Any] | None = None
    """Makes for each rollout what its tools work on, in a parameter `state`; rewards see `rollout.state`."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a task needs a name")
        if not callable(self.prompt):
            raise ConfigError(
                f"task {self.name}: prompt must be a function of an example; got {self.prompt!r}"
            )
        for function in self.tools:
            tool = tool_of(function)  # refuses what the policy could not call
            if tool.takes_state and self.state is None:
                raise ConfigError(f"task {self.name}: the tool {tool.name} takes a state; give `state` too")
        self.check_rewards()
        if not isinstance(self.examples, ExampleStream):
            rows = as_examples(self.examples, source=f"task {self.name}: examples")
            object.__setattr__(self, "examples", tuple(rows))
        if self.held_out is not None:
            rows = as_examples(self.held_out, source=f"task {self.name}: held_out")
            object.__setattr__(self, "held_out", tuple(rows))

    def check_rewards(self) -> None:
        """Refuse rewards that cannot be called and weights or accuracy that name none of them."""
        if not isinstance(self.rewards, Mapping) or not self.rewards:
            raise ConfigError(f"task {self.name}: rewards must be a dict with at least one name and function")
        for name, function in self.rewards.items():
            if not callable(function):
                raise ConfigError(f"task {self.name}: reward {name!r} must be a function; got {function!r}")
        for name, weight in self.weights.items():
            if name not in self.rewards:
                raise ConfigError(
                    f"task {self.name}: weight for unknown reward {name!r}{closest(name, self.rewards)}"
                )
            if not isinstance(weight, int | float) or not math.isfinite(weight):
                raise ConfigError(
                    f"task {self.name}: the weight of {name!r} must be a number; got {weight!r}"
                )
        for role, named in (("accuracy", self.accuracy), ("format", self.format)):
            if named is not None and named not in self.rewards:
                raise ConfigError(
                    f"task {self.name}: {role} names unknown reward {named!r}{closest(named, self.rewards)}"
                )

    def ask(self, example: Example) -> Prompt:
        """Return the prompt for an example, checked."""
        try:
            prompt = self.prompt(example)
        except ConfigError:
            raise
        except Exception as error:
            raise self._failed("prompt", error) from error
        if is_prompt(prompt):
            return prompt
        raise ConfigError(
            f"task {self.name}: prompt must return a string or a list of messages with role and content; "
            f"got {str(prompt)[:80]!r}"
        )

    def is_right(self, rollout: Rollout) -> bool:
        """Tell whether a scored rollout counts as right in accuracy."""
        judge = self.accuracy or next(iter(self.rewards))
        return rollout.error is None and rollout.rewards.get(judge, 0.0) >= 1.0

    def is_formatted(self, rollout: Rollout) -> bool:
        """Tell whether a scored rollout has the form that was asked for."""
        return self.format is not None and rollout.rewards.get(self.format, 0.0) > 0.0

    def is_perfect(self, rollout: Rollout) -> bool:
        """Tell whether a scored rollout has nothing left to improve, however a run combines its rewards."""
        if self.perfect is None or rollout.error is not None:
            return False
        return weighted_sum(rollout.rewards, self.weights) >= self.perfect

    def asks(self, example: Example) -> str:
        """Return what the policy sees of an example: two that look the same to it are the same."""
        return what_is_asked(self.ask(example))

    def key_of(self, example: Example) -> str:
        """Return what examples that ask the same have in common, by which training rows are kept apart."""
        if self.key is None:
            return same_prompt(self.ask(example))
        try:
            return self.key(example)
        except ConfigError:
            raise
        except Exception as error:
            raise self._failed("key", error) from error

    def _failed(self, function: str, error: Exception) -> ConfigError:
        detail = error.args[0] if isinstance(error, KeyError) and error.args else error
        return ConfigError(
            f"task {self.name}: {function} failed on an example: {detail} ({type(error).__name__})"
        )

    def split(self, config: TaskConfig, seed: int) -> Split:
        """Divide the examples into training and held-out ones, the latter the same for every seed.

        Every prompt is made once here, so that a row that has none is found before a model loads. A stream
        makes its rows later and promises to keep the sides apart; each step checks that.
        """
        if isinstance(self.examples, ExampleStream):
            if self.held_out is None:
                return split_stream(self.examples, config=config, seed=seed)
            raise ConfigError(f"task {self.name}: held_out goes with rows; a stream brings its own")
        rows = as_examples(self.examples, source=self.name)
        held_out = None if self.held_out is None else as_examples(self.held_out, source=self.name)
        return split_rows(rows, held_out=held_out, asks=self.asks, key=self.key_of, config=config, seed=seed)


def what_is_asked(prompt: Prompt) -> str:
    """The same for the same prompt, in whatever order the keys of its messages come."""
    if isinstance(prompt, str):
        return prompt
    return json.dumps([dict(message) for message in prompt], sort_keys=True, default=str)


def same_text(text: str) -> str:
    """The same for texts that differ only in upper and lower case and in white space."""
    return " ".join(text.split()).casefold()


def same_prompt(prompt: Prompt) -> str:
    """The same for prompts that differ only in upper and lower case and in white space."""
    if isinstance(prompt, str):
        return same_text(prompt)
    plain = [
        {name: same_text(value) if isinstance(value, str) else value for name, value in message.items()}
        for message in prompt
    ]
    return what_is_asked(plain)


def same_question(example: Example) -> str:
    """The key of tasks that ask a question in words, whatever stands around it in their prompts."""
    return same_text(str(example["question"]))


def is_prompt(prompt: object) -> bool:
    """Tell whether this is text, or messages with role and content, and not empty."""
    if isinstance(prompt, str):
        return bool(prompt)
    return (
        isinstance(prompt, Sequence)
        and bool(prompt)
        and all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in prompt)
    )


def closest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the best guess, else every choice."""
    choices = sorted(known)
    guess = difflib.get_close_matches(name, choices, n=1)
    return f"; did you mean {guess[0]!r}?" if guess else f"; it must be one of {', '.join(choices)}"
