"""Agents, environments, teachers and supervised tokens on the device: gradients by hand, and whole runs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise as gw
from groupwise.tracking.rollout_files import read_rollouts
from tests.support.cuda_checks import DEVICE
from tests.support.distillation_parity import (
    distillation_from_a_model,
    self_distillation,
    supervised_tokens,
)
from tests.support.small_runs import deterministic_metrics
from tests.support.talking_agent import CHATS
from tests.support.update_parity import assert_same_gradients

WITHIN = 1e-4


@pytest.mark.parametrize("lora", [False, True])
def test_distilling_from_a_model_has_the_gradient_of_the_reverse_kl(lora: bool):
    assert_same_gradients(*distillation_from_a_model(lora=lora, device=DEVICE), within=WITHIN)


def test_the_policy_teaches_itself_on_the_answers_that_have_a_hint():
    assert_same_gradients(*self_distillation(device=DEVICE), within=WITHIN)


@pytest.mark.parametrize("budget", [45, 100_000])
def test_replies_and_worked_answers_add_their_cross_entropy(budget: int):
    assert_same_gradients(*supervised_tokens(budget, device=DEVICE), within=WITHIN)


GAP = 0.05
"""Mean difference of the sampler's and the trainer's log-probabilities that bfloat16 may cause."""
SMALL: dict[str, Any] = {
    "max_steps": 2,
    "batch_size": 4,
    "group_size": 8,
    "max_tokens": 40,
    "no_trackio": True,
    "skip_evaluation": True,
    "model": {"device": str(DEVICE)},
    "track": {"report": False},
}


@pytest.mark.parametrize("lora", [0, 8])
def test_an_agent_that_owns_its_loop_is_trained(lora: int, tmp_path: Path):
    (tmp_path / "talk.py").write_text(CHATS)
    changes: dict[str, Any] = {"max_tokens": 8, "temperature": 1.5, "task.max_failed": 0.5, "lora_r": lora}
    task = str(tmp_path / "talk.py")
    gw.train(task, output_dir=tmp_path, run_name="run", **{**SMALL, **changes})
    rows = read_rollouts(tmp_path / "run" / "rollouts" / "step-000001.parquet")
    complete = [row for row in rows if row["error"] is None]
    # Two turns that continue, the summary and the rewritten conversation.
    assert {(len(row["turns"]), len(row["branches"])) for row in complete} == {(4, 2)}
    for metrics in deterministic_metrics(tmp_path / "run"):
        assert 0 < metrics["policy/gap"] < GAP
        assert metrics["agent/sequences"] > 2
        assert metrics["policy/updates"] >= 1


class Sum:
    """Two turns: the first is rewarded for its length, the second for its characters."""

    def reset(self, example: gw.Example) -> str:
        self.turn = 0
        return f"{example['n']} + 1 ="

    def reply(self, text: str) -> gw.Reply:
        self.turn += 1
        if self.turn == 1:
            return gw.Reply("And twice that?", reward=float(len(text) % 2))
        return gw.Reply("", reward=float(sum(map(ord, text)) % 2), done=True)


@pytest.mark.parametrize("lora", [0, 8])
def test_an_environment_is_trained_by_turns_and_its_replies_are_predicted(lora: int, tmp_path: Path):
    task = gw.Task(name="sums", examples=[{"n": n} for n in range(12)], environment=Sum)
    turns = {"stop": list("0123456789"), "refill": 0}
    changes = {"max_tokens": 12, "temperature": 1.5, "task.held_out": 2, "rollout": turns, "lora_r": lora}
    algo = {"advantage": "turn", "echo": 0.3}
    result = gw.train(task, algo=algo, output_dir=tmp_path, run_name="run", **{**SMALL, **changes})
    rollouts, metrics = result.rollouts(), result.metrics
    assert (rollouts["turns"].map(len) == 2).any()
    assert max(len(set(own)) for own in rollouts["token_advantages"].dropna()) == 2  # one value a turn
    assert metrics["policy/gap"].between(0, GAP).all()
    assert metrics["policy/cross_entropy"].between(0.01, 20).all()


def test_a_run_learns_from_a_teacher_and_from_worked_answers_at_once(tmp_path: Path):
    algo = {"teacher": "tiny", "distill": 0.1, "sft_weight": 0.2}
    result = gw.train("countdown", algo=algo, output_dir=tmp_path, run_name="run", **SMALL)
    metrics = result.metrics
    assert (metrics["policy/taught"] == 1.0).all()
    assert metrics["policy/cross_entropy"].between(0.001, 2).all()
    # The teacher is the policy before its first update, so only rounding separates them then.
    assert abs(metrics.loc[1, "policy/teacher_kl"]) < GAP
    itself = gw.train("countdown", algo={"teacher": "self"}, output_dir=tmp_path, run_name="self", **SMALL)
    assert itself.metrics["policy/taught"].dropna().between(0.01, 1.0).all()


@contextmanager
def served(model: str) -> Iterator[str]:
    """Serve a model on the device and give its address."""
    with subprocess.Popen(
        [sys.executable, "-m", "groupwise", "serve", model, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        found = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in process.stdout)
        try:
            yield next(address.group() for address in found if address)
        finally:
            process.send_signal(signal.SIGINT)


def test_a_served_model_is_the_teacher(tmp_path: Path):
    with served("tiny") as address:
        algo = {"teacher": address, "distill": 0.1}
        result = gw.train(
            "countdown", algo=algo, output_dir=tmp_path, run_name="run", temperature=1.0, **SMALL
        )
    assert (result.metrics["policy/taught"] == 1.0).all()
    assert abs(result.metrics.loc[1, "policy/teacher_kl"]) < GAP


def test_members_of_a_population_learn_from_a_teacher_and_worked_answers(tmp_path: Path):
    algo = {"teacher": "tiny", "sft_weight": 0.5, "target_entropy": 9.0, "entropy_step": 0.1}
    changes = {"max_steps": 2, "task.held_out": 4, "skip_evaluation": False, "lora_r": 4}
    searched = {"population": 2, "every": 1}
    gw.evolve(
        "countdown", algo=algo, evolve=searched, output_dir=tmp_path, run_name="run", **{**SMALL, **changes}
    )
    for step in deterministic_metrics(tmp_path / "run"):
        assert {"policy/teacher_kl", "policy/cross_entropy", "policy/entropy_bonus"} <= set(step)


def no_digit_seven(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[SEVENS] = float("-inf")
    return logits


SEVENS: list[int] = []


@pytest.mark.parametrize("lora", [0, 8])
def test_a_run_samples_and_trains_by_a_rule_of_the_user(lora: int, tmp_path: Path):
    place = {"output_dir": tmp_path, "lora_r": lora}
    probe = gw.train("countdown", run_name="probe", **{**SMALL, **place, "max_steps": 1})
    SEVENS[:] = [t for t in range(probe.policy.head_weight.shape[0]) if "7" in probe.policy.decode([t])]
    assert any("7" in text for text in probe.rollouts()["text"])
    result = gw.train("countdown", logits_processor=no_digit_seven, run_name="run", **SMALL, **place)
    assert not any("7" in text for text in result.rollouts()["text"])
    assert result.metrics["policy/gap"].dropna().between(0, GAP).all()
    assert "7" not in "".join(result.generate(["Numbers: 7, 77. Target: 7."], samples=8, temperature=1.0)[0])
