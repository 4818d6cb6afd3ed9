"""Agents talk to the policy in training: every token that they are sent is recorded as it was sampled."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from groupwise.config.schema import AgentConfig, EngineConfig, LoraConfig, ModelConfig
from groupwise.engine.engine import Engine
from groupwise.model.load import load_policy
from groupwise.model.policy import Policy
from groupwise.records import Completion, Example, Group, Request, Rollout, Sampling
from groupwise.rollout.agent_rollouts import AgentRollouts
from groupwise.rollout.collect import collect
from groupwise.serve.agent_endpoint import open_endpoint

SAMPLING = Sampling(max_tokens=6, temperature=1.3)


@pytest.fixture(scope="module")
def tiny() -> Policy:
    return load_policy(ModelConfig(device="cpu", dtype="float32"), LoraConfig(r=0))


class Recorded:
    """An engine that remembers what it generated, by prompt; `texts` take the place of what it samples."""

    def __init__(self, policy: Policy, texts: Sequence[str] = ()) -> None:
        self.policy, self.texts = policy, list(texts)
        self.engine = Engine(policy, EngineConfig())
        self.generated: list[tuple[Request, list[Completion]]] = []

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        if self.texts:
            completions = [[self.written(self.texts.pop(0)) for _ in request.seeds] for request in requests]
        else:
            completions = self.engine.generate(requests, sampling)
        self.generated += zip(requests, completions, strict=True)
        return completions

    def written(self, text: str) -> Completion:
        tokens = (*self.policy.encode_text(text, special=False), min(self.policy.end_tokens))
        numbers = (-0.5,) * len(tokens)
        return Completion(tokens=tokens, logprobs=numbers, entropies=numbers, finish="end")


class Client:
    """As much of an OpenAI client as these tests need."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url, self.headers = base_url, {"Authorization": f"Bearer {api_key}"}

    def ask(self, path: str = "/chat/completions", **body: Any) -> dict[str, Any]:
        data = json.dumps({"model": "any", **body}).encode()
        request = urllib.request.Request(self.base_url + path, data=data, headers=self.headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                message = json.load(error)["error"]["message"]
            raise RuntimeError(f"{error.code} {message}") from None
        if text.startswith("data: "):
            lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
            return {"parts": [json.loads(line) for line in lines[:-1]]}
        answer: dict[str, Any] = json.loads(text)
        return answer

    def chat(self, messages: list[Any], **settings: Any) -> dict[str, Any]:
        return self.ask(messages=messages, **settings)["choices"][0]["message"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def roll(
    policy: Policy,
    agent: Callable[[Client, Example], Any],
    *,
    engine: Any = None,
    members: int = 2,
    examples: int = 1,
    sampling: Sampling = SAMPLING,
    **settings: Any,
) -> list[Group]:
    """The groups of an agent that is given a client."""

    def run_agent(example: Example, base_url: str, api_key: str) -> Any:
        return agent(Client(base_url, api_key), example)

    rollouts = AgentRollouts(run_agent, AgentConfig(seconds=30, **settings), open_endpoint)
    return collect(
        [Example({"n": n}) for n in range(examples)],
        ask=str,
        codec=policy,
        engine=engine or Engine(policy, EngineConfig()),
        sampling=sampling,
        group_size=members,
        seed_parts=(7, "train", 1),
        tools=rollouts,
    )


def one(policy: Policy, agent: Callable[[Client, Example], Any], *texts: str, **settings: Any) -> Rollout:
    """The only rollout of an agent; `texts` are what the policy writes."""
    engine = Recorded(policy, texts)
    ((rollout,),) = [group.rollouts for group in roll(policy, agent, engine=engine, members=1, **settings)]
    return rollout


def three_turns(client: Client, example: Example) -> str:
    messages: list[Any] = [user(f"{example['n']} + 1")]
    for _ in range(3):
        answer = client.chat(messages)
        messages += [answer, user("Again.")]
    return str(answer["content"])


def trained(sequence: Any) -> list[int]:
    return [token for token, chosen in zip(sequence.tokens, sequence.trained, strict=True) if chosen]


def test_a_conversation_is_one_sequence_of_exactly_the_sampled_tokens(tiny):
    engine = Recorded(tiny)
    groups = roll(tiny, three_turns, engine=engine, members=1, examples=3)
    sampled = {request.prompt: completions[0] for request, completions in engine.generated}
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        assert (rollout.error, rollout.branches, rollout.rewritten) == (None, (), 0)
        assert len(rollout.turns) == 3
        assert [turn.observation for turn in rollout.turns] == ["Again.", "Again.", ""]
        assert rollout.prompt == ({"role": "user", "content": rollout.prompt[0]["content"]},)
        position = rollout.prompt_length
        for _ in range(3):
            completion = sampled[rollout.tokens[:position]]
            length = len(completion.tokens)
            assert rollout.tokens[position : position + length] == completion.tokens
            assert rollout.logprobs[position : position + length] == completion.logprobs
            assert rollout.entropies[position : position + length] == completion.entropies
            position += length
            position += next((n for n, flag in enumerate(rollout.trained[position:]) if flag), 0)
        assert rollout.text == tiny.decode(completion.tokens)


def test_the_same_calls_give_the_same_bits_whatever_the_timing(tiny):
    def slow(client: Client, example: Example) -> str:
        threading.Event().wait(0.05 * (3 - example["n"]))
        return three_turns(client, example)

    assert roll(tiny, three_turns, examples=3) == roll(tiny, slow, examples=3)
    assert roll(tiny, three_turns, examples=3) == roll(tiny, slow, examples=3, concurrency=6)


def test_agents_that_wait_for_a_place_get_the_same_tokens(tiny):
    few, many = (roll(tiny, three_turns, members=4, concurrency=count) for count in (1, 64))
    tokens = [[rollout.tokens for group in groups for rollout in group.rollouts] for groups in (few, many)]
    assert tokens[0] == tokens[1]


def test_an_edited_answer_is_split_off_and_counted(tiny):
    def edits(client: Client, example: Example) -> None:
        first = client.chat([user("1 + 1")])
        client.chat([user("1 + 1"), {**first, "content": "it is 3"}, user("Sure?")])

    rollout = one(tiny, edits, "it is 2", "yes")
    assert (rollout.rewritten, len(rollout.branches)) == (1, 1)
    assert tiny.decode(trained(rollout)) == "it is 2"
    assert tiny.decode(trained(rollout.branches[0])) == "yes"
    assert "it is 3" in tiny.decode(rollout.branches[0].tokens)


def test_dropped_messages_are_split_off_and_counted(tiny):
    def forgets(client: Client, example: Example) -> None:
        messages: list[Any] = [user("1 + 1")]
        messages += [client.chat(messages), user("Sure?")]
        messages += [client.chat(messages), user("Why?")]
        client.chat(messages[2:])

    rollout = one(tiny, forgets, "it is 2", "yes", "so")
    assert (rollout.rewritten, [tiny.decode(trained(branch)) for branch in rollout.branches]) == (1, ["so"])
    assert [turn.text for turn in rollout.turns] == ["it is 2", "yes", "so"]


def test_further_conversations_and_a_second_try_are_branches_but_not_rewritten(tiny):
    def asks_twice(client: Client, example: Example) -> None:
        messages: list[Any] = [user("1 + 1")]
        messages += [client.chat(messages), user("Sure?")]
        client.chat(messages)
        client.chat(messages)
        client.chat([user("Something else.")])

    rollout = one(tiny, asks_twice, "it is 2", "yes", "no", "fine")
    assert rollout.rewritten == 0
    assert [tiny.decode(trained(sequence)) for sequence in rollout.sequences] == ["it is 2yes", "no", "fine"]
    assert rollout.branches[0].tokens[: len(rollout.branches[0].tokens) - 3]
    assert rollout.length == sum(len(trained(sequence)) for sequence in rollout.sequences)


def test_an_answer_that_is_left_out_is_counted_though_no_answer_follows(tiny):
    def forgets(client: Client, example: Example) -> None:
        client.chat([user("1 + 1")])
        client.chat([user("1 + 1"), user("Sure?")])
        client.chat([user("1 + 1"), user("Sure?"), user("Why?")])

    assert one(tiny, forgets, "it is 2", "yes", "so").rewritten == 2


def test_answers_that_the_policy_did_not_write_are_not_counted(tiny):
    def shows_examples(client: Client, example: Example) -> None:
        given: list[Any] = [user("2 + 2"), {"role": "assistant", "content": "it is 4"}]
        answer = client.chat([user("1 + 1")])
        client.chat([*given, user("3 + 3")])  # another conversation, with a worked example
        client.chat([user("1 + 1"), answer, user("Sure?"), {"role": "assistant", "content": "I"}])
        client.chat([user("1 + 1"), answer, user("Really?")])  # another question in place of the last

    assert one(tiny, shows_examples, "it is 2", "it is 6", "am", "yes").rewritten == 0


def test_answers_are_not_counted_as_changed_when_the_tools_change(tiny):
    def without_tools(client: Client, example: Example) -> None:
        answer = client.chat([user("Add.")], tools=[ADD])
        client.chat([user("Add."), answer, user("Sure?")])

    rollout = one(tiny, without_tools, "it is 4", "yes")
    assert (rollout.rewritten, len(rollout.branches)) == (0, 1)


def test_an_answer_that_comes_after_the_agent_has_returned_is_not_part_of_the_rollout(tiny):
    asked, returned = threading.Event(), threading.Event()
    engine = Recorded(tiny)

    def write(text: str) -> Completion:
        if text == "late":
            asked.set()
            assert returned.wait(10)
            time.sleep(0.3)  # until the rollout has ended
        return Recorded.written(engine, text)

    def agent(client: Client, example: Example) -> str:
        if example["n"]:
            assert returned.wait(10)
            client.chat([user("1 + 1")])
            return "second"

        def ask() -> None:
            with suppress(RuntimeError, OSError):
                client.chat([user("Late?")])

        client.chat([user("1 + 1")])
        threading.Thread(target=ask, daemon=True).start()
        assert asked.wait(10)
        returned.set()
        return "first"

    engine.written, engine.texts = write, ["soon", "late", "then"]  # type: ignore[method-assign]
    first, second = roll(tiny, agent, engine=engine, members=1, examples=2, overlap=True)
    assert [turn.text for turn in first.rollouts[0].turns] == ["soon"]
    assert [turn.text for turn in second.rollouts[0].turns] == ["then"]


def test_tokens_are_kept_though_the_text_would_be_tokenized_otherwise(tiny):
    """The policy may write a word in other tokens than the tokenizer does."""
    engine = Recorded(tiny)
    end = min(tiny.end_tokens)
    letters = tuple(token for letter in "12 + 3" for token in tiny.encode_text(letter, special=False))
    whole = tiny.encode_text("12 + 3", special=False)
    numbers = (-1.0,) * (len(letters) + 1)
    odd = Completion(tokens=(*letters, end), logprobs=numbers, entropies=numbers, finish="end")
    engine.written = lambda text: odd  # type: ignore[method-assign]
    engine.texts = ["first", "second"]

    def agent(client: Client, example: Example) -> None:
        answer = client.chat([user("1 + 1")])
        client.chat([user("1 + 1"), answer, user("Sure?")])

    ((rollout,),) = [group.rollouts for group in roll(tiny, agent, engine=engine, members=1)]
    assert (rollout.rewritten, rollout.branches) == (0, ())
    assert trained(rollout) == [*odd.tokens, *odd.tokens]
    assert len(letters) >= len(whole)


def test_several_choices_and_concurrent_calls_each_have_a_sequence(tiny):
    def agent(client: Client, example: Example) -> str:
        answers: dict[int, Any] = {}

        def ask(number: int) -> None:
            answers[number] = client.chat([user(f"Part {number}")])["content"]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        several = client.ask(messages=[user("All")], n=2, return_token_ids=True)
        assert len(several["choices"]) == 2
        return json.dumps([choice["token_ids"] for choice in several["choices"]])

    ((first, second),) = [group.rollouts for group in roll(tiny, agent)]
    assert first.error is None
    assert len(first.sequences) == 5
    assert [trained(sequence) for sequence in first.sequences[3:]] == json.loads(first.text)
    prompts = [sequence.tokens[: sequence.prompt_length] for sequence in first.sequences]
    assert len(set(prompts)) == 4
    assert {trained(s)[0] for s in first.sequences} or second


def test_a_stream_is_what_is_recorded(tiny):
    def agent(client: Client, example: Example) -> str:
        options = {"include_usage": True}
        parts = client.ask(
            messages=[user("1 + 1")], stream=True, stream_options=options, return_token_ids=True
        )
        tokens = [
            token
            for part in parts["parts"]
            for choice in part["choices"]
            for token in choice.get("token_ids", [])
        ]
        assert parts["parts"][-1]["usage"]["completion_tokens"] == len(tokens)
        return json.dumps(tokens)

    rollout = one(tiny, agent)
    assert trained(rollout) == json.loads(rollout.text)


def test_plain_completions_are_recorded_and_continued_by_their_tokens(tiny):
    def agent(client: Client, example: Example) -> None:
        answer = client.ask("/completions", prompt="1 + 1", max_tokens=3, return_token_ids=True)
        (choice,) = answer["choices"]
        longer = [*choice["prompt_token_ids"], *choice["token_ids"], *choice["prompt_token_ids"]]
        client.ask("/completions", prompt=longer, max_tokens=3)

    rollout = one(tiny, agent)
    assert (rollout.error, len(rollout.sequences), rollout.prompt) == (None, 1, "1 + 1")
    assert len(rollout.turns) == 2


ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}


def test_calls_of_tools_are_parsed_recorded_and_continued(tiny):
    def agent(client: Client, example: Example) -> Any:
        messages: list[Any] = [user("Add.")]
        answer = client.chat(messages, tools=[ADD])
        (call,) = answer["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
        return client.chat([*messages, answer, result], tools=[ADD])["content"]

    rollout = one(tiny, agent, '<tool_call>{"name":"add","arguments":{"x":3}}</tool_call>', "it is 4")
    assert (rollout.error, rollout.rewritten, rollout.branches) == (None, 0, ())
    (made,) = rollout.calls
    assert (made.name, made.arguments, made.result) == ("add", {"x": 3}, "4")
    assert rollout.text == "it is 4"
    assert "4" in tiny.decode(
        [t for t, flag in zip(rollout.tokens, rollout.trained, strict=True) if not flag]
    )


def test_the_responses_api_is_answered_and_its_conversations_are_continued(tiny):
    def agent(client: Client, example: Example) -> Any:
        tool = {"type": "function", "name": "add", "parameters": ADD["function"]["parameters"]}
        items: list[Any] = [user("Add.")]
        (call,) = client.ask("/responses", input=items, tools=[tool])["output"]
        items += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}]
        last = client.ask("/responses", input=items, tools=[tool])
        return last["output"][0]["content"][0]["text"]

    rollout = one(tiny, agent, '<tool_call>{"name":"add","arguments":{"x":3}}</tool_call>', "it is 4")
    assert (rollout.error, rollout.rewritten, rollout.branches) == (None, 0, ())
    assert (rollout.text, rollout.calls[0].result) == ("it is 4", "4")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"temperature": 0.5}, "temperature=0.5 differs from 1.3, which the trainer assumes for every token"),
        ({"temperature": 0}, "temperature=0.0 differs from 1.3"),
        ({"top_p": 0.9}, "top_p=0.9 differs from 1.0"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs is not supported during training"),
        ({"frequency_penalty": 1}, "a penalty or logit_bias is not supported during training"),
        ({"response_format": {"type": "json_object"}}, "is not supported"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1"),
        ({"messages": []}, "messages must be a list with at least one message"),
    ],
)
def test_what_the_trainer_could_not_reproduce_is_refused(tiny, settings, reason):
    rollout = one(tiny, lambda client, example: client.ask(**{"messages": [user("1")], **settings}))
    assert "400" in str(rollout.error)
    assert reason in str(rollout.error)
    assert rollout.length == 0


def test_the_settings_of_the_run_may_be_repeated_and_limits_lowered(tiny):
    def agent(client: Client, example: Example) -> str:
        answer = client.ask(messages=[user("1 + 1")], temperature=1.3, max_completion_tokens=2, logprobs=True)
        return json.dumps(answer)

    rollout = one(tiny, agent)
    answer = json.loads(rollout.text)
    assert (rollout.length, answer["choices"][0]["finish_reason"], answer["model"]) == (2, "length", "any")
    shown = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
    assert shown == pytest.approx(rollout.logprobs[rollout.prompt_length :])
    most = one(tiny, lambda client, example: client.ask(messages=[user("1")], max_tokens=10_000)["usage"])
    assert most.state["completion_tokens"] <= 6


def test_a_greedy_evaluation_accepts_the_temperature_that_the_agent_names(tiny):
    greedy = Sampling(max_tokens=6, temperature=0.0)
    agent = lambda client, example: client.chat([user("1 + 1")], temperature=1.3)["content"]  # noqa: E731
    ((first, second),) = [group.rollouts for group in roll(tiny, agent, sampling=greedy)]
    assert first.error is None
    assert first.tokens == second.tokens


def test_only_the_key_of_a_running_rollout_is_answered(tiny):
    addresses: list[tuple[str, str]] = []

    def agent(client: Client, example: Example) -> str:
        addresses.append((client.base_url, client.headers["Authorization"]))
        key = client.headers.pop("Authorization").removeprefix("Bearer ")
        with pytest.raises(RuntimeError, match="401 no running rollout has this API key"):
            client.chat([user("1")])
        client.headers["X-Rollout-Id"] = key
        with pytest.raises(RuntimeError, match="404 no such endpoint during training"):
            client.ask("/embeddings")
        return str(client.chat([user("1")])["content"])

    assert one(tiny, agent).error is None
    (base_url, _) = addresses[0]
    with pytest.raises(urllib.error.URLError):  # the port is closed after the batch
        Client(base_url, "").chat([user("1")])


def test_an_agent_that_calls_too_often_is_told_so(tiny):
    rollout = one(tiny, three_turns, max_calls=2)
    assert "the agent has made 2 model calls, the limit of agent.max_calls" in str(rollout.error)
    assert len(rollout.turns) == 2


def test_a_failure_of_the_engine_ends_the_batch(tiny):
    class Broken:
        def generate(self, requests: Any, sampling: Any) -> Any:
            raise ZeroDivisionError("the engine broke")

    with pytest.raises(ZeroDivisionError, match="the engine broke"):
        roll(tiny, three_turns, engine=Broken())
