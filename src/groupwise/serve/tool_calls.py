"""Tools in a chat: shown to models whose template does not show them, and calls read out of what they write.

<tool_call>
{"name": "search", "arguments": {"query": "fever"}}
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.records import Message

OPEN, CLOSE = "<tool_call>", "</tool_call>"

INSTRUCTIONS = (
    "You may call one or more functions to assist with the user query. Their signatures are within "
    "<tools></tools>:\n<tools>\n{tools}\n</tools>\n\nFor each call, return a JSON object with its name and "
    'arguments within <tool_call></tool_call>:\n<tool_call>\n{{"name": …, "arguments": …}}\n</tool_call>'
)


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The chat for a template that knows nothing of tools: described in the system message, all as text."""
    described = INSTRUCTIONS.format(tools="\n".join(json.dumps(tool) for tool in tools))
    plain = [as_text(message) for message in messages]
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{described}"}, *plain[1:]]
    return [{"role": "system", "content": described}, *plain]


def as_text(message: Message) -> Message:
    """A message with its calls, or a tool's answer, written out."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    written = [
        f"{OPEN}\n{json.dumps({'name': c['name'], 'arguments': arguments_of(c)})}\n{CLOSE}" for c in calls
    ]
    return {"role": message["role"], "content": "\n".join([content, *written] if content else written)}


def arguments_of(call: Mapping[str, Any]) -> Any:
    """Arguments as a value: OpenAI's clients send them as JSON in a string."""
    arguments = call.get("arguments", {})
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def read_calls(text: str) -> tuple[str, list[dict[str, str]]]:
    """Split an answer into what it says and the calls it makes; what is no proper call stays text."""
    said, *parts = text.split(OPEN)
    calls: list[dict[str, str]] = []
    for part in parts:
        body, _, after = part.partition(CLOSE)
        call = read_call(body)
        if call is None:
            said += OPEN + part
        else:
            calls.append(call)
            said += after
    return (said.strip() if calls else said), calls


def read_call(body: str) -> dict[str, str] | None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return {"name": call["name"], "arguments": json.dumps(arguments)} if isinstance(arguments, dict) else None
