"""From examples to groups: whose noise is whose, and what is trained."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from groupwise.config.schema import EngineConfig
from groupwise.engine.engine import Engine
from groupwise.errors import InvariantError
from groupwise.records import Completion, Example, Finish, Group, Request, Sampling
from groupwise.rollout.collect import collect
from tests.support.codecs import END, CharacterCodec


class Always:
    """Gives every member the same reply and remembers what it was asked."""

    def __init__(self, *reply: int, finish: Finish = "end") -> None:
        n = len(reply)
        logprobs, entropies = tuple(-0.5 * (i + 1) for i in range(n)), (0.25,) * n
        self.reply = Completion(tokens=reply, logprobs=logprobs, entropies=entropies, finish=finish)
        self.asked: list[Request] = []

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        self.asked += requests
        return [[self.reply] * len(request.seeds) for request in requests]


def examples(*names: str) -> list[Example]:
    return [Example({"name": name}) for name in names]


def collected(engine: Always, chosen: list[Example], *, step: int = 0, size: int = 2) -> list[Group]:
    return collect(
        chosen,
        ask=lambda example: f"{example['name']}?",
        codec=CharacterCodec(),
        engine=engine,
        sampling=Sampling(),
        group_size=size,
        seed_parts=(0, "train", step),
    )


def seeds(*names: str, step: int = 0, size: int = 2) -> list[tuple[int, ...]]:
    engine = Always(65, END)
    collected(engine, examples(*names), step=step, size=size)
    return [request.seeds for request in engine.asked]


def test_a_rollout_holds_prompt_and_reply_and_trains_the_reply_alone():
    (group,) = collected(Always(72, 105, END), examples("a"))
    rollout = group.rollouts[1]
    assert rollout.prompt == "a?"
    assert rollout.tokens == (97, 63, 72, 105, END)
    assert rollout.trained == (False, False, True, True, True)
    assert rollout.logprobs == (0.0, 0.0, -0.5, -1.0, -1.5)
    assert rollout.entropies == (0.0, 0.0, 0.25, 0.25, 0.25)
    assert (rollout.prompt_length, rollout.length, rollout.member) == (2, 3, 1)
    assert (rollout.text, rollout.finish) == ("Hi", "end")


def test_groups_come_in_the_order_of_the_examples():
    groups = collected(Always(65, END), examples("b", "a", "c"), size=3)
    assert [group.example["name"] for group in groups] == ["b", "a", "c"]
    assert [rollout.member for rollout in groups[0].rollouts] == [0, 1, 2]


def test_every_member_of_every_example_in_every_step_has_noise_of_its_own():
    drawn = [seed for step in range(3) for group in seeds("a", "b", step=step, size=4) for seed in group]
    assert len(set(drawn)) == 3 * 2 * 4


def test_noise_does_not_depend_on_what_is_generated_beside_it():
    (alone,) = seeds("b")
    assert seeds("a", "b", "c")[1] == alone
    assert seeds("b", "a")[0] == alone
    assert seeds("b", size=5)[0][:2] == alone


def test_an_example_drawn_twice_gets_two_different_groups():
    first, other, second = seeds("a", "b", "a")
    assert not set(first) & set(second)
    assert [first, other] == seeds("a", "b")


def test_a_completion_that_says_it_ended_but_has_no_end_token_stops_the_run():
    with pytest.raises(InvariantError, match="end token"):
        collected(Always(72, 105, finish="end"), examples("a"))
    assert collected(Always(72, 105, finish="length"), examples("a"))


def test_the_real_engine_and_tokenizer_fit(small_policy):
    messages = [{"role": "user", "content": "2 + 3"}, {"role": "assistant", "content": "<think>"}]
    groups = collect(
        examples("x", "y"),
        ask=lambda example: messages,
        codec=small_policy,
        engine=Engine(small_policy, EngineConfig()),
        sampling=Sampling(max_tokens=6),
        group_size=3,
        seed_parts=(0, 1),
    )
    for group in groups:
        assert len(group.rollouts) == 3
        for rollout in group.rollouts:
            assert rollout.tokens[: rollout.prompt_length] == small_policy.encode(messages)
            assert rollout.text == small_policy.decode(rollout.tokens[rollout.prompt_length :])
            assert all(logprob < 0 for logprob in rollout.logprobs[rollout.prompt_length :])
