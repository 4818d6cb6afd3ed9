"""Tasksets of verifiers: one turn, tools with a state, and an environment that talks."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import BaseModel, Field

import groupwise as gw
from groupwise.config.schema import ToolsConfig
from groupwise.errors import ConfigError, RolloutError
from groupwise.records import Example, Group, Sampling
from groupwise.rewards.runner import score_group
from groupwise.rollout.collect import collect
from groupwise.rollout.environment import EnvironmentExecutor
from groupwise.rollout.tools import tool_of
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


class Guessing:
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
        interaction.trace.record_reward("short", 0.25 * (interaction.trace.num_turns == 1), 1.0)


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
    call = '<tool_call>{"name": "till_put", "arguments": {"numbers": [3, 1]}}</tool_call>'
    first, second = played(task, call, "2")
    assert first.calls[0].result == "2 in the basket"
    assert (first.reward, second.reward) == (4.0, 4.0)  # 2 × right, and half of 3 + 1 in its own basket
    bad = '<tool_call>{"name": "till_put", "arguments": {"numbers": ["x"]}}</tool_call>'
    assert "'x' is not of type 'integer'" in str(played(task, bad, "2")[0].calls[0].error)


def test_scoring_a_rollout_twice_gives_the_same_reward():
    class Counting(Adding):
        @vf.reward
        async def turns(self, trace) -> float:
            return float(len(trace.nodes))

    class Counted(Sums):
        def load(self):
            return (Counting(task.data) for task in Sums.load(self))

    task = gw.verifiers_task(Counted(vf.TasksetConfig()))
    (first, _) = played(task, "2")
    group = Group(example=Example(dict(task.examples[1])), rollouts=(first, first))
    again = score_group(group, rewards=task.rewards, weights={}, seconds=5.0)
    assert [one.reward for one in (first, *again.rollouts)] == [5.0] * 3  # 2 + system, user, assistant


def test_scoring_tool_calls_twice_reads_the_same_messages():
    class Reading(Buying):
        @vf.reward
        async def heard(self, trace) -> float:
            return 100.0 * len(trace.tool_messages) + 10.0 * len(trace.nodes)

    class Readings(Sums):
        def load(self):
            return (Reading(task.data) for task in Sums.load(self))

    task = gw.verifiers_task(Readings(vf.TasksetConfig()))
    call = '<tool_call>{"name": "till_put", "arguments": {"numbers": [3, 1]}}</tool_call>'
    first, _ = played(task, call, "2")
    group = Group(example=Example(dict(task.examples[1])), rollouts=(first,))
    (again,) = score_group(group, rewards=task.rewards, weights={}, seconds=5.0).rollouts
    assert again.reward == first.reward == 4 + 100 + 50  # system, user, call, result, answer


class Item(BaseModel):
    count: int


class Shelf(vf.Toolset[vf.ToolsetConfig, Basket]):
    TOOL_PREFIX = None

    @vf.tool(name="take")
    def take_items(self, item: Item) -> int:
        """Take items."""
        return item.count


class Shared(Purchases):
    @classmethod
    def toolsets(cls, config):
        return [Shelf(vf.ToolsetConfig())]


def test_a_tool_gets_the_models_that_it_declares_and_tools_of_the_taskset_are_offered_too():
    task = gw.verifiers_task(Shared(vf.TasksetConfig()))
    first, _ = played(
        task, '<tool_call>{"name": "take", "arguments": {"item": {"count": 7}}}</tool_call>', "2"
    )
    assert (first.calls[0].error, first.calls[0].result) == (None, "7")
    assert [tool_of(tool).name for tool in task.tools] == ["take", "till_put"]


class NeedsBox(Adding):
    NEEDS_CONTAINER = True


class NeedsRuntime(Adding):
    @vf.reward
    async def passed(self, trace, runtime) -> float:
        return 1.0


class SetUp(Adding):
    async def setup(self, trace, runtime) -> None:
        raise AssertionError("never called")


class Finalized(Adding):
    async def finalize(self, trace, runtime) -> None:
        raise AssertionError("never called")


class Stopping(Adding):
    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return True


class Prepared(Till):
    async def setup_task(self, task) -> None:
        raise AssertionError("never called")


class PreparedTools(Adding):
    @classmethod
    def toolsets(cls, config):
        return [Prepared(vf.ToolsetConfig())]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (NeedsBox, "tasks with NEEDS_CONTAINER"),
        (NeedsRuntime, r"rewards that need a runtime \(passed\)"),
        (SetUp, "SetUp.setup"),
        (Finalized, "Finalized.finalize"),
        (Stopping, "the hook enough"),
        (PreparedTools, "Prepared.setup_task"),
    ],
)
def test_what_only_verifiers_would_run_is_refused(kind, reason):
    class Some(Sums):
        def load(self):
            return (kind(task.data) for task in Sums.load(self))

    with pytest.raises(ConfigError, match=f"Some cannot be trained here: .* runs .*{reason}; remove that"):
        gw.verifiers_task(Some(vf.TasksetConfig()))


def test_an_empty_taskset_and_a_class_in_place_of_an_env_are_refused():
    class Nothing(Sums):
        def load(self):
            return []

    with pytest.raises(ConfigError, match=r"Nothing.load\(\) returned no tasks"):
        gw.verifiers_task(Nothing(vf.TasksetConfig()))
    with pytest.raises(ConfigError, match=r"pass Guessing\(…\) instead of the class"):
        gw.verifiers_task(Sums(vf.TasksetConfig()), env=Guessing)
    with pytest.raises(ConfigError, match="toolsets beside an env"):
        gw.verifiers_task(Purchases(vf.TasksetConfig()), env=Guessing())


PLUGIN = """
import verifiers.v1 as vf
from tests.tasks.external.test_verifiers_tasks import Sums

class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    tries: int = 2

class Retrying(vf.Env[Config]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(self.config.tries - 1):
                if segment.last_reply != str(task.data.total):
                    segment = await interaction.turn("again")

__all__ = ["Sums", "Retrying"]
"""


def test_an_env_made_by_verifiers_reads_its_own_settings(tmp_path, monkeypatch):
    (tmp_path / "retried_sums.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    from retried_sums import Config, Retrying

    env = Retrying(Config(taskset=vf.TasksetConfig(id="retried_sums"), tries=3))
    rollout = played(gw.verifiers_task(env.taskset, env=env), "5", "6", "2")[0]
    assert [turn.observation for turn in rollout.turns] == ["again", "again", ""]
    assert rollout.reward == 2.0


class Returning:
    async def run(self, task, agents):
        async with agents.solver.interaction(task) as solver:
            await solver.turn()
        return "a text"


class Silent:
    async def run(self, task, agents):
        return None


class Pair:
    async def run(self, task, agents):
        async with agents.solver.interaction(task), agents.critic.interaction(task):
            raise AssertionError("the policy plays two agents")


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (Returning, "reply: TypeError: run must return None; got 'a text'"),
        (Silent, "reset: the episode ended before the first turn of the policy"),
        (Pair, "run may open one interaction: the policy plays one agent"),
    ],
)
def test_a_run_that_the_policy_cannot_play_fails_with_a_sentence(env, reason):
    make = gw.verifiers_task(Sums(vf.TasksetConfig()), env=env()).environment
    executor = EnvironmentExecutor(make, seconds=5.0)
    with pytest.raises(RolloutError, match=re.escape(reason)):
        executor.reply(executor.start(Example({"task": 1})), "2")


def test_an_env_that_talks_is_the_environment_of_a_rollout():
    with isolated(gw.verifiers_task(Sums(vf.TasksetConfig()), env=Guessing())) as task:
        first = played(task, "2")[0]
        assert (first.error, first.reward) == (None, 2.25)
        assert first.turns[0].observation == ""
        later = played(task, "5", "4", "2")[0]
        assert [turn.observation for turn in later.turns] == ["not 5", "not 4", ""]
        assert later.reward == 2.0
        assert "RuntimeError: the engine failed" in str(played(task, "?")[0].error)
