"""Reading tool calls out of what the policy wrote.

    <tool_call>
    {"name": "search", "arguments": {"query": "fever"}}
    </tool_call>

as Hermes and Qwen write them, several in a turn if the policy likes; or, for models that write calls
as Llama 3 does, a turn that is nothing but one JSON object with `name` and `parameters`. What stands in
the thinking is thought, not called. Splitting only, so the time is linear in the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from groupwise.records import is_unicode
from groupwise.rewards.extraction import END_THINK

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A call as the policy wrote it; `error` says why it cannot be made."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def read_calls(text: str) -> list[ParsedToolCall]:
    """Return the calls of one turn in order, those that cannot be read included."""
    spoken = text.rpartition(END_THINK)[2]
    wishes = []
    _, *parts = spoken.split(OPEN)
    for part in parts:
        body, closed, _ = part.partition(CLOSE)
        wishes.append(read_call(body) if closed else ParsedToolCall(error=f"a call must end in {CLOSE}"))
    if not wishes and is_bare_call(spoken):
        wishes.append(read_call(spoken))
    return wishes


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Write a call in the form that `read_calls` reads."""
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"{OPEN}\n{call}\n{CLOSE}"


def is_bare_call(text: str) -> bool:
    """Tell whether a whole turn is one JSON object that names a tool and its parameters."""
    text = text.strip()
    return text.startswith("{") and text.endswith("}") and '"name"' in text and '"parameters"' in text


def read_call(body: str) -> ParsedToolCall:
    """Read one call: a JSON object with a name and arguments."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return ParsedToolCall(error='a call must be JSON such as {"name": "…", "arguments": {…}}')
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ParsedToolCall(error='a call must name a tool: {"name": "…", "arguments": {…}}')
    if not is_unicode(call):
        return ParsedToolCall(error="the text of a call must be Unicode")
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        return ParsedToolCall(call["name"], error="the arguments of a call must be a JSON object")
    return ParsedToolCall(call["name"], arguments)
