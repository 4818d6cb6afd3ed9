"""OpenAI's Responses API on top of chat completions: requests, response objects and named stream events.

A request becomes the body of a chat request, so that both APIs share their checks. `ResponsesBuilder` turns
the chunks of the chat's response into output items: one message, then the function calls. Nothing is stored:
each request carries the whole conversation.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from groupwise.engine.serving.serving_engine import StreamChunk
from groupwise.serve.completion_request import CompletionRequest
from groupwise.serve.completion_response import ResponseBuilder
from groupwise.serve.http_server import HTTPError

NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "messages": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "truncation": (None, "disabled"),
}
"""Unsupported parameters, with the values that are accepted because they have no effect."""
SAME_IN_A_CHAT = (
    *("model", "temperature", "top_p", "stream", "parallel_tool_calls"),
    # Parameters that OpenAI has in chats only, and those of vLLM:
    *("stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "n"),
    *("repetition_penalty", "top_k", "min_p"),
)
LOGPROBS = "message.output_text.logprobs"


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat request that a request to `/v1/responses` means."""
    for name, accepted in NOT_SUPPORTED.items():
        if body.get(name) not in accepted:
            raise HTTPError(400, f"{name} is not supported by /v1/responses", param=name)
    reasoning = body.get("reasoning") or {}
    # Clients ask any model for a summary; one that has none to give ignores it.
    if not isinstance(reasoning, dict) or reasoning.get("effort") not in (None, "none"):
        raise HTTPError(400, "reasoning.effort is not supported: it has no effect on this model")
    if body.get("n") not in (None, 1):
        raise HTTPError(400, "n must be 1 in /v1/responses")
    chat = {name: body[name] for name in SAME_IN_A_CHAT if body.get(name) is not None}
    chat["messages"] = read_input(body.get("input"), body.get("instructions"))
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if body.get("tools"):
        chat["tools"] = [read_tool(tool) for tool in as_list(body, "tools")]
    if body.get("tool_choice") is not None:
        choice = body["tool_choice"]
        named = isinstance(choice, dict) and choice.get("type") == "function"
        chat["tool_choice"] = (
            {"type": "function", "function": {"name": choice.get("name")}} if named else choice
        )
    if (wanted := text_format(body)).get("type") != "text":
        rest = {name: value for name, value in wanted.items() if name != "type"}
        kind = wanted.get("type")
        chat["response_format"] = {"type": kind, **({"json_schema": rest} if kind == "json_schema" else {})}
    if LOGPROBS in as_list(body, "include") or body.get("top_logprobs"):
        chat |= {"logprobs": True, "top_logprobs": body.get("top_logprobs") or 0}
    return chat


def text_format(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return `text.format`, which says what the answer must be: text, or JSON of a schema."""
    text = body.get("text") or {}
    if not isinstance(text, dict) or not isinstance(text.get("format") or {}, dict):
        raise HTTPError(400, "text must be {format: {type: …}}", param="text")
    return text.get("format") or {"type": "text"}


def as_list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name) or []
    if not isinstance(value, list):
        raise HTTPError(400, f"{name} must be a list", param=name)
    return value


def read_tool(tool: Any) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise HTTPError(400, f"tools of type {kind!r} are not supported: use function tools", param="tools")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def read_input(given: Any, instructions: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat; the calls of one turn are joined into one message."""
    if instructions is not None and not isinstance(instructions, str):
        raise HTTPError(400, "instructions must be a string", param="instructions")
    if isinstance(given, str) and given:
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise HTTPError(400, "input must be a non-empty string or a list of items", param="input")
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in given:
        message = read_item(item)
        before = messages[-1] if messages else {}
        if message.get("role") == before.get("role") == "system":
            before["content"] += "\n\n" + message["content"]  # templates accept one system message
        elif "tool_calls" in message and before.get("role") == "assistant":
            before["tool_calls"] = [*before.get("tool_calls", ()), *message["tool_calls"]]
        elif message:
            messages.append(message)
    return messages


def read_item(item: Any) -> dict[str, Any]:
    """Return the chat message of one input item; empty for reasoning, which is not part of the prompt."""
    if not isinstance(item, dict):
        raise HTTPError(400, "every item of input must be an object", param="input")
    match item.get("type") or "message":
        case "message" if isinstance(item.get("role"), str):
            role = "system" if item["role"] == "developer" else item["role"]
            return {"role": role, "content": read_text(item.get("content"))}
        case "function_call" if isinstance(item.get("name"), str):
            function = {"name": item["name"], "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            content = read_text(item.get("output"))
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        case "reasoning":
            return {}
        case "item_reference":
            raise HTTPError(400, "responses are not stored: send the items of the conversation in input")
        case kind:
            raise HTTPError(400, f"input has an item of type {kind!r} that is unsupported or incomplete")


def read_text(content: Any) -> str:
    """Join the text of an item's parts."""
    if isinstance(content, str):
        return content
    texts = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
    if not isinstance(content, list) or any(
        not isinstance(part, dict) or not isinstance(part.get(texts.get(part.get("type", ""), "")), str)
        for part in content
    ):
        raise HTTPError(400, "only text is supported: content must be a string or parts of type input_text")
    return "".join(part[texts[part["type"]]] for part in content)


def echoed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a request that its response repeats."""
    defaults = {"temperature": 1.0, "top_p": 1.0, "tool_choice": "auto", "tools": [], "metadata": {}}
    names = ("instructions", "max_output_tokens", "parallel_tool_calls", "top_logprobs", "user", *defaults)
    settings = {name: defaults.get(name) if body.get(name) is None else body[name] for name in names}
    return {
        **settings,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "text": {"format": text_format(body)},
    }


class ResponsesBuilder:
    """Builds the response object, and the events of its stream, from the chunks of a chat's response."""

    def __init__(self, chat: ResponseBuilder, settings: Mapping[str, Any]) -> None:
        self._chat, self._settings = chat, settings
        self._key = secrets.token_hex(12)
        self._output: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._status = "in_progress"
        self._count = 0

    @property
    def request(self) -> CompletionRequest:
        return self._chat.request

    @property
    def done(self) -> bool:
        return self._chat.done

    def usage(self) -> dict[str, int]:
        return self._chat.usage()

    def first(self) -> Iterator[dict[str, Any]]:
        yield self._event("response.created", response=self.whole())
        yield self._event("response.in_progress", response=self.whole())

    def take(self, chunks: Sequence[StreamChunk[int]]) -> Iterator[dict[str, Any]]:
        """Consume engine output and yield the events that report it."""
        for part in self._chat.take(chunks):
            (choice,) = part["choices"]
            delta, logprobs = choice["delta"], (choice["logprobs"] or {}).get("content", [])
            if delta.get("content") or logprobs:
                yield from self._text(delta.get("content") or "", logprobs)
            for call in delta.get("tool_calls", ()):
                yield from self._end_message()
                yield from self._call(call)
            if choice["finish_reason"] is not None:
                if not self._output:
                    yield from self._text("", [])
                self._status = "incomplete" if choice["finish_reason"] == "length" else "completed"
                yield from self._end_message(self._status)
                yield self._event(f"response.{self._status}", response=self.whole())

    def last(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def _text(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        if not self._output:
            message = {"id": f"msg_{self._key}", "type": "message", "role": "assistant"}
            self._output.append({**message, "status": "in_progress", "content": []})
            yield self._event("response.output_item.added", output_index=0, item=self._item())
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._output[0]["content"] = [part]
            yield self._event("response.content_part.added", **self._place(), part=dict(part))
        self._logprobs += logprobs
        self._output[0]["content"][0]["text"] += text
        yield self._event("response.output_text.delta", **self._place(), delta=text, logprobs=list(logprobs))

    def _end_message(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End the message, if there is one and it has not ended."""
        if not self._output or self._output[0].get("status") != "in_progress":
            return
        (part,) = self._output[0]["content"]
        part["logprobs"] = self._logprobs
        yield self._event(
            "response.output_text.done", **self._place(), text=part["text"], logprobs=self._logprobs
        )
        yield self._event("response.content_part.done", **self._place(), part=dict(part))
        self._output[0]["status"] = status
        yield self._event("response.output_item.done", output_index=0, item=self._item())

    def _call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        number, function = len(self._output), call["function"]
        place = {"item_id": f"fc_{self._key}_{number}", "output_index": number}
        item = {"id": place["item_id"], "type": "function_call", "call_id": call["id"]}
        item |= {"name": function["name"], "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=number, item=dict(item))
        arguments = function["arguments"]
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
        yield self._event(
            "response.function_call_arguments.done", **place, name=item["name"], arguments=arguments
        )
        self._output.append({**item, "arguments": arguments, "status": "completed"})
        yield self._event("response.output_item.done", output_index=number, item=self._item())

    def _item(self) -> dict[str, Any]:
        return dict(self._output[-1])

    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._key}", "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **fields}

    def whole(self) -> dict[str, Any]:
        """Return the response object."""
        usage, ended = self.usage(), self._status != "in_progress"
        tokens = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": f"resp_{self._key}",
            "object": "response",
            "created_at": self._chat.created,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "model": self._chat.model,
            "output": list(self._output) if ended else [],
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "truncation": "disabled",
            "usage": tokens if ended else None,
            **self._settings,
        }
