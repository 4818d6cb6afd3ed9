"""Calls of tools as OpenAI's clients know them, and as models read and write them (`rollout.calls`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from groupwise.records import Message
from groupwise.rewards.tags import END_THINK
from groupwise.rollout.calls import CLOSE, OPEN, is_bare_call, read_call


def for_template(message: Message, *, knows_calls: bool) -> Message:
    """A message as the model's template takes it: its calls as values, or written out in the text."""
    if not message.get("tool_calls"):
        return message
    calls = [call["function"] for call in message["tool_calls"]]
    plain = [{"name": call["name"], "arguments": arguments_of(call)} for call in calls]
    if knows_calls:
        return {**message, "tool_calls": [{"type": "function", "function": call} for call in plain]}
    written = [f"{OPEN}\n{json.dumps(call)}\n{CLOSE}" for call in plain]
    said = [message["content"]] if message.get("content") else []
    return {"role": message["role"], "content": "\n".join([*said, *written])}


def arguments_of(call: Mapping[str, Any]) -> Any:
    """Arguments as a value: OpenAI's clients send them as JSON in a string."""
    arguments = call.get("arguments", {})
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def read_answer(text: str) -> tuple[str, list[dict[str, str]]]:
    """Split an answer into what it says and the calls it makes; what is no proper call stays text."""
    thought, ended, spoken = text.rpartition(END_THINK)
    if is_bare_call(spoken):
        said, calls = thought + ended, [read_call(spoken)]
    else:
        said, calls = thought + ended, []
        first, *parts = spoken.split(OPEN)
        said += first
        for part in parts:
            body, closed, after = part.partition(CLOSE)
            call = read_call(body)
            if closed and call.error is None:
                calls.append(call)
                said += after
            else:
                said += OPEN + part
    made = [{"name": c.name, "arguments": json.dumps(c.arguments)} for c in calls if c.error is None]
    return (said.strip(), made) if made else (text, [])


def surely_said(text: str) -> int:
    """How many characters of an unfinished answer are said, whatever follows: no call can begin in them."""
    spoken = text.rpartition(END_THINK)[2]
    said = "" if spoken.lstrip().startswith("{") else spoken.partition(OPEN)[0]
    half = next((size for size in range(len(OPEN) - 1, 0, -1) if said.endswith(OPEN[:size])), 0)
    end = len(text) - len(spoken) + len(said) - half
    return len(text[:end].rstrip())  # the spaces before a call are no part of what is said
