from __future__ import annotations

import asyncio
import signal
import threading
import time
from dataclasses import replace

import pytest

from groupwise.errors import ConfigError
from groupwise.isolation.time_limit import TimeLimitReached, TimeLimits, time_limit
from groupwise.records import Call, Example, Group, Rollout, Turn
from groupwise.rewards import length, score_group


def rollout(text="hi", *, prompt="q", error=None, member=0):
    return Rollout(
        prompt=prompt,
        text=text,
        tokens=(5, 6, 7, 2),
        trained=(False, False, True, True),
        logprobs=(0.0, 0.0, -1.0, -0.5),
        entropies=(0.0, 0.0, 1.0, 1.0),
        prompt_length=2,
        finish="end",
        member=member,
        error=error,
    )


def group(*texts, prompt="q", **columns):
    rollouts = tuple(rollout(text, prompt=prompt, member=i) for i, text in enumerate(texts))
    return Group(example=Example(columns or {"answer": "b"}), rollouts=rollouts)


def score(scored, rewards, *, weights=None, seconds=5.0):
    return score_group(scored, rewards=rewards, weights=weights or {}, seconds=seconds).rollouts


def correct(rollout, example):
    return rollout.text == example["answer"]


def test_the_reward_is_the_weighted_sum_and_a_missing_weight_is_one():
    rewards = {"correct": correct, "letters": lambda r, e: len(r.text), "metric": lambda r, e: 100}
    a, b = score(group("aaaa", "b"), rewards, weights={"letters": 0.5, "metric": 0})
    assert a.rewards == {"correct": 0.0, "letters": 4.0, "metric": 100.0}
    assert a.reward == 2.0  # 0 + 0.5 · 4 + 0 · 100
    assert b.reward == 1.5  # 1 + 0.5 · 1 + 0 · 100


@pytest.mark.parametrize(
    "verdict",
    [
        {},
        {"error": "no"},
        {"rewards": {"a": 1.0}, "reward": 0.5},
        {"advantage": -1.0},
        {"reward": 2.0, "error": "b"},
    ],
)
def test_judging_a_rollout_is_replacing_its_verdict(verdict):
    before = replace(
        rollout(error="yes", member=3), rewards={"b": 2.0}, advantage=4.0, turns=("one",), state=["kept"]
    )
    after = before.scored(**verdict)
    assert after == replace(before, **verdict)
    assert after.state is before.state
    assert (before.error, before.rewards, before.advantage) == ("yes", {"b": 2.0}, 4.0)


def test_a_reward_that_does_not_apply_is_absent_and_adds_nothing():
    a, b = score(group("a", "b"), {"correct": correct, "maybe": lambda r, e: 1.0 if r.text == "a" else None})
    assert (a.rewards, a.reward) == ({"correct": 0.0, "maybe": 1.0}, 1.0)
    assert (b.rewards, b.reward) == ({"correct": 1.0}, 1.0)


def test_a_rollout_to_which_no_reward_applies_has_failed():
    (a,) = score(group("a"), {"maybe": lambda r, e: None})
    assert a.error == "no reward applies: every reward function returned None"


def test_a_raising_reward_fails_its_rollout_and_no_other():
    def picky(rollout, example):
        if rollout.text == "a":
            raise ValueError("no a")
        return 1.0

    a, b = score(group("a", "b"), {"correct": correct, "picky": picky})
    line = picky.__code__.co_firstlineno + 2
    assert a.error == f"reward picky: ValueError: no a (test_score_group.py, line {line})"
    assert a.rewards == {}
    assert (b.error, b.reward) == (None, 2.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "returned nan"),
        (float("inf"), "returned inf"),
        ("1", "returned str, not a number"),
        ([1.0], "returned list, not a number"),
        (1j, "returned complex, not a number"),
        (10**400, "returned a int that cannot be converted to a float"),
    ],
)
def test_a_value_that_is_no_finite_number_is_an_error_and_not_a_zero(value, message):
    (a,) = score(group("a"), {"odd": lambda r, e: value})
    assert a.error is not None
    assert a.error.startswith(f"reward odd: {message}")


def test_a_rollout_that_failed_before_is_left_alone_and_not_shown_to_rewards():
    failed = rollout("boom", error="tool crashed")
    seen = []

    def spy(completions, **kwargs):
        seen.extend(completions)
        return [1.0] * len(completions)

    mixed = Group(example=Example({}), rollouts=(failed, rollout("fine")))
    a, b = score(mixed, {"spy": spy})
    assert a is failed
    assert b.reward == 1.0
    assert seen == ["fine"]


def test_a_group_that_failed_whole_calls_no_reward():
    def never(completions):
        raise AssertionError

    failed = Group(example=Example({}), rollouts=(rollout(error="x"),))
    assert score(failed, {"never": never}) == failed.rollouts


def test_a_trl_reward_gets_plain_strings_ids_and_repeated_columns():
    calls = []

    def trl(prompts, completions, answer, trainer_state, log_metric, log_extra, **kwargs):
        calls.append((prompts, completions, answer, kwargs))
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    a, b = score(group("a", "b", answer="b", level=3, prompt_id=1), {"trl": trl})
    assert (a.reward, b.reward) == (0.0, 1.0)
    kwargs = {"level": [3, 3], "prompt_id": [1, 1], "completion_ids": [[7, 2], [7, 2]]}
    assert calls == [(["q", "q"], ["a", "b"], ["b", "b"], kwargs)]


def test_a_trl_reward_may_name_only_what_it_uses():
    assert score(group("abc"), {"f": lambda completions: [len(c) for c in completions]})[0].reward == 3.0
    assert (
        score(group("abc"), {"f": lambda completion_ids: [len(i) for i in completion_ids]})[0].reward == 2.0
    )
    assert score(group("abc"), {"f": lambda **k: [len(c) for c in k["completions"]]})[0].reward == 3.0


def test_a_trl_reward_of_a_chat_gets_messages_with_the_prefill_in_the_completion():
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>"}]
    calls = []

    def trl(prompts, completions, **kwargs):
        calls.append((prompts, completions))
        prompts[0].clear()  # what a reward does to its arguments stays there
        return [0.0]

    (a,) = score(group("so", prompt=chat), {"trl": trl})
    assert calls[0][1] == [[{"role": "assistant", "content": "<think>so"}]]
    assert a.prompt == chat
    seen = []
    score(
        group("so", prompt=chat[:1]), {"trl": lambda prompts, completions: seen.append(completions) or [0.0]}
    )
    assert seen == [[[{"role": "assistant", "content": "so"}]]]


def test_a_trl_reward_of_a_task_with_tools_gets_the_whole_conversation():
    chat = [{"role": "user", "content": "3 · 4?"}]
    call = Call(name="multiply", arguments={"a": 3, "b": 4}, result="12")
    turns = (Turn(text="I multiply.", calls=(call,)), Turn(text="It is 12."))
    made = replace(rollout("It is 12.", prompt=chat), turns=turns)
    seen = []
    rewards = {"trl": lambda prompts, completions: seen.append(completions) or [0.0]}
    score(Group(example=Example({}), rollouts=(made,)), rewards)
    function = {"name": "multiply", "arguments": {"a": 3, "b": 4}}
    assert seen == [
        [
            [
                {
                    "role": "assistant",
                    "content": "I multiply.",
                    "tool_calls": [{"type": "function", "function": function}],
                },
                {"role": "tool", "name": "multiply", "content": "12"},
                {"role": "assistant", "content": "It is 12."},
            ]
        ]
    ]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "reward trl: returned 1 values for 2 completions"),
        (None, "reward trl: returned NoneType, not a list of numbers"),
        ([1.0, float("nan")], "reward trl: returned nan; a reward must be finite"),
    ],
)
def test_a_bad_trl_result_fails_the_whole_group(returned, message):
    assert [r.error for r in score(group("a", "b"), {"trl": lambda completions: returned})] == [
        message,
        message,
    ]


def test_a_trl_reward_may_say_none_for_some():
    a, b = score(group("a", "b"), {"correct": correct, "trl": lambda completions: [None, 2]})
    assert (a.reward, b.reward) == (0.0, 3.0)
    assert "trl" not in a.rewards


def test_rewards_may_be_async_in_both_styles():
    async def each(rollout, example):
        await asyncio.sleep(0)
        return 1.0

    async def together(completions, **kwargs):
        await asyncio.sleep(0)
        return [2.0] * len(completions)

    assert [r.reward for r in score(group("a", "b"), {"each": each, "together": together})] == [3.0, 3.0]


def test_a_hanging_reward_fails_with_a_timeout_even_if_it_swallows_exceptions():
    def hang(rollout, example):
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                continue

    async def sleep(rollout, example):
        await asyncio.sleep(60)

    for reward in (hang, sleep):
        a, b = score(group("a", "b"), {"slow": reward}, seconds=0.05)
        assert a.error == b.error == "reward slow: took longer than 0.05 s"


def test_ctrl_c_in_a_reward_is_not_a_failed_rollout():
    def interrupted(rollout, example):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(group("a"), {"f": interrupted})


def test_the_time_limit_restores_the_alarm_that_was_there_before():
    fired = []
    previous = signal.signal(signal.SIGALRM, lambda *_: fired.append(True))
    outer = signal.setitimer(signal.ITIMER_REAL, 30)
    try:
        with time_limit(0.02), pytest.raises(TimeLimitReached):
            time.sleep(5)
        remaining, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 20 < remaining < 30
        signal.raise_signal(signal.SIGALRM)
        assert fired == [True]
    finally:
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *outer)


def test_time_limits_nest_and_the_earlier_deadline_wins():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeLimitReached), time_limit(0.05), time_limit(60):
        time.sleep(5)
    with time_limit(60):
        with pytest.raises(TimeLimitReached), time_limit(0.02):
            time.sleep(5)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 50
    assert signal.getsignal(signal.SIGALRM) is before


def test_every_block_under_one_limit_has_its_own_time():
    with TimeLimits(0.5) as limit:
        for _ in range(3):  # together longer than the limit, alone shorter
            with limit:
                time.sleep(0.2)
        time.sleep(0.6)  # between blocks nothing is limited
        began = time.monotonic()
        with pytest.raises(TimeLimitReached), limit:
            time.sleep(60)
        assert 0.49 < time.monotonic() - began < 30
        with limit:  # and after one that was cut short the next has its time
            time.sleep(0.1)


def test_outside_the_main_thread_rewards_run_without_a_limit():
    results = []
    thread = threading.Thread(target=lambda: results.extend(score(group("b"), {"c": correct}, seconds=0.001)))
    thread.start()
    thread.join()
    assert results[0].reward == 1.0


def test_length_pays_for_at_most_that_many_characters():
    short = length(at_most=3)
    assert [short(rollout(text), Example({})) for text in ("", "abc", "abcd")] == [1.0, 1.0, 0.0]
    with pytest.raises(ConfigError, match="at least 1"):
        length(at_most=0)


def test_a_block_that_sets_an_alarm_of_its_own_takes_nobody_elses_limit_away():
    with TimeLimits(0.1) as limit:
        with limit:  # as math-verify does
            before = signal.signal(signal.SIGALRM, lambda *_: None)
            signal.alarm(1)
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        with pytest.raises(TimeLimitReached), limit:
            time.sleep(5)


def test_a_limit_within_a_block_has_what_the_block_has_left_and_not_an_earlier_one():
    with TimeLimits(0.3) as limit:
        with limit:
            time.sleep(0.2)
        with limit, time_limit(0.28):
            time.sleep(0.2)  # the first block's alarm goes off meanwhile
        with pytest.raises(TimeLimitReached), limit, time_limit(60):
            time.sleep(5)
