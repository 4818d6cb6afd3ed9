"""OpenAI's Responses API answers what a chat would, in its own shape."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from groupwise.serve.http_server import HTTPError
from groupwise.serve.responses_api import chat_body
from tests.support.serving import CALL, TOOL, ask, chat, scripted, serving
from tests.support.small_models import Scripted, policy_of, small_model

FUNCTION = {"type": "function", **TOOL["function"], "strict": False}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(policy_of(small_model())) as (_, port):
        yield port


def streamed(port: int, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each of which must be named by its type."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/responses", json.dumps({**body, "stream": True}))
    blocks = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_a_response_is_the_answer_of_a_chat(port):
    settings = {"temperature": 1.1, "seed": 4}
    _, answer = ask(port, "/v1/chat/completions", chat("7 + 5", max_tokens=9, **settings))
    body = {"model": "small", "input": "7 + 5", "max_output_tokens": 9, **settings}
    status, response = ask(port, "/v1/responses", body)
    assert (status, response["object"], response["model"]) == (200, "response", "small")
    (message,) = response["output"]
    (choice,) = answer["choices"]
    assert message["content"][0]["text"] == choice["message"]["content"]
    assert response["status"] == {"length": "incomplete", "stop": "completed"}[choice["finish_reason"]]
    assert response["incomplete_details"] == (
        {"reason": "max_output_tokens"} if choice["finish_reason"] == "length" else None
    )
    assert response["usage"]["input_tokens"] == answer["usage"]["prompt_tokens"]
    assert response["usage"]["output_tokens"] == answer["usage"]["completion_tokens"]


def test_the_events_of_a_stream_add_up_to_the_response(port):
    body = {"input": "7 + 5", "max_output_tokens": 12, "seed": 4, "include": ["message.output_text.logprobs"]}
    _, whole = ask(port, "/v1/responses", {**body, "top_logprobs": 2})
    events = streamed(port, {**body, "top_logprobs": 2})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete" if whole["status"] == "incomplete" else "response.completed",
    ]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    text = "".join(event["delta"] for event in deltas)
    assert text == events[-4]["text"] == whole["output"][0]["content"][0]["text"]
    logprobs = [entry for event in deltas for entry in event["logprobs"]]
    assert logprobs == events[-4]["logprobs"] == whole["output"][0]["content"][0]["logprobs"]
    assert {len(entry["top_logprobs"]) for entry in logprobs} == {2}
    changing = {"id", "created_at", "output"}
    last = events[-1]["response"]
    assert {k: v for k, v in last.items() if k not in changing} == {
        k: v for k, v in whole.items() if k not in changing
    }


def test_function_calls_are_items_of_their_own(monkeypatch):
    monkeypatch.setattr(Scripted, "encode", lambda self, prompt, tools=(), most=None: (40,))
    body = {"input": "add", "tools": [FUNCTION], "temperature": 0}
    with serving(scripted(CALL)) as (_, port):
        _, response = ask(port, "/v1/responses", body)
        events = streamed(port, body)
    message, call = response["output"]
    assert message["content"][0]["text"] == "I add."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "add", '{"a": 1}')
    assert call["call_id"]
    assert response["status"] == "completed"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [(item["type"], item["status"]) for item in done] == [
        ("message", "completed"),
        ("function_call", "completed"),
    ]
    arguments = [e["arguments"] for e in events if e["type"] == "response.function_call_arguments.done"]
    assert arguments == ['{"a": 1}']


def test_items_of_a_conversation_become_messages():
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1 + "}] * 2},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "b", "name": "add", "arguments": '{"a": 2}'},
        {"type": "function_call_output", "call_id": "a", "output": "3"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "4"}]},
    ]
    body = chat_body({"input": items, "instructions": "Add.", "tools": [FUNCTION]})
    calls = [
        {"id": key, "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": value})}}
        for key, value in (("a", 1), ("b", 2))
    ]
    assert body["messages"] == [
        {"role": "system", "content": "Add.\n\nBe brief."},
        {"role": "user", "content": "1 + 1 + "},
        {"role": "assistant", "content": "I add.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "3"},
        {"role": "tool", "tool_call_id": "b", "content": "4"},
    ]
    assert body["tools"] == [{"type": "function", "function": {**TOOL["function"], "strict": False}}]


def test_formats_and_choices_of_tools_are_those_of_a_chat():
    schema = {"type": "object", "properties": {}}
    body = chat_body(
        {
            "input": "a",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
            "tool_choice": {"type": "function", "name": "add"},
            "max_output_tokens": 5,
        }
    )
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema, "strict": True},
    }
    assert body["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert body["max_completion_tokens"] == 5
    plain = {"text": {"format": {"type": "text"}}, "reasoning": {"effort": None, "summary": "auto"}}
    assert chat_body({"input": "a", **plain}) == {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input must be a non-empty string or a list of items"),
        ({"input": []}, "input must be a non-empty string or a list of items"),
        ({"input": ["a"]}, "every item of input must be an object"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ({"input": "a", "background": True}, "background is not supported"),
        ({"input": "a", "truncation": "auto"}, "truncation is not supported"),
        ({"input": "a", "reasoning": {"effort": "high"}}, "reasoning.effort is not supported"),
        ({"input": "a", "n": 2}, "n must be 1"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "'web_search' are not supported: use function"),
        ({"input": "a", "tools": 3}, "tools must be a list"),
        ({"input": "a", "text": "json"}, "text must be {format"),
        ({"input": "a", "instructions": 3}, "instructions must be a string"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "responses are not stored"),
        ({"input": [{"type": "computer_call"}]}, "'computer_call' that is unsupported or incomplete"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only text is supported"),
    ],
)
def test_what_a_response_cannot_have_is_refused_with_a_reason(body, message):
    with pytest.raises(HTTPError, match=message.replace("{", r"\{")) as refused:
        chat_body(body)
    assert refused.value.status == 400


def test_the_official_client_reads_responses_and_their_streams(port, monkeypatch):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    asked = {"model": "small", "input": "4 + 4", "temperature": 0, "max_output_tokens": 8}
    response = client.responses.create(**asked)
    assert response.output_text == response.output[0].content[0].text
    assert response.usage.output_tokens <= 8
    events = list(client.responses.create(**asked, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == response.output_text
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported"):
        client.responses.create(**asked, previous_response_id="resp_1")
    monkeypatch.setattr(Scripted, "encode", lambda self, prompt, tools=(), most=None: (40,))
    with serving(scripted(CALL)) as (_, other):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{other}/v1", api_key="none")
        response = client.responses.create(**{**asked, "max_output_tokens": 99}, tools=[FUNCTION])
        (call,) = [item for item in response.output if item.type == "function_call"]
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
        with client.responses.stream(**{**asked, "max_output_tokens": 99}, tools=[FUNCTION]) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        assert [item.type for item in final.output] == ["message", "function_call"]
        assert {"response.output_text.delta", "response.function_call_arguments.done"} <= kinds
