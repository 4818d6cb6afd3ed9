"""One demonstration: what a row of a file, or a recorded answer, shows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from groupwise.errors import ConfigError
from groupwise.records import Example, Message
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
        if not is_prompt(row["messages"]) or isinstance(row["messages"], str):
            return "messages must be a list of messages with role and content"
        roles = [message["role"] for message in row["messages"]]
        if roles[-1] != "assistant" or roles[0] == "assistant":
            return "messages must begin with the user's (or the system's) and end with the assistant's"
        return None
    if not {"prompt", "completion"} <= row.keys():
        return f"a demonstration has the columns prompt and completion, or messages; this has {sorted(row)}"
    if not is_prompt(row["prompt"]):
        return "prompt must be text, or messages with role and content"
    if not is_prompt(row["completion"]):
        return "completion must be text, or messages with role and content"
    answers = row["completion"]
    if not isinstance(answers, str) and all(message["role"] != "assistant" for message in answers):
        return "completion has no message of the assistant's: there is nothing to imitate"
    return None


def tools_in(row: Example) -> Any:
    """Return what a row says of tools; many datasets hold it as JSON."""
    tools = row.get("tools") or ()
    if isinstance(tools, str):
        with suppress(ValueError):
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
    """Parquet gives every message every key; templates ask whether a key is there."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def of_rollout(row: Example, *, tools: Sequence[Mapping[str, Any]] = ()) -> Demonstration:
    """Read an answer that was recorded. `tools`: what its prompt told of them."""
    return Demonstration(
        prompt=row["prompt"], completion=row["text"], tools=tools, sampled=SampledTokens.of(row)
    )
