"""One demonstration: what a row of a file, or a recorded answer, shows."""

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
from groupwise.records import Call, Example, Message, Turn
from groupwise.rewards.runner import weighted_sum
from groupwise.rollout.tool_calls import read_calls, write_call
from groupwise.rollout.tools import tool_of
from groupwise.tasks.examples import MAX_HELD_OUT_SHARE, Split, by_fingerprint, load_examples, split_rows
from groupwise.tasks.registry import load_task
from groupwise.tasks.self_test import gold_of
from groupwise.tasks.task import Prompt, Task, is_prompt, same_prompt
from groupwise.tracking.run_files import read_rollouts
from groupwise.tracking.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """An answer as it was sampled: training on these ids leaves nothing to a tokenizer's second thoughts."""

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    prompt_length: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> SampledTokens:
        return cls(tuple(row["tokens"]), tuple(row["trained"]), row["prompt_length"])

    @property
    def read_more(self) -> bool:
        """Whether the policy was given more to read after the prompt: what its tools answered."""
        return not all(self.trained[self.prompt_length :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A prompt and what to answer."""

    prompt: Prompt
    completion: str | tuple[Message, ...]
    """Text that continues the prompt; or the messages that follow it, each of the assistant's imitated."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Descriptions of the tools that the chat template shows."""
    sampled: SampledTokens | None = None
    turns: tuple[Turn, ...] = ()
    """The turns of an answer that calls tools, laid out as a rollout is; the completion is the last one's."""


def check_rows(rows: Sequence[Example], *, source: str) -> None:
    """Refuse a row that is no demonstration, with its number."""
    for number, row in enumerate(rows, start=1):
        fault = fault_in(row)
        if fault is not None:
            raise ConfigError(f"{source}, row {number}: {fault}")


def fault_in(row: Example) -> str | None:
    tools = tools_in(row)
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        return "tools must be a list of descriptions, or one as JSON"
    if "messages" in row:
        if not is_chat(row["messages"]) or isinstance(row["messages"], str):
            return "messages must be a list of messages with role and content"
        if fault := fault_in_calls(row["messages"]):
            return fault
        roles = [message["role"] for message in row["messages"]]
        if roles[-1] != "assistant" or roles[0] == "assistant":
            return "messages must begin with the user's (or the system's) and end with the assistant's"
        return None
    if not {"prompt", "completion"} <= row.keys():
        return f"a demonstration has the columns prompt and completion, or messages; this has {sorted(row)}"
    if not is_prompt(row["prompt"]):
        return "prompt must be text, or messages with role and content"
    answers = row["completion"]
    if not is_chat(answers):
        return "completion must be text, or messages with role and content"
    if not isinstance(answers, str) and (fault := fault_in_calls(answers)):
        return fault
    if not isinstance(answers, str) and all(message["role"] != "assistant" for message in answers):
        return "completion has no message of the assistant's: there is nothing to imitate"
    return None


def is_chat(messages: object) -> bool:
    """Tell whether this is text, or messages; one with tool calls may come without content."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return is_prompt(messages)
    return is_prompt(
        [{"content": None, **m} if isinstance(m, Mapping) and calls_in(m) else m for m in messages]
    )


def calls_in(message: Mapping[str, Any]) -> Any:
    return message.get("tool_calls") or ()


def fault_in_calls(messages: Sequence[Message]) -> str | None:
    """Say what is wrong with the tool calls of a chat, if anything is."""
    for message in messages:
        calls = calls_in(message)
        if not isinstance(calls, Sequence) or any(read_tool_call(call) is None for call in calls):
            return (
                'tool_calls must be a list of {"function": {"name": …, "arguments": …}} with the arguments '
                f"a JSON object; got {str(calls)[:80]}"
            )
    return None


def read_tool_call(call: Any) -> tuple[str, Mapping[str, Any]] | None:
    """Return the name and arguments of a call as OpenAI's interface has them, None where it is no call."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return (function["name"], arguments) if isinstance(arguments, Mapping) else None


def written(message: Message) -> str:
    """Return a message of the assistant's as text, its tool calls in the form that rollouts read."""
    text = message.get("content") or ""
    calls = [read_tool_call(call) for call in calls_in(message)]
    parts = [write_call(*call) for call in calls if call is not None]
    between = "\n" if text and parts and not text.endswith("\n") else ""
    return f"{text}{between}" + "\n".join(parts)


def turns_of(messages: Sequence[Message]) -> tuple[Turn, ...]:
    """Read an answer that calls tools as the turns of a rollout, or raise ConfigError.

    Example: [assistant with a call, tool, assistant] -> two turns, the first with its call and the result.
    """
    turns: list[Turn] = []
    results: list[list[str]] = []
    for message in messages:
        if message["role"] == "assistant":
            turns.append(Turn(text=written(message)))
            results.append([])
        elif message["role"] == "tool" and turns:
            results[-1].append(str(message["content"]))
        else:
            raise ConfigError("an answer has messages of the roles assistant and tool, the assistant's first")
    for number, (turn, given) in enumerate(zip(turns, results, strict=True)):
        calls = read_calls(turn.text)
        if any(call.error for call in calls) or len(calls) != len(given):
            raise ConfigError(
                f"a turn has {len(calls)} tool calls and {len(given)} results: {turn.text[:80]!r}"
            )
        if bool(calls) == (number == len(turns) - 1):
            raise ConfigError(
                f"every turn but the last calls a tool, and the last does not: {turn.text[:80]!r}"
            )
        made = (Call(name=c.name, arguments=c.arguments, result=r) for c, r in zip(calls, given, strict=True))
        turns[number] = Turn(text=turn.text, calls=tuple(made))
    return tuple(turns)


def tools_in(row: Example) -> Any:
    """Return what a row says of tools; many datasets hold it as JSON."""
    tools = row.get("tools") or ()
    if isinstance(tools, str):
        with suppress(ValueError, RecursionError):
            return json.loads(tools) or ()
    return tools


def of_row(row: Example) -> Demonstration:
    """Read a checked row; of a chat, the prompt is what precedes the assistant's first message."""
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
    """Parquet gives every message every key; templates ask whether a key is there.

    OpenAI's interface has the arguments of a call as JSON text; templates read them as an object.
    """
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    if not calls_in(message):
        return kept
    calls = [read_tool_call(call) for call in calls_in(message)]
    functions = [{"name": call[0], "arguments": call[1]} for call in calls if call is not None]
    as_objects = [{"type": "function", "function": function} for function in functions]
    return {"content": None, **kept, "tool_calls": as_objects}


def of_rollout(row: Example, *, tools: Sequence[Mapping[str, Any]] = ()) -> Demonstration:
    """Read an answer that was recorded. `tools`: what its prompt told of them."""
    return Demonstration(
        prompt=row["prompt"], completion=row["text"], tools=tools, sampled=SampledTokens.of(row)
    )


Make = Callable[[Example, random.Random], Demonstration | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """A cursor through demonstrations, and those kept back to measure the loss on."""

    split: Split
    make: Make
    seed: int
    dropped: int = 0
    """Rows left out because they ask what a held-out example asks."""

    def take(self, cursor: int, count: int) -> tuple[list[Demonstration], int]:
        """Return the next `count` demonstrations and the cursor after them."""
        taken: list[Demonstration] = []
        while len(taken) < count:
            taken += self.between(cursor, cursor + 1)
            cursor += 1
        return taken, cursor

    def between(self, start: int, end: int) -> list[Demonstration]:
        """Return the demonstrations at some positions; an example without an answer makes none."""
        # The noise belongs to the position, so a checkpoint needs no random state.
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
        """Steps in which every demonstration is seen `epochs` times."""
        if self.split.size is None:
            raise ConfigError("sft.passes: the task makes examples without end; give run.max_steps")
        return max(1, -(-epochs * self.split.size // batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTPlan:
    """A warm start, settled before a model loads."""

    config: Config
    task: Task | None
    """Whose answers to imitate, unless rows say; and what accuracy to measure."""
    demonstrations: Demonstrations

    @property
    def title(self) -> str:
        """What to call it: after its data, else after its task."""
        if self.config.sft.data is not None:
            return Path(self.config.sft.data).name.partition(".")[0]
        assert self.task is not None, "without data, a task says what to imitate"
        return self.task.name


def plan_warm_start(config: Config, *, task: Task | None = None, resumed: bool = False) -> SFTPlan:
    """Settle what to imitate and for how long; a resumed run keeps its batches as they are."""
    if config.sft.from_run is not None and config.task.name == NO_TASK:
        # The run's own task says which of its prompts are held out, and measures what imitation is worth.
        own = read_config(RunFolder.open(config.sft.from_run).config).task
        same = {key: getattr(own, key) for key in ("name", "data", "columns", "test_data", "options")}
        config = replace(config, task=replace(config.task, **same))
    config = config.resolve()
    if task is None and config.task.name != NO_TASK:
        task = load_task(config.task)
    if task is None and config.sft.data is None:
        raise ConfigError("say what to imitate: --data FILE, --from-run RUN, or --task NAME")
    demonstrations = demonstrations_for(config, task)
    if (passes := config.sft.passes) is not None:
        size = demonstrations.split.size
        if size is not None and not resumed:  # no batch holds a row twice: a pass stays one
            config = replace(config, sft=replace(config.sft, batch=min(config.sft.batch, size)))
        steps = demonstrations.steps_for(passes, batch=config.sft.batch)
        config = replace(config, run=replace(config.run, max_steps=steps))
    return SFTPlan(config=config, task=task, demonstrations=demonstrations)


def demonstrations_for(config: Config, task: Task | None) -> Demonstrations:
    """Return what the configuration says to imitate."""
    held_out = set() if task is None else {same_prompt(task.ask(e)) for e in held_out_of(config, task)}
    if config.sft.from_run is not None:
        tools = () if task is None else schemas_of(task)
        rows = best_answers(config, weights={} if task is None else task.weights)
        return of_rows(rows, config=config, held_out=held_out, make=partial(of_rollout, tools=tools))
    if config.sft.data is not None:
        rows = load_examples(config.sft.data)
        check_rows(rows, source=config.sft.data)
        return of_rows(rows, config=config, held_out=held_out, make=of_row)
    assert task is not None, "without data, a task says what to imitate"
    return of_task(task, config=config)


def held_out_of(config: Config, task: Task) -> tuple[Example, ...]:
    return task.split(config.task, config.run.seed).held_out


def of_task(task: Task, *, config: Config) -> Demonstrations:
    """Worked answers to the task's training examples, or its golds where it has no others."""
    if task.tools and task.worked is None:
        raise ConfigError(
            f"task {task.name} has tools and no worked answers: its gold answers call no tool, and imitating "
            "them would teach the policy not to; give the task worked=…, or imitate rows by --data"
        )
    tools = schemas_of(task)

    def make(example: Example, rng: random.Random) -> Demonstration | None:
        answer = gold_of(task, example) if task.worked is None else task.worked(example, rng)
        if answer is None:
            return None
        if isinstance(answer, str):
            return Demonstration(prompt=task.ask(example), completion=answer, tools=tools)
        if not is_chat(answer) or fault_in_calls(answer):
            raise ConfigError(
                f"task {task.name}: worked must return text, or messages with role and content; "
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
    """What prompts tell of a task's tools."""
    return tuple(tool_of(function).schema for function in task.tools)


def of_rows(
    rows: Sequence[Example], *, config: Config, held_out: set[str], make: Callable[[Example], Demonstration]
) -> Demonstrations:
    """Demonstrations that the rows hold, without those that ask what evaluation will ask."""
    prompts = {id(row): same_prompt(make(row).prompt) for row in rows}  # each is asked for several times

    def asks(row: Example) -> str:
        return prompts[id(row)]

    kept = [row for row in rows if asks(row) not in held_out]
    if not kept:
        raise ConfigError("no demonstration is left: each asks what a held-out example asks")
    back = [] if config.sft.from_run else kept_back(kept, asks=asks, most=config.task.held_out)
    split = split_rows(kept, held_out=back, asks=asks, config=config.task, seed=config.run.seed)
    return Demonstrations(
        split=split,
        make=lambda example, _: make(example),
        seed=config.run.seed,
        dropped=len(rows) - len(kept) + split.dropped - len(back),
    )


def kept_back(rows: Sequence[Example], *, asks: Callable[[Example], str], most: int) -> list[Example]:
    """The rows to measure the loss on, by the smallest fingerprints: all answers to a prompt or none."""
    unique = by_fingerprint(rows)
    answers: dict[str, list[Example]] = {}
    for _, row in sorted(unique.items()):
        answers.setdefault(asks(row), []).append(row)
    chosen: list[Example] = []
    for group in answers.values():
        if len(chosen) + len(group) <= min(most, int(len(unique) * MAX_HELD_OUT_SHARE)):
            chosen += group
    return chosen


def best_answers(config: Config, *, weights: Mapping[str, float]) -> list[Example]:
    """Rejection sampling: of each prompt's recorded answers the best few, if they are good enough.

    Good enough is a reward of `sft.min_reward`, by default the highest that any answer of the run got. An
    answer that failed or was cut off never is. Of equal ones the later is taken: the policy was better then.
    """
    assert config.sft.from_run is not None
    run = RunFolder.open(config.sft.from_run)
    paths = sorted(run.rollouts.glob("step-*.parquet"))
    rows = [row for path in paths for row in read_rollouts(path)]
    if read_config(run.config).algo.combine != "sum":  # the others compare answers to one prompt alone
        rows = [row | {"reward": weighted_sum(row["rewards"], weights)} for row in rows]
    ended = [row for row in rows if row["error"] is None and row["finish"] != "length"]
    if not ended:
        raise ConfigError(f"{run.path} has no recorded answer that came to its end: nothing to imitate")
    best = max(row["reward"] for row in ended)
    least = best if config.sft.min_reward is None else config.sft.min_reward
    good = sorted((row for row in ended if row["reward"] >= least), key=lambda r: (-r["reward"], -r["step"]))
    if not good:
        raise ConfigError(f"no answer in {run.path} has a reward of {least:g}; the best has {best:g}")
    chosen: list[Example] = []
    count: Counter[str] = Counter()
    seen: set[tuple[Any, ...]] = set()
    for row in good:
        prompt = str(row["prompt"])
        # Of an answer that used tools the text is the last turn: what came before it may be another way.
        turns = tuple(row["tokens"]) if SampledTokens.of(row).read_more else ()
        said = (prompt, row["text"], turns)
        if count[prompt] < config.sft.per_prompt and said not in seen:
            count[prompt] += 1
            seen.add(said)
            chosen.append(Example({key: row[key] for key in ROLLOUT_COLUMNS}))
    return chosen


ROLLOUT_COLUMNS = ("prompt", "text", "tokens", "trained", "prompt_length")
