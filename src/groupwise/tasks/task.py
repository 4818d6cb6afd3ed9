"""Task: combines examples, a prompt and rewards. Also the keys of equal prompts."""

from __future__ import annotations

import difflib
import json
import math
import operator
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.config.schema import TaskConfig, ToolsConfig
from groupwise.errors import ConfigError
from groupwise.records import Example, ExampleStream, Message, Rollout, Split, plain, stored_form
from groupwise.rewards.runner import RewardFunction, weighted_sum
from groupwise.rollout.agent_rollouts import AgentFunction, check_agent
from groupwise.rollout.environment import (
    JOB,
    EnvironmentFactory,
    Openings,
    check_environment,
    environment_reward,
)
from groupwise.rollout.tool_rollouts import Tools
from groupwise.rollout.tools import MethodTools, tool_of
from groupwise.tasks.examples import (
    Columns,
    as_examples,
    held_out_split,
    is_dataset_dict,
    split_of,
    split_rows,
    split_stream,
)

Prompt = str | Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Everything that defines a training task."""

    name: str
    examples: Sequence[Mapping[str, Any]] | ExampleStream
    """Rows (see `load_examples`), or a stream that generates them."""
    prompt: Callable[[Example], Prompt] | None = None
    """Returns a string or chat messages. A final assistant message is a prefill to continue. None: the column
    `prompt`. A task with an environment or an agent has none: `reset` returns it, or the agent writes it."""
    rewards: Mapping[str, RewardFunction] = field(default_factory=dict)
    """Reward functions by name, in either style that `rewards.runner` describes. A single function or a list
    of functions also works: the rewards are then called what the functions are."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each reward in the sum. Default: 1. A reward of weight 0 is only a metric."""
    key: Callable[[Example], str] | None = None
    """Equal for equivalent examples, which stay on one side of the split. None: the prompt (`prompt_key`);
    with an environment, the whole example."""
    held_out: Sequence[Mapping[str, Any]] | None = None
    """Examples for evaluation. None: a part of `examples` is held out."""
    test_sets: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Further examples for evaluation, by the name of their test set."""
    accuracy: str | None = None
    """Name of the reward that measures accuracy. None: the first reward."""
    correct_at: float = 1.0
    """An answer counts as correct if its accuracy reward is at least this."""
    format: str | None = None
    """Name of the reward that is positive if an answer has the requested format."""
    columns: Columns = field(default_factory=dict)
    """Columns that rows must have; checked and renamed when rows are read from `task.data`."""
    predicted: Callable[[str], str | None] | None = None
    """Extracts the answer from a completion, for display and majority votes."""
    alike: Callable[[str, str], bool] = operator.eq
    """Whether two extracted answers count as equal in a majority vote."""
    ends_thinking: str | None = None
    """Text between thinking and answer in a completion, such as `</think>`."""
    gold: Callable[[Example], str] | None = None
    """Returns a right completion, used to test the rewards. None: the column `answer`."""
    difficulty: Callable[[Example], str | None] | None = None
    """Returns the difficulty class of an example; a curriculum tracks the success rate of each class."""
    worked: Callable[[Example, random.Random], str | Sequence[Message] | None] | None = None
    """Returns an answer to imitate in a warm start, or None if an example has none. Default: `gold`.

    A string is one turn. An answer that calls tools is a list of messages: assistant messages with
    `tool_calls`, a message of role `tool` for each result, and a final assistant message. Each continues the
    prefill of the prompt. In a conversation with an environment, messages of role `user` are its replies.
    """
    perfect: float | None = None
    """Reward of a perfect answer; perfect answers are logged."""
    tools: Sequence[Callable[..., Any]] = ()
    """Functions with type annotations that the policy may call."""
    state: Callable[[Example], Any] | None = None
    """Creates the state of a rollout. Tools receive it as `state`; rewards read `rollout.state`."""
    environment: EnvironmentFactory | None = None
    """A class or factory of environments, which reply to each turn of the policy: see `gw.Environment`. The
    sum of an environment's rewards is the reward `environment`, the first one of the task."""
    agent: AgentFunction | str | None = None
    """A program that owns its loop and calls the policy through an OpenAI client: a function of (example,
    base_url, api_key), or a command line. What it returns or prints is the text that rewards read."""
    environment_factory: Callable[[], Any] | None = None
    """A class or factory of objects whose public methods are tools, as in TRL (`rollout.tools.MethodTools`).
    It sets `tools` and `state`; `prompt` may be left out if examples have a column `prompt`."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a task requires a name")
        self.take_splits()
        if callable(self.rewards) or isinstance(self.rewards, list | tuple):
            object.__setattr__(self, "rewards", rewards_by_name(self.rewards, task=self.name))
        if self.environment_factory is not None:
            self.set_methods(self.environment_factory)
        if self.environment is not None:
            self.set_environment(self.environment)
        if self.agent is not None:
            self.set_agent(self.agent)
        if self.prompt is None:
            object.__setattr__(self, "prompt", column_prompt)
        if not callable(self.prompt):
            raise ConfigError(
                f"task {self.name}: prompt must be a function that takes an example; got {self.prompt!r}"
            )
        for function in self.tools:
            tool = tool_of(function)  # raises if the policy could not call it
            if tool.takes_state and self.state is None:
                raise ConfigError(f"task {self.name}: the tool {tool.name} takes a state; set `state` too")
        self.check_rewards()
        if not isinstance(self.examples, ExampleStream):
            rows = as_examples(self.examples, source=f"task {self.name}: examples")
            object.__setattr__(self, "examples", tuple(rows))
            if self.prompt is column_prompt and "prompt" not in rows[0]:
                raise ConfigError(f"task {self.name}: {NO_PROMPT}")
        if self.held_out is not None:
            rows = as_examples(self.held_out, source=f"task {self.name}: held_out")
            object.__setattr__(self, "held_out", tuple(rows))
        sets = {
            name: tuple(as_examples(rows, source=f"task {self.name}: test set {name}"))
            for name, rows in self.test_sets.items()
        }
        object.__setattr__(self, "test_sets", sets)

    def __repr__(self) -> str:
        """Return one short line; the examples of a task can be many megabytes."""
        rows = "a stream of" if isinstance(self.examples, ExampleStream) else len(self.examples)
        tools = f", tools {', '.join(tool_of(tool).name for tool in self.tools)}" if self.tools else ""
        return f"<Task {self.name}: {rows} examples, rewards {', '.join(self.rewards)}{tools}>"

    def set_environment(self, make: EnvironmentFactory) -> None:
        """Take the prompt and the first reward from the environment."""
        check_environment(make, task=self.name)
        if self.prompt is not None and not isinstance(self.prompt, Openings):
            raise ConfigError(
                f"task {self.name} has an environment, whose reset returns the prompt; leave out `prompt`"
            )
        if self.prompt is None:
            object.__setattr__(self, "prompt", Openings(make))
        if JOB not in self.rewards:
            object.__setattr__(self, "rewards", {JOB: environment_reward, **self.rewards})

    def set_methods(self, make: Any) -> None:
        """Take tools, state and reward from objects whose methods are tools."""
        if isinstance(make, Mapping) or not callable(make):
            raise ConfigError(
                f"task {self.name}: environment_factory must be one class or function without arguments; "
                f"define a task for each environment; got {make!r:.80}"
            )
        if self.environment is not None or self.state is not None:
            raise ConfigError(f"task {self.name}: environment_factory replaces environment and state")
        methods = MethodTools(make)
        rewards = dict(self.rewards)
        if methods.has_reward:
            rewards[methods.name] = reward_of_state
        object.__setattr__(self, "prompt", opened_by(methods, self.prompt or column_prompt))
        object.__setattr__(self, "tools", (*self.tools, *methods.tools))
        object.__setattr__(self, "state", methods.start)
        object.__setattr__(self, "rewards", rewards)
        object.__setattr__(self, "environment_factory", None)  # a copy of the task has its parts

    def take_splits(self) -> None:
        """Take training and held-out examples from the splits of a `DatasetDict`."""
        if is_dataset_dict(self.examples):
            test = held_out_split(self.examples) if self.held_out is None else None
            object.__setattr__(self, "held_out", self.held_out if test is None else test)
            object.__setattr__(self, "examples", split_of(self.examples, "train", source=self.name))
        if is_dataset_dict(self.held_out):
            object.__setattr__(self, "held_out", split_of(self.held_out, "test", source=self.name))

    def set_agent(self, agent: AgentFunction | str) -> None:
        """Check an agent. Examples are told apart by their content: the prompts are the agent's own."""
        check_agent(agent, task=self.name)
        for other in ("tools", "environment", "state"):
            if getattr(self, other):
                raise ConfigError(f"task {self.name} has an agent, which owns its loop; leave out `{other}`")
        if self.prompt is not None and self.prompt is not example_text:
            raise ConfigError(f"task {self.name} has an agent, which writes the prompts; leave out `prompt`")
        object.__setattr__(self, "prompt", example_text)

    @property
    def is_multi_turn(self) -> bool:
        """Whether a rollout may have several turns."""
        return bool(self.tools) or self.environment is not None or self.agent is not None

    @property
    def turns_by(self) -> str:
        """What makes its rollouts multi-turn, for messages."""
        return "an agent" if self.agent is not None else "tools or an environment"

    def multi_turn(self, config: ToolsConfig) -> Tools | None:
        """Return what rollouts with tools or an environment need, or None for other tasks."""
        return Tools.of(self.tools, config, state=self.state, environment=self.environment)

    def check_rewards(self) -> None:
        """Check that rewards are callable and that weights, accuracy and format name existing rewards."""
        if not isinstance(self.rewards, Mapping) or not self.rewards:
            raise ConfigError(f"task {self.name}: rewards must be a non-empty dict of names and functions")
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
                    f"task {self.name}: the weight of {name!r} must be a finite number; got {weight!r}"
                )
        if not isinstance(self.correct_at, int | float) or not math.isfinite(self.correct_at):
            raise ConfigError(f"task {self.name}: correct_at must be a number; got {self.correct_at!r}")
        for role, named in (("accuracy", self.accuracy), ("format", self.format)):
            if named is not None and named not in self.rewards:
                raise ConfigError(
                    f"task {self.name}: {role} names unknown reward {named!r}{closest(named, self.rewards)}"
                )

    def ask(self, example: Example) -> Prompt:
        """Return the prompt for an example, after checking it."""
        assert self.prompt is not None
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
        """Return whether a scored rollout counts as correct."""
        value = rollout.rewards.get(self.accuracy_reward)
        return rollout.error is None and value is not None and value >= self.correct_at

    @property
    def accuracy_reward(self) -> str:
        """The name of the reward that measures accuracy."""
        return self.accuracy or next(iter(self.rewards))

    def is_formatted(self, rollout: Rollout) -> bool:
        """Return whether a scored rollout has the requested format."""
        return self.format is not None and rollout.rewards.get(self.format, 0.0) > 0.0

    def is_perfect(self, rollout: Rollout) -> bool:
        """Return whether a scored rollout is perfect, regardless of how a run combines its rewards."""
        if self.perfect is None or rollout.error is not None:
            return False
        return weighted_sum(rollout.rewards, self.weights) >= self.perfect

    @property
    def hides_state(self) -> bool:
        """Whether examples with the same prompt may differ, as games with one opening do."""
        return self.environment is not None or isinstance(getattr(self.state, "__self__", None), MethodTools)

    def asks(self, example: Example) -> str:
        """Return what an example asks as a string: its prompt, and its columns if they may be hidden."""
        hidden = example_text(example) if self.hides_state else ""
        return prompt_text(self.ask(example)) + hidden

    def key_of(self, example: Example) -> str:
        """Return the key that equivalent examples share; the split keeps equal keys on one side."""
        if self.key is None:
            return example_text(example) if self.hides_state else prompt_key(self.ask(example))
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
        """Split the examples into training and held-out ones. The held-out ones do not depend on the seed.

        Builds every prompt once, so that a bad row fails before a model loads. A stream generates its rows
        later and must keep the sides disjoint; each step checks this.
        """
        if isinstance(self.examples, ExampleStream):
            if self.held_out is None:
                return split_stream(self.examples, config=config, seed=seed)
            raise ConfigError(f"task {self.name}: held_out requires rows as examples; a stream has its own")
        rows = self.outside_test_sets(as_examples(self.examples, source=self.name))
        held_out = None if self.held_out is None else as_examples(self.held_out, source=self.name)
        return split_rows(
            rows,
            held_out=held_out,
            asks=lambda example: prompt_text(self.ask(example)),
            key=self.key_of,
            hides_state=self.hides_state,
            config=config,
            seed=seed,
        )

    def outside_test_sets(self, rows: list[Example]) -> list[Example]:
        """Return the rows that no test set contains, so that none of them is trained on."""
        if not self.test_sets:
            return rows
        tested = {self.key_of(as_example(row)) for test_set in self.test_sets.values() for row in test_set}
        outside = [row for row in rows if self.key_of(row) not in tested]
        if not outside:
            raise ConfigError("no training examples left: the test sets contain every one")
        return outside


@dataclass(frozen=True, slots=True)
class RecordedExamples:
    """Finds the examples of a task among those that a run recorded, if prompts do not tell them apart."""

    task: Task
    keys: Mapping[str, str]
    """The key of each example, by `stored_form`. Of a stream, only the held-out examples are known."""
    held_out: frozenset[str]
    """Keys of the held-out examples."""

    @classmethod
    def of(cls, task: Task, *, held_out: Sequence[Example]) -> RecordedExamples:
        own = () if isinstance(task.examples, ExampleStream) else task.examples
        rows = map(as_example, (*own, *(task.held_out or ()), *held_out))  # what is held out comes last
        keys = {stored_form(row): task.key_of(row) for row in rows}
        return cls(task, keys, frozenset(map(task.key_of, held_out)))

    def key_of(self, recorded: Mapping[str, Any]) -> str:
        """Return the key of a recorded example."""
        form = stored_form(recorded)
        if form in self.keys:
            return self.keys[form]
        if isinstance(self.task.examples, ExampleStream):
            return self.task.key_of(Example(recorded))
        raise ConfigError(
            f"the example {recorded!r:.80} of the recorded answers is not in task {self.task.name}, so it "
            "may be a held-out one: use the task and the data of that run"
        )


NO_PROMPT = "set prompt to a function that takes an example, or give the examples a column `prompt`"


def column_prompt(example: Example) -> Prompt:
    """Return the column `prompt`: the prompt of a task that defines none."""
    if "prompt" not in example:
        raise ConfigError(NO_PROMPT)
    prompt: Prompt = example["prompt"]
    return prompt


def opened_by(methods: MethodTools, prompt: Callable[[Example], Prompt]) -> Callable[[Example], Prompt]:
    """Return the prompt with what `reset` returns at the end of its last message."""

    def opened(example: Example) -> Prompt:
        own = prompt(example) if prompt is not column_prompt or "prompt" in example else EMPTY_CHAT
        text = methods.opening(example)
        if not text or isinstance(own, str):
            return own + text if isinstance(own, str) else own
        return [*own[:-1], {**own[-1], "content": own[-1]["content"] + text}]

    return opened


EMPTY_CHAT = ({"role": "user", "content": ""},)


def reward_of_state(rollout: Rollout, example: Example) -> Any:
    """Return the reward that the rollout's object gives itself, or an awaitable of it."""
    return rollout.state.get_reward()


def correct_rule(task: Task) -> str:
    """Return what counts as a correct answer: "the reward answer is at least 1"."""
    return f"the reward {task.accuracy_reward} is at least {task.correct_at:g}"


def example_text(example: Example) -> str:
    """Return an example as text, in place of the prompt of a task with an agent."""
    return json.dumps(dict(example), sort_keys=True, ensure_ascii=False, default=plain)


def rewards_by_name(rewards: Any, *, task: str) -> dict[str, RewardFunction]:
    """Return a function or a list of functions as a dict by function name."""
    by_name: dict[str, RewardFunction] = {}
    for function in [rewards] if callable(rewards) else rewards:
        name = str(getattr(function, "__name__", type(function).__name__))
        if name in by_name:
            raise ConfigError(
                f"task {task}: two rewards are called {name!r}; pass a dict of names and functions"
            )
        by_name[name] = function
    return by_name


def as_example(row: Mapping[str, Any]) -> Example:
    return row if isinstance(row, Example) else Example(row)


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt as a string that does not depend on the key order of its messages."""
    if isinstance(prompt, str):
        return prompt
    return json.dumps([dict(message) for message in prompt], sort_keys=True, default=str)


def normalize_text(text: str) -> str:
    """Normalize case and whitespace of a text."""
    return " ".join(text.split()).casefold()


def prompt_key(prompt: Prompt) -> str:
    """Return a key that is equal for prompts that differ only in case and whitespace."""
    if isinstance(prompt, str):
        return normalize_text(prompt)
    plain = [
        {name: normalize_text(value) if isinstance(value, str) else value for name, value in message.items()}
        for message in prompt
    ]
    return prompt_text(plain)


def question_key(example: Example) -> str:
    """Return the key of an example by its column `question`, regardless of the rest of the prompt."""
    return normalize_text(str(example["question"]))


def is_prompt(prompt: object) -> bool:
    """Return whether this is a non-empty string or list of messages with role and content."""
    if isinstance(prompt, str):
        return bool(prompt)
    return (
        isinstance(prompt, Sequence)
        and bool(prompt)
        and all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in prompt)
    )


def closest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the closest match, else all choices."""
    choices = sorted(known)
    guess = difflib.get_close_matches(name, choices, n=1)
    return f"; did you mean {guess[0]!r}?" if guess else f"; it must be one of {', '.join(choices)}"
