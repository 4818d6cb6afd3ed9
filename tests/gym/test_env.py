"""A task as an environment: what it asks is what it scores, and evaluating changes nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import groupwise as gw
from groupwise.errors import ConfigError
from tests.support.echo_task import ECHO_TASK


def right(prompts: Sequence[Any]) -> list[str]:
    return [prompt.removeprefix("Say ") for prompt in prompts]


def test_answers_are_scored_against_the_prompts_that_were_asked():
    env = gw.PromptEnv(ECHO_TASK, batch_size=3)
    prompts, _ = env.reset(seed=1)
    for _ in range(12):  # more than two passes over the data
        said = right(prompts)
        prompts, rewards, terminated, _, info = env.step([[text, "no such number"] for text in said])
        bonus = [0.5 * (len(text) < 2) for text in said]
        assert rewards.tolist() == [[1 + extra, 0.0] for extra in bonus]
        assert [group[0] for group in info["right"]] == [True] * 3
        assert not terminated


def test_async_rewards_of_all_answers_of_a_step_run_at_the_same_time():
    running: list[int] = []
    most: list[int] = []

    async def judge(rollout: gw.Rollout, example: gw.Example) -> float:
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.pop()
        return float(len(rollout.text))

    task = gw.Task(name="t", examples=[{"n": n} for n in range(9)], prompt=str, rewards={"length": judge})
    env = gw.PromptEnv(task, batch_size=3)
    env.reset(seed=1)
    _, rewards, *_ = env.step([["a", "bb"], ["ccc", "dddd"], ["", "f"]])
    assert rewards.tolist() == [[1, 2], [3, 4], [0, 1]]
    assert max(most) == 6


def test_the_same_seed_asks_the_same_and_another_asks_in_another_order():
    env = gw.PromptEnv(ECHO_TASK, batch_size=4)
    asked = [env.reset(seed=seed)[0] for seed in (0, 1, 0)]
    assert asked[0] == asked[2] != asked[1]
    assert env.reset()[0] != asked[2]  # without a seed it goes on


@pytest.mark.parametrize("size", ["batch_size", "group_size"])
def test_an_environment_without_prompts_or_answers_is_refused(size):
    with pytest.raises(ConfigError, match=f"{size} must be at least 1; got 0"):
        gw.PromptEnv(ECHO_TASK, **{size: 0})


def test_evaluation_leaks_nothing_into_training():
    env, other = (gw.PromptEnv(ECHO_TASK, batch_size=3) for _ in range(2))
    prompts, _ = env.reset(seed=0)
    assert other.reset(seed=0)[0] == prompts
    with env.eval_mode():
        seen, _ = env.reset()
        for _ in range(9):  # several passes over the four held-out rows
            seen, rewards, _, _, _ = env.step([[text] for text in right(seen)])
            assert (rewards >= 1).all()
    assert env.passes == 0
    for _ in range(8):
        answers = [[text] for text in right(prompts)]
        prompts, rewards, *rest = env.step(answers)
        expected, others, *other_rest = other.step(answers)
        assert (prompts, rewards.tolist(), rest) == (expected, others.tolist(), other_rest)
        assert (rewards >= 1).all()


def test_training_and_held_out_prompts_never_meet():
    env = gw.PromptEnv(ECHO_TASK, batch_size=len(ECHO_TASK.examples))
    trained = set(env.reset(seed=0)[0])
    with env.eval_mode():
        held_out = set(env.reset()[0])
        assert len(held_out) == len(env) == 4
    assert len(env) == 16
    assert not trained & held_out


def test_a_pass_over_the_data_ends_in_truncation_and_is_counted():
    env = gw.PromptEnv(ECHO_TASK, batch_size=8)
    env.reset(seed=0)
    ends = [env.step([["x"]] * 8)[3] for _ in range(4)]
    assert ends == [True, False, True, False]  # sixteen rows: the second batch completes the first pass
    assert env.passes == 2


def test_an_answer_that_cannot_be_scored_has_no_number():
    env = gw.PromptEnv(ECHO_TASK, batch_size=2)
    env.reset(seed=0)
    rewards = env.step([["broken", "a"], ["b", "c"]])[1]
    assert math.isnan(rewards[0, 0])
    assert np.isfinite(rewards[0, 1])


def test_prompt_and_collate_can_be_ones_own():
    env = gw.PromptEnv(
        ECHO_TASK,
        batch_size=2,
        prompt=lambda example: [{"role": "user", "content": f"{example['n']}!"}],
        collate=lambda examples: np.array([example["n"] for example in examples]),
    )
    prompts, info = env.reset(seed=0)
    assert [prompt[0]["content"] for prompt in prompts] == [f"{n}!" for n in info["batch"]]


def test_groups_must_match_the_prompts():
    env = gw.PromptEnv(ECHO_TASK, batch_size=2)
    env.reset(seed=0)
    for wrong in ([["a"]], [["a"], ["a", "b"]]):
        with pytest.raises(ConfigError, match="one group of answers for each of the 2 prompts"):
            env.step(wrong)


def test_a_built_in_task_without_end_has_no_length():
    env = gw.PromptEnv("countdown", batch_size=2, held_out=8)
    prompts, _ = env.reset(seed=0)
    assert len(prompts) == 2
    with pytest.raises(TypeError, match="without end"):
        len(env)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gymnasiums_checker_finds_nothing_wrong():
    """What does not apply: a reward is a matrix here, the checker knows one number; so it sees the mean.

    It also wants no wrapper around the environment, which is why its warnings are not heeded.
    """
    gymnasium = pytest.importorskip("gymnasium")
    from gymnasium.utils.env_checker import check_env

    class Mean(gymnasium.RewardWrapper):
        def reward(self, reward: Any) -> float:
            return float(np.mean(reward))

    check_env(Mean(gw.PromptEnv(ECHO_TASK, batch_size=3, group_size=2)), skip_render_check=True)
    check_env(Mean(gw.PromptEnv("countdown", batch_size=2)), skip_render_check=True)
