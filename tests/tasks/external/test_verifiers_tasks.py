"""Tasksets of verifiers: one turn, tools with a state, and an environment that talks."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import Field

import groupwise as gw
from groupwise.config.schema import ToolsConfig
from groupwise.records import Example, Sampling
from groupwise.rewards.runner import score_group
from groupwise.rollout.collect import collect
from groupwise.tasks import isolated
from tests.support.scripted_rollouts import ScriptedEngine, ToolCodec

vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed")


class Sum(vf.TaskData):
    total: int


class Basket(vf.State):
    items: list[int] = Field(default_factory=list)


class Adding(vf.Task[Sum, Basket, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.nodes[-1].message.content.strip() == str(self.data.total))

    @vf.reward
    async def used(self, trace) -> float:
        return 0.5 * sum(trace.state.items)


class Till(vf.Toolset[vf.ToolsetConfig, Basket]):
    @vf.tool
    async def put(self, numbers: list[int]) -> str:
        """Put numbers into the basket."""
        self.state.items.extend(numbers)
        return f"{len(self.state.items)} in the basket"


class Buying(Adding):
    @classmethod
    def toolsets(cls, config):
        return [Till(vf.ToolsetConfig())]


class Sums(vf.Taskset[Adding, vf.TasksetConfig]):
    def load(self):
        for n in range(3):
            yield Adding(Sum(prompt=f"{n} + {n}?", system_prompt="Add.", total=2 * n))


class Purchases(Sums):
    def load(self):
        return (Buying(task.data) for task in Sums.load(self))


class Guessing(vf.Env):
    """Helps until the answer is right, or the third turn."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(2):
                if segment.last_reply == str(task.data.total):
                    break
                if segment.last_reply == "?":
                    raise RuntimeError("the engine failed")
                segment = await interaction.turn(f"not {segment.last_reply}")
        interaction.trace.record_reward("short", 0.25 * (len(interaction.trace.nodes) == 2), 1.0)


def played(task: Any, *lines: str) -> Any:
    (group,) = collect(
        [Example(dict(task.examples[1]))],
        ask=task.ask,
        codec=ToolCodec(),
        engine=ScriptedEngine(*lines),
        sampling=Sampling(max_tokens=200),
        group_size=2,
        seed_parts=(0,),
        tools=task.multi_turn(ToolsConfig(max_tokens=900)),
    )
    return score_group(group, rewards=task.rewards, weights=task.weights, seconds=5.0).rollouts


def test_a_taskset_of_one_turn_is_scored_by_its_own_rewards():
    task = gw.verifiers_task(Sums(vf.TasksetConfig()))
    assert task.ask(task.examples[2]) == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "2 + 2?"},
    ]
    with isolated(task) as moved:
        assert [one.reward for one in played(moved, "2")] == [2.0, 2.0]
        assert [one.reward for one in played(moved, "3")] == [0.0, 0.0]


def test_tools_of_a_toolset_share_the_state_of_their_rollout_with_the_rewards():
    task = gw.verifiers_task(Purchases(vf.TasksetConfig()))
    call = '<tool_call>{"name": "put", "arguments": {"numbers": [3, 1]}}</tool_call>'
    first, second = played(task, call, "2")
    assert first.calls[0].result == "2 in the basket"
    assert (first.reward, second.reward) == (4.0, 4.0)  # 2 × right, and half of 3 + 1 in its own basket
    bad = '<tool_call>{"name": "put", "arguments": {"numbers": ["x"]}}</tool_call>'
    assert "'x' is not of type 'integer'" in str(played(task, bad, "2")[0].calls[0].error)


def test_an_env_that_talks_is_the_environment_of_a_rollout():
    with isolated(gw.verifiers_task(Sums(vf.TasksetConfig()), env=Guessing)) as task:
        first = played(task, "2")[0]
        assert (first.error, first.reward) == (None, 2.25)
        assert first.turns[0].observation == ""
        later = played(task, "5", "4", "2")[0]
        assert [turn.observation for turn in later.turns] == ["not 5", "not 4", ""]
        assert later.reward == 2.0
        assert "RuntimeError: the engine failed" in str(played(task, "?")[0].error)
