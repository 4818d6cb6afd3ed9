"""Structured output: answers match the schema, forced calls name their tool, and clients work unchanged."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from groupwise.model.grammar import NO_LLGUIDANCE, GrammarCompiler
from groupwise.model.policy import Policy
from groupwise.model.tokenizer import TokenizerCodec
from groupwise.serve.completion_request import ToolCallReader
from groupwise.serve.structured_output import answer_grammar
from tests.support.serving import ask, chat, serving
from tests.support.small_models import policy_of, small_model
from tests.support.tool_templates import WRITERS, tokenizer_of

pytest.importorskip("llguidance")

ANSWER = '{"name": "Ann", "age": 7}'
"""A token of its own, which a client can ask for by logit_bias: without a schema, random JSON has no end."""


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=6)
    age: int = Field(ge=0, le=99)
    mood: Literal["happy", "sad"] = "happy"


STRICT = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 9},
        "mood": {"enum": ["happy", "sad"]},
    },
    "required": ["age", "mood"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "note", "parameters": STRICT}},
    {"type": "function", "function": {"name": "now"}},
]


def wanting(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.fixture(scope="module")
def policy() -> Policy:
    """A random model: what it writes well, it writes because it must."""
    policy = policy_of(small_model())
    policy.model.config.max_position_embeddings = 8192
    policy.tokenizer = copy.deepcopy(policy.tokenizer)
    policy.tokenizer.add_tokens([ANSWER])
    return policy


@pytest.fixture(scope="module")
def port(policy) -> Iterator[int]:
    with serving(policy, slots=4, context=6000) as (_, port):
        yield port


@pytest.fixture
def address(port) -> str:
    return f"http://127.0.0.1:{port}/v1"


def test_an_answer_matches_its_schema(port):
    for seed in range(3):
        body = chat("Who?", response_format=wanting(STRICT), max_tokens=60, seed=seed)
        status, answer = ask(port, "/v1/chat/completions", body)
        value = json.loads(answer["choices"][0]["message"]["content"])
        assert status == 200
        assert list(value) == ["age", "mood"]
        assert value["age"] in range(10)
        assert value["mood"] in ("happy", "sad")
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_stream_carries_the_same_answer(port):
    body = chat("Who?", response_format=wanting(STRICT), max_tokens=60, seed=1)
    _, answer = ask(port, "/v1/chat/completions", body)
    _, parts = ask(port, "/v1/chat/completions", {**body, "stream": True})
    streamed = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
    assert streamed == answer["choices"][0]["message"]["content"]


def test_a_plain_completion_can_be_constrained_too(port):
    body = {"prompt": "x", "response_format": wanting(STRICT), "max_tokens": 60, "n": 3}
    _, answer = ask(port, "/v1/completions", body)
    assert all(json.loads(choice["text"])["age"] in range(10) for choice in answer["choices"])


def test_an_answer_that_is_cut_off_says_so(port):
    body = chat("Who?", response_format=wanting(STRICT), max_tokens=5)
    _, answer = ask(port, "/v1/chat/completions", body)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"].startswith('{"ag')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"note", "now"}), ({"type": "function", "function": {"name": "note"}}, {"note"})],
)
def test_a_forced_answer_is_a_call(port, choice, names, stream):
    body = chat(
        "Hm", tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=200, stream=stream
    )
    _, answer = ask(port, "/v1/chat/completions", body)
    if stream:
        deltas = [part["choices"][0]["delta"] for part in answer]
        assert not "".join(delta.get("content") or "" for delta in deltas)
        (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
        reason = answer[-1]["choices"][0]["finish_reason"]
    else:
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        reason = answer["choices"][0]["finish_reason"]
    assert reason == "tool_calls"
    assert call["function"]["name"] in names
    if call["function"]["name"] == "note":
        assert json.loads(call["function"]["arguments"])["age"] in range(10)


def test_an_answer_with_tools_is_a_call_or_matches_the_schema(port):
    kinds = set()
    for seed in range(8):
        body = chat("Hm", tools=TOOLS, response_format=wanting(STRICT), max_tokens=300, seed=seed)
        _, answer = ask(port, "/v1/chat/completions", body)
        message = answer["choices"][0]["message"]
        if answer["choices"][0]["finish_reason"] == "length":
            continue
        kinds.add("call" if message.get("tool_calls") else "answer")
        if not message.get("tool_calls"):
            assert json.loads(message["content"])["age"] in range(10)
    assert kinds == {"call", "answer"}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"response_format": {"type": "xml"}}, "must have the type text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "must be {type: json_schema, json_schema: {name"),
        ({"response_format": wanting({"not": {}})}, 'is not supported: Unimplemented keys: ["not"]'),
        ({"response_format": wanting({"type": "strin"})}, "is not supported: Invalid type: strin"),
        ({"response_format": wanting({"$ref": "#/x"})}, "is not supported: Pointer '/x' does not exist"),
        (
            {"response_format": wanting({"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"})},
            "no answer",
        ),
        ({"response_format": wanting({"type": "array", "maxItems": 10**6})}, "maxItems may be at most 2000"),
        ({"response_format": wanting({"enum": ["x" * 70_000]})}, "characters; at most 65536 are supported"),
        ({"tool_choice": "required"}, "tool_choice: required needs tools"),
        ({"tool_choice": "maybe", "tools": TOOLS}, "tool_choice must be auto, none, required or {"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS},
            "names 'x', which",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_not_supported_is_refused_in_one_sentence(port, settings, sentence):
    status, answer = ask(port, "/v1/chat/completions", chat("a", **settings))
    assert status == 400
    assert sentence in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE = {
    "deep": nested(300),
    "recursive": {
        "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 3}},
        "$ref": "#/$defs/n",
    },
    "many optional keys": {"type": "object", "properties": {f"k{n}": {"type": "string"} for n in range(800)}},
    "a pattern that backtracks": {"type": "string", "pattern": "^(a?){400}a{400}$"},
    "nested repetitions": {"type": "string", "pattern": "^(((a{1,50}){1,50}){1,50}){1,50}$"},
    "all of many": {
        "allOf": [{"type": "object", "properties": {f"p{n}": {"type": "integer"}}} for n in range(300)]
    },
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_answered_or_refused_and_the_server_goes_on(port, name):
    body = chat("a", response_format=wanting(HOSTILE[name]), max_tokens=20)
    status, answer = ask(port, "/v1/chat/completions", body)
    assert status in (200, 400)
    if status == 400:
        assert "not supported" in answer["error"]["message"]
    assert ask(port, "/v1/chat/completions", chat("a", max_tokens=3))[0] == 200


def test_without_the_package_one_sentence_says_what_to_install(port, monkeypatch):
    monkeypatch.setattr("groupwise.model.grammar.find_spec", lambda _: None)
    status, answer = ask(port, "/v1/chat/completions", chat("a", response_format={"type": "json_object"}))
    assert (status, answer["error"]["message"]) == (400, NO_LLGUIDANCE)


MARKS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "qwen_xml": ["<tool_call>", "</tool_call>"],
    "mistral": ["[TOOL_CALLS]"],
    "deepseek": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"],
    "harmony": ["<|channel|>", "<|message|>"],
    "gemma": ["<start_function_call>", "<end_function_call>"],
}


def written_at_random(codec: TokenizerCodec, ends: frozenset[int], grammar: str, seed: int) -> list[int]:
    """An answer in which every allowed token is equally likely."""
    state = GrammarCompiler(codec, ends).compile(grammar).start()
    random, tokens = np.random.default_rng(seed), []
    while True:
        bits = np.unpackbits(np.frombuffer(state.matcher.compute_bitmask(), np.uint8), bitorder="little")
        tokens.append(int(random.choice(np.flatnonzero(bits))))
        if tokens[-1] in ends:
            return tokens
        assert state.matcher.consume_token(tokens[-1])


@pytest.mark.parametrize("marked", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("style", sorted(WRITERS))
def test_forced_calls_are_read_back_in_every_format(policy, style, marked):
    tokenizer = tokenizer_of(style)
    if marked:  # Hermes models have these tokens, too, but not as special ones
        tokenizer.add_tokens(MARKS.get(style, []), special_tokens=style != "hermes")
    codec = TokenizerCodec(tokenizer, vocabulary=len(tokenizer))
    assert codec.tool_format == style
    for seed in range(4):
        grammar = answer_grammar(
            {"tool_choice": "required", "parallel_tool_calls": bool(seed % 2)}, TOOLS, codec
        )
        assert grammar is not None
        tokens = written_at_random(codec, policy.end_tokens, grammar, seed)
        text, calls = ToolCallReader.of(codec, TOOLS).read(codec.decode(tokens), tokens)
        assert not text
        assert len(calls) == 1 or seed % 2
        for call in calls:
            arguments = json.loads(call["arguments"])
            assert call["name"] in ("note", "now")
            if call["name"] == "note":
                assert arguments["age"] in range(10)
                assert arguments["mood"] in ("happy", "sad")
            else:
                assert arguments == {}


@pytest.mark.parametrize("style", sorted(set(WRITERS) - {"harmony"}))
def test_strict_calls_in_a_text_are_read_back_in_every_format(policy, style):
    tokenizer = tokenizer_of(style)
    tokenizer.add_tokens(MARKS.get(style, []), special_tokens=style != "hermes")
    codec, tools = TokenizerCodec(tokenizer, vocabulary=len(tokenizer)), copy.deepcopy(TOOLS[:1])
    forced = answer_grammar({"tool_choice": "required"}, tools, codec)
    tools[0]["function"]["strict"] = True
    grammar = answer_grammar({}, tools, codec)
    assert forced is not None
    assert grammar is not None
    compiled = GrammarCompiler(codec, policy.end_tokens).compile(grammar)
    call = written_at_random(codec, policy.end_tokens, forced, 1)[:-1]
    before = [] if style == "llama" else codec.tokenizer("So:", add_special_tokens=False)["input_ids"]
    tokens = [*before, *call]
    matcher = compiled.start().matcher
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()
    wrong = [codec.tokenizer.convert_tokens_to_ids("x") if token == tokens[-4] else token for token in tokens]
    assert compiled.start().matcher.try_consume_tokens(wrong) < len(wrong)


@pytest.mark.parametrize("style", ["hermes", "llama"])
def test_strict_tools_leave_the_text_free_and_check_calls(policy, style):
    tool = copy.deepcopy(TOOLS[:1])
    codec = in_style(policy, style)
    assert answer_grammar({}, tool, codec) is None
    tool[0]["function"]["strict"] = True
    grammar = answer_grammar({}, tool, codec)
    assert grammar is not None
    compiled = GrammarCompiler(policy, policy.end_tokens).compile(grammar)
    assert is_accepted(policy, compiled, "I would rather <think> about it.")
    key = {"hermes": "arguments", "llama": "parameters"}[style]
    call = '{"name": "note", "' + key + '": {"age": 3, "mood": "sad"}}'
    text = f"Well:\n<tool_call>\n{call}\n</tool_call>" if style == "hermes" else call
    assert is_accepted(policy, compiled, text)
    assert not is_accepted(policy, compiled, text.replace("sad", "bad"))


def in_style(policy: Policy, style: str) -> TokenizerCodec:
    codec = TokenizerCodec(policy.tokenizer, vocabulary=policy.vocabulary)
    codec.tool_format = style
    return codec


def test_marks_of_calls_are_tokens_where_the_model_has_them(policy):
    tokenizer = copy.deepcopy(policy.tokenizer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    codec = TokenizerCodec(tokenizer, vocabulary=300)
    compiler = GrammarCompiler(codec, policy.end_tokens)
    tool = copy.deepcopy(TOOLS[:1])
    tool[0]["function"]["strict"] = True
    call = '<tool_call>\n{"name": "note", "arguments": {"age": 3, "mood": "sad"}}\n</tool_call>'
    for body, text in (({"tool_choice": "required"}, call), ({}, f"<think>Hm</think> So: {call}")):
        grammar = answer_grammar(body, tool, codec)
        assert grammar is not None
        compiled = compiler.compile(grammar)
        assert is_accepted(codec, compiled, text)
        assert not is_accepted(codec, compiled, text.replace("sad", "bad"))


def is_accepted(codec: TokenizerCodec, grammar: Any, text: str) -> bool:
    matcher = grammar.start().matcher
    tokens = list(codec.tokenizer(text, add_special_tokens=False)["input_ids"])
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def test_the_openai_client_parses_answers_and_calls(address):
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        common: Any = {"model": "small", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 200}
        parsed = client.chat.completions.parse(response_format=Person, **common)
        assert isinstance(parsed.choices[0].message.parsed, Person)
        tool = openai.pydantic_function_tool(Person)
        called = client.chat.completions.parse(tools=[tool], tool_choice="required", **common)
        (call, *_) = called.choices[0].message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, Person)
        with client.chat.completions.stream(response_format=Person, **common) as stream:
            for _ in stream:
                pass
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_with_structured_output(address, method):
    langchain_openai = pytest.importorskip("langchain_openai")
    bias = {"logit_bias": {"271": 100}} if method == "json_mode" else {}
    with httpx.Client() as http:
        model = langchain_openai.ChatOpenAI(
            base_url=address,
            api_key="none",
            model="small",
            max_tokens=300,
            max_retries=0,
            http_client=http,
            **bias,
        )
        answer = model.with_structured_output(Person, method=method).invoke("Who, in JSON?")
    assert isinstance(answer, Person)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_instructor(address, mode):
    instructor = pytest.importorskip("instructor")
    bias = {"logit_bias": {"271": 100}} if mode == "JSON" else {}
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        answer = client.chat.completions.create(
            model="small",
            response_model=Person,
            max_retries=0,
            max_tokens=300,
            messages=[{"role": "user", "content": "Who?"}],
            **bias,
        )
    assert isinstance(answer, Person)


@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput"])
def test_pydantic_ai_structured_output(address, kind):
    pydantic_ai, httpx2 = pytest.importorskip("pydantic_ai"), pytest.importorskip("httpx2")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def ask_agent() -> Any:
        async with httpx2.AsyncClient() as http:
            provider = OpenAIProvider(base_url=address, api_key="none", http_client=http)
            agent = pydantic_ai.Agent(
                OpenAIChatModel("small", provider=provider),
                output_type=getattr(pydantic_ai, kind)(Person),
                model_settings={"max_tokens": 300},
                retries=0,
            )
            return (await agent.run("Who?")).output

    assert isinstance(asyncio.run(ask_agent()), Person)


NODE = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const common = { model: "small", messages: [{ role: "user", content: "Who?" }], max_tokens: 200 };
const response_format = { type: "json_schema", json_schema: { name: "answer", schema: SCHEMA } };
const answer = await client.chat.completions.create({ ...common, response_format });
const tools = TOOLS;
const call = await client.chat.completions.create({ ...common, tools, tool_choice: "required" });
const stream = await client.chat.completions.create({ ...common, response_format, stream: true });
let streamed = "";
for await (const part of stream) streamed += part.choices[0]?.delta?.content ?? "";
console.log(JSON.stringify([
  JSON.parse(answer.choices[0].message.content),
  call.choices[0].message.tool_calls[0].function.name,
  JSON.parse(streamed),
]));
"""


def test_the_openai_client_of_node(address, tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    found = subprocess.run(["npm", "root", "-g"], capture_output=True, text=True, check=False).stdout.strip()
    package = Path(found) / "openai"
    if not package.is_dir():
        pytest.skip("needs the npm package openai: npm install -g openai")
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "openai").symlink_to(package)
    script = NODE.replace("SCHEMA", json.dumps(STRICT)).replace("TOOLS", json.dumps(TOOLS[:1]))
    (tmp_path / "client.mjs").write_text(script)
    done = subprocess.run(
        [node, "client.mjs", address], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    whole, name, streamed = json.loads(done.stdout)
    assert name == "note"
    assert whole["age"] in range(10)
    assert streamed["mood"] in ("happy", "sad")
