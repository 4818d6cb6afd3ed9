"""Rewards of a batch at the same time: async ones with a stated concurrency, slow ones in several workers."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

import pytest

from groupwise.errors import RolloutError
from groupwise.isolation.time_limit import TimeLimits
from groupwise.isolation.worker import in_process
from groupwise.records import Example, Group, Rollout
from groupwise.rewards.runner import RewardContext, score_within
from groupwise.rewards.score_ahead import score_ahead
from groupwise.tasks import Task, isolated
from tests.support.scripted_rollouts import answered

running: list[int] = []
most: list[int] = []


async def judge(rollout: Rollout, example: Example) -> float | None:
    running.append(1)
    most.append(len(running))
    await asyncio.sleep(9 if rollout.text == "slow" else 0.01)
    running.pop()
    if rollout.text == "raise":
        raise ValueError("no grade")
    if rollout.text == "die":
        os._exit(1)
    return {"none": None, "nan": float("nan")}.get(rollout.text, float(len(rollout.text)))


def groups_of(*texts: str, size: int = 4) -> list[Group]:
    members = [answered(text) for text in texts]
    starts = range(0, len(members), size)
    return [Group(example=Example({"n": s}), rollouts=tuple(members[s : s + size])) for s in starts]


def scored(function: Any, *texts: str, workers: int = 1, concurrency: int = 8, seconds: float = 1.0) -> Any:
    task = Task(name="t", examples=[{"q": 1}], prompt=str, rewards={"r": function})
    groups = groups_of(*texts)
    with isolated(task, workers=workers) as moved:
        context = RewardContext()
        ahead = {"rewards": moved.rewards, "seconds": seconds, "concurrency": concurrency, "context": context}
        score_ahead(groups, **ahead)
        with TimeLimits(seconds) as limit:
            done = [
                score_within(limit, group, rewards=moved.rewards, weights={}, context=context)
                for group in groups
            ]
    rollouts = [rollout for group in done for rollout in group.rollouts]
    return [r.reward if r.error is None else r.error for r in rollouts], context


@pytest.mark.parametrize("here", [True, False])
def test_async_rewards_of_all_groups_run_at_the_same_time_and_fail_alone(here):
    most.clear()
    function = in_process(judge) if here else judge
    if not here:
        judge.in_process = False  # type: ignore[attr-defined]
    texts = ["a", "bb", "raise", "nan", "slow", "none", "ccc", "dddd"] * 2
    values, context = scored(function, *texts, seconds=0.5)
    assert values[:2] == [1.0, 2.0]
    assert values[6:8] == [3.0, 4.0]
    assert "ValueError: no grade" in values[2]
    assert "returned nan" in values[3]
    assert values[4] == "reward r: took longer than 0.5 s"
    assert "no reward applies" in values[5]
    assert values[8:10] == [1.0, 2.0]
    assert len(context.ready) == 16
    if here:
        assert max(most) == 8


def test_an_async_reward_that_ends_its_worker_fails_its_own_rollout_only():
    judge.in_process = False  # type: ignore[attr-defined]
    values, context = scored(judge, "a", "die", "bb", "ccc")
    assert (values[0], values[2:]) == (1.0, [2.0, 3.0])
    assert "terminated its worker process" in values[1]
    assert context.ready == {}


def busy(rollout: Rollout, example: Example) -> float:
    if rollout.text == "die":
        os._exit(1)
    time.sleep(0.05)
    return float(os.getpid())


def test_several_workers_share_a_batch():
    values, context = scored(busy, *["a"] * 16, workers=3)
    assert len(set(values)) == 3
    assert len(context.ready) == 16
    assert os.getpid() not in values
    assert threading.active_count() < 20
    values, _ = scored(busy, "a", "die", "a", "a", workers=2)
    assert [isinstance(value, float) for value in values] == [True, False, True, True]
    assert scored(busy, "a", "b", workers=1)[1].ready == {}


def test_a_reward_in_trl_style_gets_whole_groups(monkeypatch):
    def lengths(completions: list[str], **more: Any) -> list[float]:
        return [float(len(completions))] * len(completions)

    values, context = scored(lengths, *["a"] * 8, workers=2)
    assert values == [4.0] * 8
    assert not any(isinstance(one, RolloutError) for one in context.ready.values())
