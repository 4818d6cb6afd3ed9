"""The endpoint: clients get what the engine writes, each its own stream, and no more of them than fit."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import active_children
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from groupwise import cli
from groupwise.config.schema import EngineConfig, LoraConfig, ModelConfig
from groupwise.engine.engine import Engine
from groupwise.engine.serving.serving_engine import StreamChunk
from groupwise.engine.serving.serving_scheduler import CPUSteps, Job
from groupwise.model.load import load_policy
from groupwise.model.policy import Policy
from groupwise.model.tokenizer import TokenizerCodec, render, turn_text, written_calls
from groupwise.records import Request, Sampling, derive_seed
from groupwise.serve.completion_request import (
    CompletionRequest,
    ToolCallReader,
    for_template,
    read_answer,
    template_messages,
)
from groupwise.serve.completion_response import ResponseBuilder
from groupwise.serve.detokenizer import TextStream, TokenTable
from groupwise.serve.http_server import HTTPReply, HTTPRequest, answer
from groupwise.serve.openai_server import ServerMetrics, leave_a_core, start_front
from tests.support.serving import CALL, TOOL, ask, chat, scripted, serving
from tests.support.small_models import Scripted, policy_of, small_model, tiny_tokenizer, with_more_tokens
from tests.support.tool_templates import WRITERS, tokenizer_of


@pytest.fixture(scope="module")
def tiny() -> Policy:
    return load_policy(ModelConfig(device="cpu", dtype="float32"), LoraConfig(r=0))


@pytest.fixture(scope="module")
def port(tiny) -> Iterator[int]:
    with serving(tiny) as (_, port):
        yield port


def offline(policy: Policy, text: str, *, seed: int, **sampling: Any) -> tuple[str, int]:
    """What the engine writes by itself, and in how many tokens."""
    request = Request(prompt=policy.encode(text), seeds=(derive_seed(seed, "serve", 0),))
    ((completion,),) = Engine(policy, EngineConfig()).generate([request], Sampling(**sampling))
    return policy.decode(completion.tokens), len(completion.tokens)


def test_an_answer_is_what_the_engine_writes(port, tiny):
    status, answer = ask(port, "/v1/chat/completions", chat("7 + 5", max_tokens=30, seed=3, temperature=0.9))
    expected, tokens = offline(tiny, "7 + 5", seed=3, max_tokens=30, temperature=0.9)
    assert status == 200
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected}
    assert answer["usage"]["completion_tokens"] == tokens
    assert answer["object"] == "chat.completion"


def test_hardly_any_temperature_is_none(port, tiny):
    status, answer = ask(port, "/v1/chat/completions", chat("7 + 5", max_tokens=9, temperature=1e-38))
    expected, _ = offline(tiny, "7 + 5", seed=0, max_tokens=9, temperature=0.0)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, expected)


def test_a_stream_adds_up_to_the_answer(port, tiny):
    body = chat("7 + 5", max_tokens=30, seed=3, stream=True, stream_options={"include_usage": True})
    _, parts = ask(port, "/v1/chat/completions", body)
    text = "".join(p["choices"][0]["delta"].get("content") or "" for p in parts if p["choices"])
    assert text == offline(tiny, "7 + 5", seed=3, max_tokens=30)[0]
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    assert parts[-2]["choices"][0]["finish_reason"] in ("stop", "length")
    assert parts[-1]["usage"]["completion_tokens"] > 0
    assert len({part["id"] for part in parts}) == 1


def test_eight_clients_at_once_each_get_their_own_stream(port, tiny):
    answers: dict[int, list[tuple[str, str]]] = {}

    def client(number: int) -> None:
        mine = []
        for turn in range(3):
            settings = {"max_tokens": 20 + number, "seed": 10 * number + turn, "stream": True}
            temperature = (0.0, 0.7, 1.3)[number % 3]
            body = chat(f"{number} + {turn}", temperature=temperature, **settings)
            _, parts = ask(port, "/v1/chat/completions", body)
            text = "".join(p["choices"][0]["delta"].get("content") or "" for p in parts if p["choices"])
            expected = offline(
                tiny,
                f"{number} + {turn}",
                seed=10 * number + turn,
                max_tokens=20 + number,
                temperature=temperature,
            )[0]
            mine.append((text, expected))
        answers[number] = mine

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(answers) == list(range(8))
    assert [pair for mine in answers.values() for pair in mine if pair[0] != pair[1]] == []


def test_a_text_with_tokens_that_the_model_does_not_have_is_refused_and_others_are_answered():
    policy = Policy(policy_of(small_model()).model, with_more_tokens())
    with serving(policy) as (_, port):
        for path, body in (
            ("/v1/completions", {"prompt": "1 <more>"}),
            ("/v1/completions", {"prompt": ["<more>"]}),
            ("/v1/chat/completions", chat("<more>")),
        ):
            status, answer = ask(port, path, body)
            assert (status, "('<more>'), but the model has only" in answer["error"]["message"]) == (400, True)
        assert ask(port, "/v1/completions", {"prompt": "1 + 1", "max_tokens": 2})[0] == 200
        assert ask(port, "/health", None)[0] == 200


def test_several_answers_differ_and_come_in_order(port):
    _, answer = ask(port, "/v1/chat/completions", chat("1", n=3, max_tokens=12, seed=5))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) > 1


def test_logprobs_are_those_of_the_tokens(port, tiny):
    _, answer = ask(port, "/v1/chat/completions", chat("2 + 2", max_tokens=9, seed=1, logprobs=True))
    content = answer["choices"][0]["logprobs"]["content"]
    request = Request(prompt=tiny.encode("2 + 2"), seeds=(derive_seed(1, "serve", 0),))
    ((completion,),) = Engine(tiny, EngineConfig()).generate([request], Sampling(max_tokens=9))
    assert [part["logprob"] for part in content] == pytest.approx(completion.logprobs, abs=1e-5)
    _, plain = ask(port, "/v1/completions", {"model": "small", "prompt": [40, 41], "logprobs": 1, "seed": 1})
    assert len(plain["choices"][0]["logprobs"]["token_logprobs"]) == plain["usage"]["completion_tokens"] == 16


def test_token_ids_come_where_vllm_puts_them_whole_and_streamed(port, tiny):
    settings = {"max_tokens": 9, "seed": 3, "return_token_ids": True, "n": 2}
    _, whole = ask(port, "/v1/chat/completions", chat("7 + 5", **settings))
    request = Request(prompt=tiny.encode("7 + 5"), seeds=tuple(derive_seed(3, "serve", n) for n in (0, 1)))
    (completions,) = Engine(tiny, EngineConfig()).generate([request], Sampling(max_tokens=9))
    sampled = [list(completion.tokens) for completion in completions]
    assert whole["prompt_token_ids"] == list(request.prompt)
    assert [choice["token_ids"] for choice in whole["choices"]] == sampled
    _, parts = ask(port, "/v1/chat/completions", chat("7 + 5", stream=True, **settings))
    assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [
        list(request.prompt)
    ]
    streamed: dict[int, list[int]] = {0: [], 1: []}
    for part in parts:
        streamed[part["choices"][0]["index"]] += part["choices"][0].get("token_ids", [])
    assert streamed == {0: sampled[0], 1: sampled[1]}
    body = {"model": "small", "prompt": list(request.prompt), **settings}
    _, plain = ask(port, "/v1/completions", body)
    assert all(choice["prompt_token_ids"] == list(request.prompt) for choice in plain["choices"])
    assert [choice["token_ids"] for choice in plain["choices"]] == sampled
    _, without = ask(port, "/v1/completions", body | {"return_token_ids": False})
    assert "token_ids" not in without["choices"][0]


def test_the_likeliest_tokens_come_with_each_in_a_stream_as_in_one_piece(port):
    asked = chat("2 + 2", max_tokens=9, seed=1, logprobs=True, top_logprobs=3, temperature=1.5, top_k=50)
    _, answer = ask(port, "/v1/chat/completions", asked)
    content = answer["choices"][0]["logprobs"]["content"]
    for part in content:
        values = [other["logprob"] for other in part["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3
        assert part["logprob"] in values or part["logprob"] < values[-1]
    _, parts = ask(port, "/v1/chat/completions", {**asked, "stream": True})
    shown = [part["choices"][0]["logprobs"] for part in parts]
    assert [entry for part in shown if part for entry in part["content"]] == content


def test_plain_completions_name_the_drawn_token_among_the_likeliest(port):
    asked = {"prompt": "1 2 3", "max_tokens": 12, "seed": 4, "logprobs": 2, "temperature": 1.5}
    _, answer = ask(port, "/v1/completions", asked)
    told = answer["choices"][0]["logprobs"]
    for token, own, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert top[token] == own
        assert len(top) == 2 or own == min(top.values())
    assert {len(top) for top in told["top_logprobs"]} == {2, 3}
    _, parts = ask(port, "/v1/completions", {**asked, "stream": True})
    shown = [part["choices"][0]["logprobs"] for part in parts]
    for name, values in told.items():
        assert [value for part in shown if part for value in part[name]] == values
    _, greedy = ask(port, "/v1/completions", {**asked, "temperature": 0, "logprobs": 1})
    told = greedy["choices"][0]["logprobs"]
    assert [max(top.values()) for top in told["top_logprobs"]] == told["token_logprobs"]
    assert {len(top) for top in told["top_logprobs"]} == {1}


def test_an_echoed_prompt_comes_first_with_its_own_logprobs(port, tiny):
    asked = {"prompt": ["1 + 2 ="], "max_tokens": 4, "temperature": 0, "seed": 1}
    _, bare = ask(port, "/v1/completions", {**asked, "logprobs": 1})
    _, answer = ask(port, "/v1/completions", {**asked, "logprobs": 1, "echo": True, "n": 2})
    prompt = tiny.tokenizer("1 + 2 =")["input_ids"]
    for choice in answer["choices"]:
        assert choice["text"] == "1 + 2 =" + bare["choices"][0]["text"]
        told = choice["logprobs"]
        assert told["tokens"] == [*"1 + 2 =", *bare["choices"][0]["logprobs"]["tokens"]]
        drawn = bare["choices"][0]["logprobs"]["token_logprobs"]
        assert told["token_logprobs"][len(prompt) :] == pytest.approx(drawn, abs=1e-5)
        assert told["text_offset"] == list(range(len(prompt) + 4))
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        for token, own, top in list(
            zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True)
        )[1:]:
            assert top[token] == own
    assert answer["usage"]["completion_tokens"] == 8
    _, parts = ask(port, "/v1/completions", {**asked, "logprobs": 1, "echo": True, "n": 2, "stream": True})
    first = [part["choices"][0] for part in parts if part["choices"][0]["index"] == 0]
    assert "".join(choice["text"] for choice in first) == answer["choices"][0]["text"]
    shown = [choice["logprobs"] for choice in first]
    for name, values in answer["choices"][0]["logprobs"].items():
        assert [value for part in shown if part for value in part[name]] == values
    _, alone = ask(port, "/v1/completions", {**asked, "logprobs": 1, "echo": True, "max_tokens": 0})
    assert (alone["choices"][0]["text"], alone["usage"]["completion_tokens"]) == ("1 + 2 =", 0)
    scores = answer["choices"][0]["logprobs"]["token_logprobs"][: len(prompt)]
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == scores
    _, unscored = ask(port, "/v1/completions", {**asked, "echo": True})
    assert unscored["choices"][0]["text"] == answer["choices"][0]["text"]
    assert unscored["choices"][0]["logprobs"] is None


def test_several_prompts_are_answered_in_order_and_as_if_alone(port):
    texts, settings = ["1 2 3", "4 + 4", "7"], {"max_tokens": 6, "temperature": 0, "logprobs": 1}
    alone = [ask(port, "/v1/completions", {"prompt": text, **settings})[1]["choices"][0] for text in texts]
    for n in (1, 2):
        asked = {"prompt": texts, "n": n, "echo": True, **settings}
        status, answer = ask(port, "/v1/completions", asked)
        assert (status, [choice["index"] for choice in answer["choices"]]) == (200, list(range(3 * n)))
        expected = [
            text + choice["text"] for text, choice in zip(texts, alone, strict=True) for _ in range(n)
        ]
        assert [choice["text"] for choice in answer["choices"]] == expected
        for number, choice in enumerate(answer["choices"]):
            scores = choice["logprobs"]["token_logprobs"]
            assert scores[0] is None
            drawn = alone[number // n]["logprobs"]["token_logprobs"]
            assert scores[-len(drawn) :] == pytest.approx(drawn, abs=1e-5)
        assert answer["usage"]["completion_tokens"] == sum(
            n * len(choice["logprobs"]["tokens"]) for choice in alone
        )
        _, parts = ask(port, "/v1/completions", {**asked, "stream": True})
        streamed = ["" for _ in expected]
        for part in parts:
            streamed[part["choices"][0]["index"]] += part["choices"][0]["text"]
        assert streamed == expected


def test_several_prompts_are_text_or_token_ids(port, tiny):
    asked = {"max_tokens": 5, "temperature": 1.2, "seed": 7}
    ids = [list(tiny.encode_text(text)) for text in ("1 2 3", "4 + 4")]
    _, by_text = ask(port, "/v1/completions", {"prompt": ["1 2 3", "4 + 4"], **asked})
    _, by_ids = ask(port, "/v1/completions", {"prompt": ids, **asked})
    assert [c["text"] for c in by_text["choices"]] == [c["text"] for c in by_ids["choices"]]
    assert by_ids["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_a_request_with_more_prompts_than_may_wait_is_served_bit_by_bit(tiny):
    with serving(tiny, slots=2, waiting=1) as (engine, port):
        texts = [f"{number} + 1" for number in range(9)]
        asked = {"max_tokens": 4, "temperature": 0}
        status, answer = ask(port, "/v1/completions", {"prompt": texts, **asked})
        alone = [ask(port, "/v1/completions", {"prompt": text, **asked})[1] for text in texts]
        assert status == 200
        assert [c["text"] for c in answer["choices"]] == [one["choices"][0]["text"] for one in alone]
        assert engine.load == (0, 0)


def test_offsets_say_where_each_token_begins_in_the_text(one_token):
    with serving(scripted("né ab")) as (_, port):
        _, answer = ask(port, "/v1/completions", {"prompt": [40], "logprobs": 0, "temperature": 0})
    told = answer["choices"][0]["logprobs"]
    assert told["tokens"] == ["n", "bytes:\\xc3", "bytes:\\xa9", " ", "a", "b", "<|im_end|>"]
    assert told["text_offset"] == [0, 1, 2, 2, 3, 4, 5]
    assert answer["choices"][0]["text"] == "né ab"


def test_tokens_are_told_by_text_and_bytes():
    pieces = TokenTable(tiny_tokenizer())
    first, second = (pieces[token] for token in tiny_tokenizer()("é", add_special_tokens=False)["input_ids"])
    assert (first, second) == (("bytes:\\xc3", [0xC3]), ("bytes:\\xa9", [0xA9]))
    assert pieces[40] == ("I", [73])
    assert pieces[tiny_tokenizer().eos_token_id] == ("<|im_end|>", None)
    assert pieces[271] == ("", [])  # the model has a token more than the tokenizer


def test_tokens_of_a_vocabulary_with_marked_spaces_keep_them():
    model = tokenizers.models.BPE({"▁a": 0, "b": 1, "<0xE2>": 2, "<unk>": 3}, [], byte_fallback=True)
    fast = tokenizers.Tokenizer(model)
    replace, strip = tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Strip(" ", 1, 0)
    fuse = tokenizers.decoders.Fuse()
    fast.decoder = tokenizers.decoders.Sequence([replace, tokenizers.decoders.ByteFallback(), fuse, strip])
    pieces = TokenTable(transformers.PreTrainedTokenizerFast(tokenizer_object=fast))
    assert [pieces[token].text for token in range(3)] == [" a", "b", "bytes:\\xe2"]
    assert [pieces[token].bytes for token in range(3)] == [[32, 97], [98], [0xE2]]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/chat/completions", b"{", 400, "not valid JSON"),
        ("/v1/chat/completions", {"messages": []}, 400, "at least one message"),
        ("/v1/chat/completions", chat("a", model="other"), 404, "no model 'other'; use 'small'"),
        ("/v1/chat/completions", chat("a", temperature=-1), 400, "temperature must be a number between"),
        ("/v1/chat/completions", chat("a", max_tokens=9999), 400, "exceed the context of 512"),
        ("/v1/chat/completions", chat("a", max_tokens=True), 400, "max_tokens"),
        ("/v1/chat/completions", chat("a", presence_penalty=3), 400, "must be a number between -2 and 2"),
        ("/v1/chat/completions", chat("a", frequency_penalty="1"), 400, "frequency_penalty must be a number"),
        ("/v1/chat/completions", chat("a", repetition_penalty=0), 400, "must be a number between 0.01 and"),
        ("/v1/chat/completions", chat("a", logit_bias={"x": 1}), 400, "keys of logit_bias must be token ids"),
        ("/v1/chat/completions", chat("a", logit_bias={"999999": 1}), 400, "token ids below"),
        ("/v1/chat/completions", chat("a", logit_bias={"5": 101}), 400, "logit_bias of token 5 must be a"),
        ("/v1/chat/completions", chat("a", logit_bias=[1]), 400, "logit_bias must be of type dict"),
        ("/v1/chat/completions", chat("a", guided_json={}), 400, "guided_json is not supported"),
        ("/v1/chat/completions", chat("a", n=0), 400, "n must be between"),
        (
            "/v1/chat/completions",
            chat("a", logprobs=True, top_logprobs=21),
            400,
            "top_logprobs must be between",
        ),
        ("/v1/chat/completions", chat("a", top_logprobs=2), 400, "top_logprobs requires logprobs: true"),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs must be between 0 and 20"),
        ("/v1/completions", {"prompt": "a", "logprobs": True}, 400, "logprobs must be of type int"),
        ("/v1/chat/completions", chat("a", echo=True), 400, "echo requires plain completions"),
        ("/v1/completions", {"prompt": "a", "top_logprobs": 1}, 400, "top_logprobs requires a chat"),
        ("/v1/completions", {"prompt": ["a", ""]}, 400, "prompt must be a non-empty string, a list of"),
        ("/v1/completions", {"prompt": [[1, 2], 3]}, 400, "prompt must be a non-empty string, a list of"),
        ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt must be a non-empty string, a list of"),
        ("/v1/completions", {"prompt": []}, 400, "prompt must be a non-empty string, a list of"),
        ("/v1/completions", {"prompt": [10**6]}, 400, "a list of this model's token ids"),
        ("/v1/completions", {"prompt": ["a"] * 1025}, 400, "has 1025 entries; send at most 1024"),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 999}, 400, "exceed the context of 512"),
        ("/v1/embeddings", {"input": "a"}, 404, "no such endpoint: POST"),
        ("/v1/chat/completions", chat("a", stop=["\ud800"]), 400, "half of a surrogate pair"),
        ("/v1/completions", {"prompt": "\ud800"}, 400, "half of a surrogate pair"),
        ("/v1/chat/completions", chat("a", stop=5), 400, "stop must be a non-empty string"),
        ("/v1/chat/completions", chat("a", stream_options="x"), 400, "stream_options must be of type dict"),
        ("/v1/chat/completions", chat("a", tools=[{"function": None}]), 400, "every entry of tools must be"),
        (
            "/v1/chat/completions",
            chat("a", tools=[{"function": "name"}]),
            400,
            "every entry of tools must be",
        ),
        (
            "/v1/chat/completions",
            chat("a", tool_choice="must"),
            400,
            "tool_choice must be auto, none, required",
        ),
        ("/v1/chat/completions", chat("a", top_k=1.5), 400, "top_k must be an integer"),
        ("/v1/chat/completions", chat("a", max_completion_tokens=0), 400, "at least 1"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_a_reason(port, path, body, status, message):
    got, answer = ask(port, path, body)
    assert got == status
    assert message in answer["error"]["message"]


@pytest.mark.parametrize(
    ("name", "changing", "harmless"),
    [
        ("allowed_token_ids", [1], None),
        ("truncate_prompt_tokens", 4, None),
        ("include_stop_str_in_output", True, False),
        ("skip_special_tokens", False, True),
        ("function_call", {"name": "add"}, "auto"),
    ],
)
def test_what_would_change_an_answer_and_is_not_supported_is_refused(port, name, changing, harmless):
    status, answer = ask(port, "/v1/chat/completions", chat("a", max_tokens=1, **{name: changing}))
    assert (status, answer["error"]["message"]) == (400, f"{name} is not supported")
    assert ask(port, "/v1/chat/completions", chat("a", max_tokens=1, **{name: harmless}))[0] == 200


def test_a_length_of_thousands_of_digits_is_refused(port):
    status, answer = ask(port, "/v1/completions", b"", **{"Content-Length": "1" * 5000})
    assert status == 400
    assert "Content-Length" in answer["error"]["message"]


def test_the_model_can_be_looked_up_by_name(port):
    assert ask(port, "/v1/models/small", None)[1]["id"] == "small"
    assert ask(port, "/v1/models/other", None)[0] == 404


def test_a_request_that_the_server_fails_at_is_answered_500_and_the_next_one_as_ever(port):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerMetrics, "render", lambda *_, **__: 1 // 0)
        assert ask(port, "/metrics", None)[0] == 500
    assert ask(port, "/health", None)[0] == 200


def test_penalties_and_biases_change_what_is_written(port, tiny):
    asked = {"prompt": "3 4 5", "max_tokens": 12, "temperature": 0}
    (letter,) = tiny.encode_text("z")
    _, biased = ask(port, "/v1/completions", {**asked, "logit_bias": {str(letter): 100}})
    assert biased["choices"][0]["text"] == "z" * 12
    both = {"logit_bias": {str(letter): 100}, "frequency_penalty": 2, "presence_penalty": 2}
    _, answer = ask(port, "/v1/completions", {**asked, **both, "max_tokens": 60})
    assert answer["choices"][0]["text"].count("z") < 60
    _, plain = ask(port, "/v1/completions", asked)
    neutral = {"logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1}
    assert ask(port, "/v1/completions", {**asked, **neutral})[1]["choices"] == plain["choices"]


def test_stop_strings_end_an_answer_and_are_not_part_of_it(port, tiny):
    whole, _ = offline(tiny, "3 4 5", seed=2, max_tokens=60, temperature=0.0)
    stop = whole[5:7]
    for stream in (False, True):
        _, answer = ask(
            port,
            "/v1/chat/completions",
            chat("3 4 5", seed=2, temperature=0, max_tokens=60, stop=stop, stream=stream),
        )
        if stream:
            text = "".join(p["choices"][0]["delta"].get("content") or "" for p in answer)
            reason = answer[-1]["choices"][0]["finish_reason"]
        else:
            text = answer["choices"][0]["message"]["content"]
            reason = answer["choices"][0]["finish_reason"]
        assert (text, reason) == (whole[: whole.index(stop)], "stop")


class Unread:
    """A connection on which nothing comes, and that takes whatever is written."""

    def at_eof(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        pass

    async def drain(self) -> None:
        pass


def test_a_connection_can_be_cancelled_at_any_moment_of_its_answer():
    async def reply(question: HTTPRequest) -> HTTPReply:
        await asyncio.sleep(0)
        return HTTPReply(body={})

    async def cancelled_after(turns: int) -> bool:
        """Whether an answer is cancelled, or has ended, when it was told to in this turn of the loop."""
        line: Any = Unread()
        question = HTTPRequest(method="GET", path="/", headers={}, body=b"")
        task = asyncio.ensure_future(answer(reply, question, line, line, close=False))
        for _ in range(turns):
            await asyncio.sleep(0)
        ended = not task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return ended or task.cancelled()

    assert [asyncio.run(cancelled_after(turns)) for turns in range(12)] == [True] * 12


def test_a_key_is_asked_for(tiny):
    with serving(tiny, api_key="secret") as (_, port):
        assert ask(port, "/v1/models", None)[0] == 401
        status, answer = ask(port, "/v1/chat/completions", chat("a"), Authorization="Bearer wrong")
        assert (status, answer) == (
            401,
            {
                "error": {
                    "message": "the API key is missing or wrong",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": "invalid_api_key",
                }
            },
        )
        assert ask(port, "/v1/models", None, Authorization="Bearer secret")[0] == 200
        assert ask(port, "/v1/models", None, Authorization="bearer secret")[0] == 200
        assert ask(port, "/health", None)[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Host": "proxy.example", "Origin": "https://proxy.example"}, 200),
        ({"Host": "evil.example"}, 403),  # DNS rebinding
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "[half"}, 403),
    ],
)
def test_pages_of_other_sites_are_refused_without_a_key(tiny, headers, status):
    with serving(tiny, allowed_hosts=["Proxy.example"]) as (_, port):
        assert ask(port, "/v1/models", None, **headers)[0] == status
        assert ask(port, "/health", None, **headers)[0] == status


def exchanged(port: int, method: str, path: str, body: Any = None, **headers: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, None if body is None else json.dumps(body), named)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response


@pytest.mark.parametrize("api_key", [None, "secret"])
def test_pages_of_an_origin_that_is_named_may_use_the_server(tiny, api_key):
    page, allowed = "https://app.example", "Access-Control-Allow-Origin"
    with serving(tiny, cors=[page], api_key=api_key) as (_, port):
        asks = {
            "Access_Control_Request_Method": "POST",
            "Access_Control_Request_Headers": "authorization,x-a",
        }
        before = exchanged(port, "OPTIONS", "/v1/chat/completions", Origin=page, **asks)
        assert (before.status, before.headers[allowed], before.headers["Vary"]) == (204, page, "Origin")
        assert "POST" in before.headers["Access-Control-Allow-Methods"]
        assert before.headers["Access-Control-Allow-Headers"] == "authorization,x-a"
        key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        for body in (chat("a", max_tokens=2), chat("a", max_tokens=2, stream=True)):
            response = exchanged(port, "POST", "/v1/chat/completions", body, Origin=page, **key)
            assert (response.status, response.headers[allowed]) == (200, page)
        wrong = exchanged(port, "POST", "/v1/chat/completions", {"messages": []}, Origin=page, **key)
        assert (wrong.status, wrong.headers[allowed]) == (400, page)
        other = exchanged(port, "OPTIONS", "/v1/chat/completions", Origin="https://evil.example", **asks)
        assert (other.status, other.headers[allowed]) == (401 if api_key else 403, None)
        assert exchanged(port, "GET", "/v1/models", **key).headers[allowed] is None


def test_any_origin_may_be_allowed(tiny):
    with serving(tiny, cors=["*"]) as (_, port):
        response = exchanged(port, "GET", "/v1/models", Origin="https://any.example")
        assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (
            200,
            "https://any.example",
        )
        assert exchanged(port, "GET", "/v1/models", Host="evil.example").status == 403


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://"])
def test_what_is_no_origin_is_refused(origin, capsys):
    assert cli.main(["serve", "tiny", "--cors", origin]) == 2
    assert "--cors must be an origin such as https://app.example" in capsys.readouterr().err


def test_figures_for_prometheus_add_up(tiny):
    parser = pytest.importorskip("prometheus_client.parser")
    with serving(tiny) as (_, port):
        _, first = ask(port, "/v1/completions", {"prompt": ["1 2", "3"], "max_tokens": 3, "temperature": 0})
        _, second = ask(port, "/v1/chat/completions", chat("7 + 5", max_tokens=4))
        ask(port, "/v1/chat/completions", {"messages": []})
        ask(port, "/nowhere", None)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    samples = {(s.name, *s.labels.values()): s.value for f in families.values() for s in f.samples}
    assert samples["groupwise_requests_total", "/v1/completions", "200"] == 1
    assert samples["groupwise_requests_total", "/v1/chat/completions", "200"] == 1
    assert samples["groupwise_requests_total", "/v1/chat/completions", "400"] == 1
    assert samples["groupwise_requests_total", "other", "404"] == 1
    usages = [first["usage"], second["usage"]]
    for name, key in (("prompt", "prompt_tokens"), ("generated", "completion_tokens")):
        assert samples[(f"groupwise_{name}_tokens_total",)] == sum(usage[key] for usage in usages)
    assert samples[("groupwise_completions_running",)] == samples[("groupwise_completions_waiting",)] == 0
    for name in ("time_to_first_token_seconds", "request_duration_seconds"):
        assert families[f"groupwise_{name}"].type == "histogram"
        assert samples[(f"groupwise_{name}_count",)] == samples[(f"groupwise_{name}_bucket", "+Inf")] == 2
        assert samples[(f"groupwise_{name}_sum",)] > 0


def test_a_chunked_body_is_read(port):
    body = json.dumps({"prompt": "1", "max_tokens": 1}).encode()
    parts = b"".join(b"%x;x=y\r\n%b\r\n" % (len(p), p) for p in (body[:5], body[5:])) + b"0\r\nA: b\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    assert b" 200 OK" in exchange(port, head + parts, end=False)
    assert b"not a valid sequence of chunks" in exchange(port, head + b"x\r\n", end=False)
    assert b" 413 " in exchange(port, head + b"fffffffff\r\n", end=False)


def test_a_key_proves_enough_behind_any_name(tiny):
    with serving(tiny, api_key="secret") as (_, port):
        headers = {"Host": "model.example", "Origin": "https://app.example"}
        assert ask(port, "/v1/models", None, Authorization="Bearer secret", **headers)[0] == 200


def test_a_prompt_too_long_for_any_tokenizer_is_refused_unread(port, tiny, monkeypatch):
    text = "a" * (512 * tiny.longest + 1)
    monkeypatch.setattr(type(tiny.tokenizer), "__call__", lambda *_, **__: pytest.fail("it was encoded"))
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", chat(text)),
    ):
        status, answer = ask(port, path, body)
        assert status == 400
        assert "cannot fit the context of 512 tokens" in answer["error"]["message"]


def test_a_short_request_does_not_wait_for_a_long_one_to_be_encoded(port, tiny, monkeypatch):
    long, reading, go_on = "b" * 40_000, threading.Event(), threading.Event()
    encode = type(tiny).encode_text

    def slowly(self: Policy, text: str, **settings: Any) -> tuple[int, ...]:
        if long in text:
            reading.set()
            assert go_on.wait(60)
        return encode(self, text, **settings)

    monkeypatch.setattr(type(tiny), "encode_text", slowly)
    answers: list[int] = []
    slow = threading.Thread(target=lambda: answers.append(ask(port, "/v1/completions", {"prompt": long})[0]))
    slow.start()
    try:
        assert reading.wait(60)
        assert ask(port, "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        assert answers == []
    finally:
        go_on.set()
        slow.join(60)
    assert answers == [400]


def exchange(port: int, request: bytes, *, end: bool) -> bytes:
    """Send bytes, end our half of the connection or not, and return all that comes."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as line:
        line.sendall(request)
        if end:
            line.shutdown(socket.SHUT_WR)
        received = b""
        while part := line.recv(65536):
            received += part
        return received


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/absent"])
def test_head_sends_the_headers_of_get_and_no_body(port, path):
    found = exchange(port, f"HEAD {path} HTTP/1.1\r\nConnection: close\r\n\r\n".encode(), end=False)
    whole = exchange(port, f"GET {path} HTTP/1.1\r\nConnection: close\r\n\r\n".encode(), end=False)
    head, _, body = whole.partition(b"\r\n\r\n")
    assert body
    if path != "/v1/absent":  # whose message names the method
        assert found == head + b"\r\n\r\n"
    assert found.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_half_gets_its_answer(port, stream):
    body = json.dumps(chat("a", stream=stream, max_tokens=200, temperature=1.5, stop=["\0"])).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    received = exchange(port, head + body, end=True)
    assert b"HTTP/1.1 200 OK" in received
    assert (b"data: [DONE]" in received) if stream else (b'"finish_reason"' in received)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_without_reading_frees_its_place(tiny, stream):
    with serving(tiny, slots=1) as (engine, port):
        body = json.dumps(chat("a", stream=stream, temperature=1.5)).encode()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/chat/completions", body=body)
        connection.close()
        assert ask(port, "/v1/chat/completions", chat("b", max_tokens=3))[0] == 200
        deadline = time.monotonic() + 60
        while engine.load != (0, 0) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert engine.load == (0, 0)


def test_more_than_may_wait_is_answered_with_429_and_the_rest_is_served(tiny):
    with serving(tiny, slots=2, waiting=1) as (engine, port):
        statuses: list[int] = []

        def client(number: int) -> None:
            body = chat(str(number), max_tokens=120, temperature=1.5, stop=["\0"])
            statuses.append(ask(port, "/v1/chat/completions", body)[0])

        threads = [threading.Thread(target=client, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 3
        assert engine.load == (0, 0)
        assert engine.scheduler.pool.free == engine.scheduler.pool.count


def test_a_client_that_goes_away_frees_its_place(tiny):
    with serving(tiny, slots=1) as (engine, port):
        body = json.dumps(chat("a", stream=True, temperature=1.5)).encode()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/chat/completions", body=body)
        assert connection.getresponse().read(10)
        connection.close()
        status, _ = ask(port, "/v1/chat/completions", chat("b", max_tokens=3))
        assert status == 200
        assert engine.load == (0, 0)


@pytest.fixture
def one_token(monkeypatch) -> None:
    """Every prompt is one token, as the scripted policy wants it."""
    monkeypatch.setattr(Scripted, "encode", lambda self, prompt, tools=(), most=None: (40,))


def test_calls_of_tools_are_read_out_of_the_answer(one_token):
    with serving(scripted(CALL)) as (_, port):
        _, answer = ask(port, "/v1/chat/completions", chat("a", tools=[TOOL], temperature=0))
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "I add."
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        _, parts = ask(port, "/v1/chat/completions", chat("a", tools=[TOOL], temperature=0, stream=True))
        deltas = [part["choices"][0]["delta"] for part in parts]
        assert "".join(delta.get("content") or "" for delta in deltas) == "I add."
        (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
        assert calls[0]["function"]["name"] == "add"
        # Without tools the text is text.
        _, plain = ask(port, "/v1/chat/completions", chat("a", temperature=0))
        assert plain["choices"][0]["message"]["content"] == CALL


MADE = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "add", "parameters": {"a": 1}}',
        '<think>\n</think>\n{"name": "add", "parameters": {}}',
        '{"answer": 3} ',
        f"Let me see. {MADE} That was it.",
        f"\n{MADE} ",
        f"<think>use <tool_call> now</think>Hi {MADE}{MADE}",
        "<tool_call>no json</tool_call> and <tool",
        "nothing to call ",
    ],
)
def test_a_stream_with_tools_adds_up_to_the_answer_in_one_piece(text):
    job = Job(prompt=(1,), seeds=(0,), sampling=Sampling())
    usual: dict[str, Any] = {"stream": True, "usage": False, "logprobs": False, "silent": False}
    decode: Callable[[Any], str] = lambda tokens: "".join(map(chr, tokens))  # noqa: E731
    asked = CompletionRequest(chat=True, jobs=(job,), echo=("",), tools=ToolCallReader(), **usual)
    telling = ResponseBuilder(asked, model="small", decode=decode, pieces=TokenTable(tiny_tokenizer()))
    deltas = []
    for place, letter in enumerate(text, 1):
        finish = "end" if place == len(text) else None
        words = StreamChunk(0, 0, (ord(letter),), (0.0,), (), (), finish)
        deltas += [part["choices"][0]["delta"] for part in telling.take([words])]
    message = telling.whole()["choices"][0]["message"]
    assert "".join(delta.get("content", "") for delta in deltas) == (message["content"] or "")
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["function"] for call in calls] == [c["function"] for c in message.get("tool_calls", [])]


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {key: {"type": kind}}}}}
    for name, key, kind in (("search", "limit", "integer"), ("add", "x", "integer"))
]


@pytest.mark.parametrize("style", WRITERS)
def test_calls_are_read_in_the_format_of_the_template_and_go_back_into_it(style):
    codec = TokenizerCodec(tokenizer_of(style), vocabulary=100_000)
    made = [("search", {"query": "a b", "limit": 3}), ("add", {"x": 1})]
    turn = turn_text(codec.tokenizer, written_calls(codec.tokenizer, made))
    tokens = codec.encode_text(turn + codec.tokenizer.eos_token, special=False)
    job = Job(prompt=(1,), seeds=(0,), sampling=Sampling())
    usual: dict[str, Any] = {"stream": True, "usage": False, "logprobs": False, "silent": False}
    reader = ToolCallReader.of(codec, TOOLS)
    asked = CompletionRequest(chat=True, jobs=(job,), echo=("",), tools=reader, **usual)
    builder = ResponseBuilder(asked, model="m", decode=codec.decode, pieces=TokenTable(codec.tokenizer))
    deltas = []
    for place, token in enumerate(tokens, 1):
        finish = "end" if place == len(tokens) else None
        chunk = StreamChunk(0, 0, (token,), (0.0,), (), (), finish)
        deltas += [part["choices"][0]["delta"] for part in builder.take([chunk])]
    (choice,) = builder.whole()["choices"]
    message = choice["message"]
    functions = [call["function"] for call in message["tool_calls"]]
    assert [(one["name"], json.loads(one["arguments"])) for one in functions] == made
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", None)
    assert "".join(delta.get("content") or "" for delta in deltas) == ""
    streamed = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    assert streamed == functions
    # The client sends the calls and their results back: the tokens after the turn are those of the template.
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"R{number}"}
        for number, call in enumerate(message["tool_calls"])
    ]
    chat = template_messages([{"role": "user", "content": "Hm?"}, message, *results], codec)
    after = codec.encode_continuation(chat, 2, ended=True)
    assert after is not None
    assert codec.tokenizer.decode(after) in render(codec.tokenizer, chat)
    assert [f"R{n}" in codec.tokenizer.decode(after) for n in (0, 1)] == [True, True]
    assert turn in render(codec.tokenizer, chat)


def test_a_forced_call_in_hermes_format_is_read_from_a_model_of_another_format():
    codec = TokenizerCodec(tokenizer_of("mistral"), vocabulary=100_000)
    reader = ToolCallReader.of(codec, TOOLS)
    assert reader.read(MADE, codec.encode_text(MADE, special=False))[1][0]["name"] == "add"
    assert reader.read("Hello.", codec.encode_text("Hello.", special=False)) == ("Hello.", [])


@pytest.mark.parametrize(
    ("text", "said", "names"),
    [
        ("hello", "hello", []),
        ('<tool_call>{"name": "a", "arguments": {}}</tool_call>', "", ["a"]),
        ('x<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b"}</tool_call>', "x", ["a", "b"]),
        ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
        ('<tool_call>{"name": 3}', '<tool_call>{"name": 3}', []),
        ('<tool_call>{"name": "a"}', '<tool_call>{"name": "a"}', []),  # never closed, as in training
        ('<think>\n<tool_call>{"name": "a"}</tool_call></think>\nb', None, []),  # thought, not called
        ('<think>\n</think>{"name": "a", "parameters": {}}', "<think>\n</think>", ["a"]),
    ],
)
def test_reading_calls(text, said, names):
    assert read_answer(text)[0] == (text if said is None else said)
    assert [call["name"] for call in read_answer(text)[1]] == names


def test_calls_that_a_client_sends_back_become_what_the_template_takes():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": "I add.", "tool_calls": [call]}
    known = for_template(message, knows_calls=True)
    assert known["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    assert for_template(message, knows_calls=False) == {
        "role": "assistant",
        "content": CALL.replace(". <", ".\n<"),
    }


def test_text_never_shows_half_a_character_or_part_of_a_stop_string():
    decode: Callable[[Any], str] = lambda tokens: bytes(tokens).decode(errors="replace")  # noqa: E731
    stream = TextStream(decode, stop=["END"])
    shown = [stream.push([byte], None) for byte in "né EN".encode()]
    assert shown == ["n", "", "é", " ", "", ""]
    assert stream.push(list(b"T E"), None) == "ENT "
    assert stream.push(list(b"ND more"), "stop") == ""
    assert stream.text == "né ENT "


def test_the_official_client_is_satisfied(tiny, one_token):
    openai = pytest.importorskip("openai")
    with serving(tiny, api_key="secret") as (_, port):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0)
        assert [model.id for model in client.models.list()] == ["small"]
        asked = {"model": "small", "messages": [{"role": "user", "content": "4 + 4"}], "max_tokens": 16}
        answer = client.chat.completions.create(**asked, seed=1, logprobs=True)
        assert answer.choices[0].message.content == offline(tiny, "4 + 4", seed=1, max_tokens=16)[0]
        assert answer.choices[0].logprobs.content[0].logprob <= 0
        stream = client.chat.completions.create(**asked, seed=1, stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in stream)
        assert text == answer.choices[0].message.content
        answer = client.chat.completions.create(**asked, temperature=0, logprobs=True, top_logprobs=5)
        content = answer.choices[0].logprobs.content
        assert [len(entry.top_logprobs) for entry in content] == [5] * answer.usage.completion_tokens
        assert all(entry.top_logprobs[0].token == entry.token for entry in content)
        stream = client.chat.completions.create(
            **asked, temperature=0, logprobs=True, top_logprobs=5, stream=True
        )
        shown = [part.choices[0].logprobs for part in stream]
        assert [entry for part in shown if part for entry in part.content] == content
        plain = client.completions.create(model="small", prompt="1 2 3", max_tokens=4, logprobs=5, n=2)
        assert plain.usage.completion_tokens == sum(len(each.logprobs.tokens) for each in plain.choices)
        assert {len(top) for each in plain.choices for top in each.logprobs.top_logprobs} <= {5, 6}
        plain = client.completions.create(model="small", prompt="1 2 3", max_tokens=1, logprobs=5, echo=True)
        assert plain.choices[0].logprobs.token_logprobs[0] is None
        assert len(plain.choices[0].logprobs.tokens) == plain.usage.total_tokens
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**{**asked, "model": "other"})
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
    with serving(scripted(CALL)) as (_, port):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        answer = client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": "a"}],
            tools=[TOOL],
            temperature=0,
        )
        assert answer.choices[0].message.tool_calls[0].function.name == "add"
        json.loads(answer.choices[0].message.tool_calls[0].function.arguments)


def test_a_generator_that_fails_says_so_and_the_server_goes_on_saying_so(tiny, monkeypatch, caplog):
    ended: list[Any] = []
    monkeypatch.setattr("threading.excepthook", ended.append)
    with serving(tiny) as (_, port):

        def broken(steps: CPUSteps, meanwhile: Any) -> list[Any]:
            raise RuntimeError("out of luck")

        monkeypatch.setattr(CPUSteps, "advance", broken)
        for _ in range(2):
            status, said = ask(port, "/v1/completions", {"prompt": "1", "max_tokens": 2})
            assert status == 500
            assert "out of luck" in said["error"]["message"]
        status, said = ask(port, "/health", None)
        assert (status, said["status"]) == (500, "RuntimeError: out of luck")
    assert "the engine failed" in caplog.text
    assert [str(one.exc_value) for one in ended] == ["out of luck"]  # in the end it is an error, not an end


@pytest.mark.parametrize(
    ("width", "said", "left"),
    [(192, {}, 3), (576, {}, None), (192, {"OMP_NUM_THREADS": "4"}, None)],
    ids=["small", "large", "told"],
)
def test_a_small_model_leaves_a_core_to_whoever_talks_to_clients(width, said, left, monkeypatch):
    policy: Any = SimpleNamespace(device=torch.device("cpu"), head_weight=torch.zeros(2, width))
    chosen: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    leave_a_core(policy)
    assert chosen == ([left] if left else [])


@pytest.mark.parametrize("host", ["127.0.0.1", "no.such.host.invalid", "a" * 70])
def test_an_address_that_cannot_be_listened_at_is_refused_before_a_model_is_loaded(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("groupwise.model.load.load_for_generation", loaded)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["serve", "tiny", "--host", host, "--port", str(port), "--api-key", "key"]
        assert cli.main(words) != 0
    told = capsys.readouterr().err
    assert f"cannot listen on {host}:{port}: " in told
    assert ("--port" in told) == (host == "127.0.0.1")


def test_ctrl_c_while_the_front_starts_is_left_to_the_other_process():
    handler = signal.getsignal(signal.SIGINT)
    connection = start_front()
    assert signal.getsignal(signal.SIGINT) is handler
    (front,) = [child for child in active_children() if child.name == "groupwise-front"]
    deadline = time.monotonic() + 60
    with connection:
        for _ in range(20):  # while it imports
            os.kill(front.pid, signal.SIGINT)
            time.sleep(0.05)
        assert front.is_alive()
    front.join(deadline - time.monotonic())
    assert front.exitcode == 0
