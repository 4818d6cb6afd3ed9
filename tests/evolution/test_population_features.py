"""What a population shares with a run: turns, the curriculum, teachers, worked answers, own functions."""

from __future__ import annotations

import asyncio
import json
import os
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import groupwise as gw
from groupwise.algo.losses import Tokens
from groupwise.config.schema import TaskConfig
from groupwise.engine.engine import Engine
from groupwise.errors import ConfigError
from groupwise.tracking.rollout_files import read_rollouts
from tests.support.small_runs import KILL, SignalAt, deterministic_metrics, run_artifacts, run_command

ROWS = [{"n": n} for n in range(24)]


def luck(rollout: gw.Rollout, example: gw.Example) -> float:
    return float(zlib.crc32(rollout.text.encode()) % 2)


def add(number: int) -> int:
    """Add one to a number."""
    return number + 1


class Game:
    """Ends after the second turn."""

    def reset(self, example: gw.Example) -> str:
        self.turns = 0
        return f"Say {example['n']}"

    def reply(self, text: str) -> gw.Reply:
        self.turns += 1
        return gw.Reply("Again.", reward=float(zlib.crc32(text.encode()) % 2), done=self.turns == 2)


def question(example: gw.Example) -> str:
    return f"{example['n']} + 1"


PLAIN = gw.Task(
    name="plain",
    examples=ROWS,
    prompt=question,
    rewards={"luck": luck},
    worked=lambda example, rng: str(example["n"] + 1),
)
TOOLS = gw.Task(name="tools", examples=ROWS, prompt=question, rewards={"luck": luck}, tools=[add])
GAME = gw.Task(name="game", examples=ROWS, environment=Game, difficulty=lambda e: str(e["n"] % 2))


def search(task: gw.Task, folder: Path, **sections: Any) -> Path:
    """Run a search of 2 members; sections and the user's functions override the settings."""
    settings: dict[str, dict[str, Any]] = {
        "model": {"name": "tiny", "device": "cpu"},
        "lora": {"r": 4},
        "rollout": {"prompts": 2, "group_size": 2, "max_tokens": 8, "temperature": 1.5, "refill": 0},
        "run": {"max_steps": 2, "output_dir": str(folder), "name": "run"},
        "evolve": {"population": 2, "every": 2, "vary": {"optim.learning_rate": [1e-4, 1e-2]}},
        "evaluate": {"samples": 1, "during": 2, "every": 0},
        "tools": {"max_turns": 2, "max_tokens": 64},
        "track": {"trackers": (), "report": False},
    }
    functions = {name: value for name, value in sections.items() if not isinstance(value, dict)}
    for name, value in sections.items():
        if isinstance(value, dict):
            settings[name] = {**settings.get(name, {}), **value}
    return Path(gw.evolve(task, **settings, **functions))


def rows(run: Path, step: int) -> list[dict[str, Any]]:
    return list(read_rollouts(run / "rollouts" / f"step-{step:06d}.parquet"))


@pytest.mark.parametrize("task", [TOOLS, GAME], ids=lambda task: task.name)
def test_members_take_turns_in_one_call_of_the_engine(task, tmp_path, monkeypatch):
    adapters: list[set[int]] = []
    converse = Engine.converse

    def counted(self: Engine, requests: Any, *rest: Any, **limits: Any) -> None:
        adapters.append({request.adapter for request in requests})
        converse(self, requests, *rest, **limits)

    monkeypatch.setattr(Engine, "converse", counted)
    run = search(task, tmp_path)
    # Steps 1 and 2 and the measurement have both members; the winner is evaluated alone before and after.
    assert adapters.count({0, 1}) == 3
    for row in rows(run, 1):
        assert row["error"] is None
        assert row["example"]["population_member"] in (0, 1)
        assert len(row["turns"]) == (2 if task is GAME and row["finish"] == "end" else len(row["turns"])) > 0
    assert json.loads((run / "evolution.json").read_text())["judged"]["eval/failed"] == 0.0


def test_equal_members_have_equal_conversations(tmp_path):
    run = search(GAME, tmp_path, evolve={"spread": False}, run={"max_steps": 1})
    by_member: dict[int, list[Any]] = {0: [], 1: []}
    for row in rows(run, 1):
        by_member[row["example"].pop("population_member")].append((row["example"], row["tokens"]))
    assert by_member[0] == by_member[1]


def test_a_killed_search_with_turns_and_a_curriculum_ends_with_the_same_bits(tmp_path):
    source = Path(__file__).read_text()
    start = source.index("ROWS = ")
    end = source.index("def search(")
    header = "from __future__ import annotations\nimport zlib\nimport groupwise as gw\n"
    (tmp_path / "own.py").write_text(f"{header}{source[start:end]}\ntask = GAME\n")
    words = (
        *("evolve", str(tmp_path / "own.py"), f"run.output_dir={tmp_path}", "model.name=tiny", "lora.r=4"),
        *("model.device=cpu", "rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=8"),
        *("rollout.temperature=1.5", "rollout.curriculum=2", "run.max_steps=3", "run.save_every=1"),
        *("evolve.population=2", "evolve.every=2", "evaluate.samples=1", "evaluate.during=2"),
        *("task.held_out=3", "tools.max_turns=2", "tools.max_tokens=64", "track.report=false"),
        "track.trackers=[]",
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run_command(*words, "run.name=whole").code == 0
    at = SignalAt(".step-000002.tmp-", KILL, nth=3)
    assert run_command(*words, "run.name=killed", signals=[at]).code == -KILL
    assert run_command("evolve", "--resume", str(killed)).code == 0
    assert run_artifacts(killed) == run_artifacts(whole)
    assert deterministic_metrics(whole)[0]["curriculum/passed_over"] > 0


def test_the_curriculum_counts_the_answers_of_all_members(tmp_path):
    run = search(GAME, tmp_path, rollout={"curriculum": 2}, run={"max_steps": 1})
    state = json.loads((run / "checkpoints" / "step-000001" / "state.json").read_text())
    scored = [row for row in rows(run, 1) if row["error"] is None]
    kinds = {str(row["example"]["n"] % 2) for row in scored}
    assert set(state["rates"]) == kinds
    # Two members with two groups of two answers each; counts fade by a tenth at each group of a kind.
    assert 0 < sum(given for given, _ in state["rates"].values()) <= len(scored) == 8


EVERYTHING = {"teacher": "tiny", "sft_weight": 0.5, "target_entropy": 9.0, "entropy_step": 0.1}


def test_members_learn_from_a_teacher_and_worked_answers_and_adapt_their_entropy(tmp_path):
    run = search(PLAIN, tmp_path, algo={**EVERYTHING, "advantage": "batch_std"}, rollout={"group_size": 4})
    for step in deterministic_metrics(run):
        assert {"policy/teacher_kl", "policy/cross_entropy", "policy/entropy_bonus"} <= set(step)
    saved = run / "checkpoints" / "step-000002" / "member-0" / "training" / "optimizer.json"
    # Raised by 0.1 in each of two steps: the entropy is below 9 nats.
    assert json.loads(saved.read_text())["entropy_coefficient"] == pytest.approx(0.2)


def test_a_member_teaches_itself_in_tasks_of_one_turn(tmp_path):
    run = search(PLAIN, tmp_path, algo={"teacher": "self"}, rollout={"group_size": 4}, run={"max_steps": 1})
    assert "policy/teacher_kl" in deterministic_metrics(run)[0]
    with pytest.raises(ConfigError, match="requires a task of one turn"):
        search(TOOLS, tmp_path, algo={"teacher": "self"}, run={"name": "refused"})
    assert not (tmp_path / "refused").exists()


def test_members_use_the_loss_the_advantage_and_the_sampling_rule_of_the_user(tmp_path):
    seen: dict[str, int] = {"loss": 0, "advantage": 0, "rule": 0}

    def loss(tokens: Tokens, settings: Any) -> Any:
        seen["loss"] += 1
        return -tokens.logprobs_T * tokens.advantages_T, {}

    def advantage(rollouts: list[gw.Rollout]) -> list[float]:
        seen["advantage"] += 1
        return [rollout.reward - 0.5 for rollout in rollouts]

    def rule(contexts: Any, logits: Any) -> Any:
        seen["rule"] += 1
        return logits

    search(PLAIN, tmp_path, run={"max_steps": 1}, loss=loss, advantage=advantage, logits_processor=rule)
    assert all(seen.values()), seen


def test_rewards_of_all_members_run_in_several_workers_and_async_ones_at_the_same_time(tmp_path):
    running: list[int] = []

    def note(kind: str, *words: object) -> None:
        with (tmp_path / kind).open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def slow(rollout: gw.Rollout, example: gw.Example) -> float:
        time.sleep(0.02)
        note("slow", os.getpid())
        return luck(rollout, example)

    async def judge(rollout: gw.Rollout, example: gw.Example) -> float:
        running.append(1)
        note("judge", example["n"], len(running))
        await asyncio.sleep(0.02)
        running.pop()
        return 0.0

    task = replace(PLAIN, rewards={"slow": slow, "judge": judge})
    limits = {"task.reward_workers": 2, "task.reward_concurrency": 3, "task.held_out": 4}
    search(task, tmp_path, evaluate={"samples": 1, "during": 4, "every": 0}, **limits)
    assert len(set((tmp_path / "slow").read_text().split())) == 2
    # Selection alone asks what is held out: four examples, one answer each.
    held_out = {example["n"] for example in PLAIN.split(TaskConfig(held_out=4), 0).held_out}
    calls = [tuple(map(int, line.split())) for line in (tmp_path / "judge").read_text().splitlines()]
    assert {n for n, _ in calls} > held_out
    assert max(at_once for n, at_once in calls if n in held_out) == 3
