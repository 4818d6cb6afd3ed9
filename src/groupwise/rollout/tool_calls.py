"""Parse tool calls in the policy's text.

    <tool_call>
    {"name": "search", "arguments": {"query": "fever"}}
    </tool_call>

This is the format of Hermes and Qwen; a turn may contain several calls. The format of Llama 3 is also
supported: the whole turn is one JSON object with `name` and `parameters`. Calls inside the thinking section
are ignored. Parsing only splits strings, so its time is linear in the length of the text.
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
    """A parsed call; `error` says why it cannot be executed."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def read_calls(text: str) -> list[ParsedToolCall]:
    """Return the calls of one turn in order, including malformed ones."""
    answer = text.rpartition(END_THINK)[2]
    calls = []
    _, *parts = answer.split(OPEN)
    for part in parts:
        body, closed, _ = part.partition(CLOSE)
        calls.append(read_call(body) if closed else ParsedToolCall(error=f"a call must end in {CLOSE}"))
    if not calls and is_bare_call(answer):
        calls.append(read_call(answer))
    return calls


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Format a call the way `read_calls` parses it."""
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"{OPEN}\n{call}\n{CLOSE}"


def is_bare_call(text: str) -> bool:
    """Whether a whole turn is one JSON object with `name` and `parameters`."""
    text = text.strip()
    return text.startswith("{") and text.endswith("}") and '"name"' in text and '"parameters"' in text


def read_call(body: str) -> ParsedToolCall:
    """Parse one call: a JSON object with a name and arguments."""
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
