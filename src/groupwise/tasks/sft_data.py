"""Demonstrations for supervised fine-tuning: from a file, from a run's best rollouts, or from a task.

`plan_warm_start` decides what to imitate and for how long. `Demonstrations` is a cursor over the rows.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from groupwise.config import read_config
from groupwise.config.schema import NO_TASK, Config
from groupwise.errors import ConfigError
from groupwise.records import Call, Example, ExampleStream, Message, Split, Turn
from groupwise.rewards.runner import weighted_sum
from groupwise.rollout.tool_calls import read_calls, write_call
from groupwise.rollout.tools import tool_of
from groupwise.tasks.examples import MAX_HELD_OUT_SHARE, by_fingerprint, load_examples, split_rows
from groupwise.tasks.registry import load_task
from groupwise.tasks.self_test import gold_of
from groupwise.tasks.task import Prompt, RecordedExamples, Task, is_prompt, prompt_key
from groupwise.tracking.rollout_files import read_rollouts
from groupwise.tracking.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The token ids of a sampled answer, so that training does not depend on tokenizing the text again."""

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    prompt_length: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> SampledTokens:
        return cls(tuple(row["tokens"]), tuple(row["trained"]), row["prompt_length"])

    @property
    def read_more(self) -> bool:
        """Whether the answer contains tokens that the policy did not sample: tool results."""
        return not all(self.trained[self.prompt_length :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A prompt and the answer to imitate."""

    prompt: Prompt
    completion: str | tuple[Message, ...]
    """Text that continues the prompt, or the messages that follow it; assistant messages are imitated."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools that the chat template shows."""
    sampled: SampledTokens | None = None
    turns: tuple[Turn, ...] = ()
    """The turns of an answer that calls tools, as in a rollout; `completion` is the last turn."""


def check_rows(rows: Sequence[Example], *, source: str) -> None:
    """Raise ConfigError, with the row number, for a row that is not a valid demonstration."""
    for number, row in enumerate(rows, start=1):
        problem = fault_in(row)
        if problem is not None:
            raise ConfigError(f"{source}, row {number}: {problem}")


def fault_in(row: Example) -> str | None:
    tools = tools_in(row)
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        return "tools must be a list of tool schemas, or such a list as JSON"
    if "messages" in row:
        if not is_chat(row["messages"]) or isinstance(row["messages"], str):
            return "messages must be a list of messages with role and content"
        if problem := tool_call_error(row["messages"]):
            return problem
        roles = [message["role"] for message in row["messages"]]
        if roles[-1] != "assistant" or roles[0] == "assistant":
            return "messages must begin with a user or system message and end with an assistant message"
        return None
    if not {"prompt", "completion"} <= row.keys():
        return f"a demonstration requires the columns prompt and completion, or messages; got {sorted(row)}"
    if not is_prompt(row["prompt"]):
        return "prompt must be a string or a list of messages with role and content"
    answers = row["completion"]
    if not is_chat(answers):
        return "completion must be a string or a list of messages with role and content"
    if not isinstance(answers, str) and (problem := tool_call_error(answers)):
        return problem
    if not isinstance(answers, str) and all(message["role"] != "assistant" for message in answers):
        return "completion has no assistant message: there is nothing to imitate"
    return None


def is_chat(messages: object) -> bool:
    """Return whether this is a string or a list of messages; tool calls may come without content."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return is_prompt(messages)
    return is_prompt(
        [{"content": None, **m} if isinstance(m, Mapping) and calls_in(m) else m for m in messages]
    )


def calls_in(message: Mapping[str, Any]) -> Any:
    return message.get("tool_calls") or ()


def tool_call_error(messages: Sequence[Message]) -> str | None:
    """Return what is wrong with the tool calls of a chat, or None."""
    for message in messages:
        calls = calls_in(message)
        if not isinstance(calls, Sequence) or any(read_tool_call(call) is None for call in calls):
            return (
                'tool_calls must be a list of {"function": {"name": …, "arguments": …}} whose arguments are '
                f"a JSON object; got {str(calls)[:80]}"
            )
    return None


def read_tool_call(call: Any) -> tuple[str, Mapping[str, Any]] | None:
    """Return the name and arguments of a tool call in OpenAI's format, or None if it is invalid."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return (function["name"], arguments) if isinstance(arguments, Mapping) else None


def written(message: Message) -> str:
    """Return an assistant message as text, with its tool calls in the format of rollouts."""
    text = message.get("content") or ""
    calls = [read_tool_call(call) for call in calls_in(message)]
    parts = [write_call(*call) for call in calls if call is not None]
    between = "\n" if text and parts and not text.endswith("\n") else ""
    return f"{text}{between}" + "\n".join(parts)


def turns_of(messages: Sequence[Message]) -> tuple[Turn, ...]:
    """Convert an answer of several turns to those of a rollout; raise ConfigError if it is invalid.

    Example: [assistant with a call, tool, assistant] -> two turns, the first with its call and the result. A
    message of role `user` is the reply of an environment.
    """
    turns: list[Turn] = []
    results: list[list[str]] = []
    replies: dict[int, str] = {}
    for message in messages:
        if message["role"] == "assistant":
            turns.append(Turn(text=written(message)))
            results.append([])
        elif message["role"] == "tool" and turns:
            results[-1].append(str(message["content"]))
        elif message["role"] == "user" and turns and len(turns) - 1 not in replies:
            replies[len(turns) - 1] = str(message["content"])
        else:
            raise ConfigError(
                "an answer must begin with an assistant message, followed by assistant and tool messages, or "
                "by assistant and user messages in turn"
            )
    for number, (turn, outputs) in enumerate(zip(turns, results, strict=True)):
        calls = read_calls(turn.text)
        if any(call.error for call in calls) or len(calls) != len(outputs):
            raise ConfigError(
                f"a turn has {len(calls)} tool calls but {len(outputs)} results: {turn.text[:80]!r}"
            )
        if bool(calls) + (number in replies) != (number < len(turns) - 1):
            raise ConfigError(
                "every turn except the last must call a tool or be followed by a user message, and the last "
                f"must not: {turn.text[:80]!r}"
            )
        pairs = zip(calls, outputs, strict=True)
        turn_calls = (Call(name=c.name, arguments=c.arguments, result=r) for c, r in pairs)
        turns[number] = Turn(text=turn.text, calls=tuple(turn_calls), observation=replies.get(number, ""))
    return tuple(turns)


def tools_in(row: Example) -> Any:
    """Return the tool schemas of a row; many datasets store them as JSON."""
    tools = row.get("tools") or ()
    if isinstance(tools, str):
        with suppress(ValueError, RecursionError):
            return json.loads(tools) or ()
    return tools


def of_row(row: Example) -> Demonstration:
    """Convert a checked row. The prompt of a chat ends before the first assistant message."""
    tools = tools_in(row)
    if "messages" in row:
        messages = [without_nulls(message) for message in row["messages"]]
        first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        return Demonstration(prompt=messages[:first], completion=tuple(messages[first:]), tools=tools)
    prompt, completion = row["prompt"], row["completion"]
    if not isinstance(prompt, str):
        prompt = [without_nulls(message) for message in prompt]
    if not isinstance(completion, str):
        completion = tuple(without_nulls(message) for message in completion)
    return Demonstration(prompt=prompt, completion=completion, tools=tools)


def without_nulls(message: Mapping[str, Any]) -> Message:
    """Drop null keys: Parquet gives every message every key, but templates test whether a key exists.

    Also parse the arguments of tool calls: OpenAI's format has them as JSON text, templates expect an object.
    """
    result = {key: value for key, value in message.items() if value is not None or key == "content"}
    if not calls_in(message):
        return result
    calls = [read_tool_call(call) for call in calls_in(message)]
    functions = [{"name": call[0], "arguments": call[1]} for call in calls if call is not None]
    as_objects = [{"type": "function", "function": function} for function in functions]
    return {"content": None, **result, "tool_calls": as_objects}


def of_rollout(row: Example, *, tools: Sequence[Mapping[str, Any]] = ()) -> Demonstration:
    """Convert a recorded rollout. `tools` are the tool schemas of its prompt."""
    return Demonstration(
        prompt=row["prompt"], completion=row["text"], tools=tools, sampled=SampledTokens.of(row)
    )


Make = Callable[[Example, random.Random], Demonstration | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """A cursor over demonstrations, and those held out to measure the loss."""

    split: Split
    make: Make
    seed: int
    dropped: int = 0
    """Number of rows dropped because they ask the same as a held-out example."""

    def take(self, cursor: int, count: int) -> tuple[list[Demonstration], int]:
        """Return the next `count` demonstrations and the cursor after them."""
        taken: list[Demonstration] = []
        while len(taken) < count:
            taken += self.between(cursor, cursor + 1)
            cursor += 1
        return taken, cursor

    def between(self, start: int, end: int) -> list[Demonstration]:
        """Return the demonstrations at a range of positions, skipping examples without an answer."""
        # The position seeds the generator, so a checkpoint does not need its state.
        made = (
            self.make(self.split.at(position), random.Random(f"demonstration {self.seed} {position}"))
            for position in range(start, end)
        )
        return [demonstration for demonstration in made if demonstration is not None]

    def held_out(self) -> list[Demonstration]:
        made = (
            self.make(example, random.Random(f"held out {example.fingerprint}"))
            for example in self.split.held_out
        )
        return [demonstration for demonstration in made if demonstration is not None]

    def steps_for(self, epochs: int, *, batch: int) -> int:
        """Return the number of steps for `epochs` passes over the demonstrations."""
        if self.split.size is None:
            raise ConfigError(
                "sft.passes requires finite data, but the task's examples are endless; set run.max_steps"
            )
        return max(1, -(-epochs * self.split.size // batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTPlan:
    """The plan of a warm start, made before a model loads."""

    config: Config
    task: Task | None
    """The task that provides answers if there is no data, and that measures accuracy."""
    demonstrations: Demonstrations

    @property
    def title(self) -> str:
        """The name of its data, or else of its task."""
        if self.config.sft.data is not None:
            return Path(self.config.sft.data).name.partition(".")[0]
        assert self.task is not None, "without data, a task is required"
        return self.task.name


SAME_TASK = ("name", "data", "columns", "test_data", "options", "weights", "correct_at")
"""Settings of a task that a warm start from the completions of a run takes over."""


def plan_warm_start(config: Config, *, task: Task | None = None, resumed: bool = False) -> SFTPlan:
    """Decide what to imitate and for how long. A resumed run keeps its batch size and ignored settings."""
    if not resumed:
        check_settings(config)
    if config.sft.from_run is not None and config.task.name == NO_TASK:
        # The run's own task decides which prompts are held out, and measures accuracy.
        own = read_config(RunFolder.open(config.sft.from_run).config).task
        same = {key: getattr(own, key) for key in SAME_TASK}
        config = replace(config, task=replace(config.task, **same))
    config = config.resolve()
    if task is None and config.task.name != NO_TASK:
        task = load_task(config.task)
    if task is None and config.sft.data is None:
        raise ConfigError("nothing to imitate: use --data FILE, --from-run RUN, or --task NAME")
    demonstrations = demonstrations_for(config, task)
    if (passes := config.sft.passes) is not None:
        size = demonstrations.split.size
        if size is not None and not resumed:  # a batch must not contain a row twice
            config = replace(config, sft=replace(config.sft, batch=min(config.sft.batch, size)))
        steps = demonstrations.steps_for(passes, batch=config.sft.batch)
        config = replace(config, run=replace(config.run, max_steps=steps))
    return SFTPlan(config=config, task=task, demonstrations=demonstrations)


def check_settings(config: Config) -> None:
    """Refuse settings that supervised fine-tuning would ignore."""
    given = {
        "run.callbacks": config.run.callbacks,
        "rollout.logits_processor": config.rollout.logits_processor,
        "rollout.json_schema": config.rollout.json_schema,
        "rollout.grammar": config.rollout.grammar,
    }
    for setting, value in given.items():
        if value:
            raise ConfigError(f"{setting} requires groupwise train; remove it from the settings of this run")


def demonstrations_for(config: Config, task: Task | None) -> Demonstrations:
    """Return the demonstrations that the configuration selects."""
    held_out = set() if task is None else held_out_prompts(config, task)
    if config.sft.from_run is not None:
        tools = () if task is None else schemas_of(task)
        best = best_answers(config, weights={} if task is None else task.weights, task=task)
        rows = [Example({key: row[key] for key in ROLLOUT_COLUMNS}) for row in best]
        return of_rows(rows, config=config, held_out=held_out, make=partial(of_rollout, tools=tools))
    if config.sft.data is not None:
        rows = load_examples(config.sft.data)
        check_rows(rows, source=config.sft.data)
        return of_rows(rows, config=config, held_out=held_out, make=of_row)
    assert task is not None, "without data, a task is required"
    return of_task(task, config=config)


def held_out_of(config: Config, task: Task) -> tuple[Example, ...]:
    return task.split(config.task, config.run.seed).held_out


def held_out_prompts(config: Config, task: Task) -> set[str]:
    """Return the keys of the prompts that only held-out examples have."""
    split = task.split(config.task, config.run.seed)
    prompts = {prompt_key(task.ask(example)) for example in split.held_out}
    if not task.hides_state:
        return prompts
    train = split.take(0, 64)[0] if isinstance(split.train, ExampleStream) else split.train
    return prompts - {prompt_key(task.ask(example)) for example in train}


def of_task(task: Task, *, config: Config) -> Demonstrations:
    """Return worked answers to the task's training examples, or else its gold answers."""
    if task.environment is not None and task.worked is None:
        raise ConfigError(
            f"task {task.name} has an environment but no worked answers; set worked=… in the task, or use "
            "--data with chats, or --from-run"
        )
    if task.agent is not None:
        raise ConfigError(
            f"task {task.name} has an agent, and its examples have no conversations to imitate; use --data "
            "with chats"
        )
    if task.tools and task.worked is None:
        raise ConfigError(
            f"task {task.name} has tools but no worked answers. Its gold answers call no tools, so imitating "
            "them would teach the policy not to; set worked=… in the task, or use --data"
        )
    tools = schemas_of(task)

    def make(example: Example, rng: random.Random) -> Demonstration | None:
        answer = gold_of(task, example) if task.worked is None else task.worked(example, rng)
        if answer is None:
            return None
        if isinstance(answer, str):
            return Demonstration(prompt=task.ask(example), completion=answer, tools=tools)
        if not is_chat(answer) or tool_call_error(answer):
            raise ConfigError(
                f"task {task.name}: worked must return a string or a list of messages with role and content; "
                f"got {str(answer)[:80]!r}"
            )
        try:
            turns = turns_of(answer)
        except ConfigError as error:
            raise ConfigError(f"task {task.name}: worked: {error}") from None
        return Demonstration(prompt=task.ask(example), completion=turns[-1].text, tools=tools, turns=turns)

    split = task.split(config.task, config.run.seed)
    probe = Demonstrations(split=split, make=make, seed=config.run.seed)
    tries = [make(split.at(position), random.Random(position)) for position in range(64)]
    if not any(tries):
        raise ConfigError(f"task {task.name}: none of its first 64 examples has a worked answer")
    return probe


def schemas_of(task: Task) -> tuple[Mapping[str, Any], ...]:
    """Return the schemas of a task's tools."""
    return tuple(tool_of(function).schema for function in task.tools)


def of_rows(
    rows: Sequence[Example], *, config: Config, held_out: set[str], make: Callable[[Example], Demonstration]
) -> Demonstrations:
    """Return the demonstrations of the rows, without those that ask the same as a held-out example."""
    prompts = {id(row): prompt_key(make(row).prompt) for row in rows}  # each is used several times

    def asks(row: Example) -> str:
        return prompts[id(row)]

    unseen = [row for row in rows if asks(row) not in held_out]
    if not unseen:
        raise ConfigError("no demonstrations left: every one asks the same as a held-out example")
    loss_rows = [] if config.sft.from_run else rows_for_loss(unseen, asks=asks, most=config.task.held_out)
    split = split_rows(unseen, held_out=loss_rows, asks=asks, config=config.task, seed=config.run.seed)
    return Demonstrations(
        split=split,
        make=lambda example, _: make(example),
        seed=config.run.seed,
        dropped=len(rows) - len(unseen) + split.dropped - len(loss_rows),
    )


def rows_for_loss(rows: Sequence[Example], *, asks: Callable[[Example], str], most: int) -> list[Example]:
    """Return the rows to measure the loss on, by smallest fingerprint: all answers to a prompt or none."""
    unique = by_fingerprint(rows)
    answers: dict[str, list[Example]] = {}
    for _, row in sorted(unique.items()):
        answers.setdefault(asks(row), []).append(row)
    chosen: list[Example] = []
    for group in answers.values():
        if len(chosen) + len(group) <= min(most, int(len(unique) * MAX_HELD_OUT_SHARE)):
            chosen += group
    return chosen


def best_answers(
    config: Config, *, weights: Mapping[str, float], task: Task | None = None
) -> list[dict[str, Any]]:
    """Rejection sampling: return the best recorded answers to each prompt, if they are good enough.

    If examples of `task` with the same prompt may differ, these are the best answers to each example that is
    not held out, and each row has the `key` of its example.

    The threshold is `sft.min_reward`, by default the highest reward of the run. Failed and truncated answers
    are excluded. Among equal rewards the latest answer wins, because the policy was better then.
    """
    assert config.sft.from_run is not None
    run = RunFolder.open(config.sft.from_run)
    paths = sorted(run.rollouts.glob("step-*.parquet"))
    rows = [row for path in paths for row in read_rollouts(path)]
    if read_config(run.config).algo.combine != "sum":  # other rewards are relative to their group
        rows = [row | {"reward": weighted_sum(row["rewards"], weights)} for row in rows]
    ended = [row for row in rows if row["error"] is None and row["finish"] != "length"]
    if task is not None and task.hides_state:
        examples = RecordedExamples.of(task, held_out=held_out_of(config, task))
        ended = [row | {"key": examples.key_of(row["example"])} for row in ended]
        ended = [row for row in ended if row["key"] not in examples.held_out]
    if not ended:
        raise ConfigError(f"{run.path} has no complete recorded answer: there is nothing to imitate")
    best = max(row["reward"] for row in ended)
    least = best if config.sft.min_reward is None else config.sft.min_reward
    good = sorted((row for row in ended if row["reward"] >= least), key=lambda r: (-r["reward"], -r["step"]))
    if not good:
        raise ConfigError(
            f"no answer in {run.path} has a reward of at least {least:g}; the best has {best:g}"
        )
    chosen: list[dict[str, Any]] = []
    count: Counter[str] = Counter()
    seen: set[tuple[Any, ...]] = set()
    for row in good:
        prompt = f"{row['prompt']}{row.get('key', '')}"
        # The text of an answer with tools is its last turn: answers may differ in the turns before.
        turns = tuple(row["tokens"]) if SampledTokens.of(row).read_more else ()
        answer = (prompt, row["text"], turns)
        if count[prompt] < config.sft.per_prompt and answer not in seen:
            count[prompt] += 1
            seen.add(answer)
            chosen.append(row)
    return chosen


ROLLOUT_COLUMNS = ("prompt", "text", "tokens", "trained", "prompt_length")
