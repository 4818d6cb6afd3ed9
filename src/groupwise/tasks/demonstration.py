"""One demonstration: what a row of a file, or a recorded answer, shows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from groupwise.errors import ConfigError
from groupwise.records import Call, Example, Message, Turn
from groupwise.rollout.calls import read_calls, write_call
from groupwise.tasks.task import Prompt, is_prompt


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
