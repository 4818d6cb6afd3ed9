"""Runs whose rollouts are those of a program: it is trained, resumed and evaluated like any other task."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from groupwise.tracking.rollout_files import read_rollouts
from tests.support.process_groups import in_processes
from tests.support.sharded_updates import trained
from tests.support.small_runs import (
    KILL,
    SMALL,
    SignalAt,
    deterministic_metrics,
    run_artifacts,
    run_command,
    small_config,
)
from tests.support.talking_agent import CHATS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "talk.py").write_text(CHATS)
    ended = run_command(*words(folder, "whole"))
    assert ended.code == 0, ended.err
    return folder / "whole"


def words(folder: Path, name: str) -> list[str]:
    place = [f"run.output_dir={folder}", f"run.name={name}"]
    return ["train", str(folder / "talk.py"), *place, *SMALL, "task.max_failed=0.5", "run.max_steps=3"]


def test_every_sampled_token_of_a_run_is_trained_with_the_sampler_s_log_probability(whole):
    rows = [row for path in sorted((whole / "rollouts").glob("*")) for row in read_rollouts(path)]
    complete = [row for row in rows if row["error"] is None]
    assert all(len(row["turns"]) == 4 for row in complete)
    # The first conversation, the summary and the rewritten conversation.
    assert {len(row["branches"]) for row in complete} == {2}
    assert {row["rewritten"] for row in complete} == {1}
    sequences = [[row, *row["branches"]] for row in complete]
    assert all(
        row["length"] == sum(sum(one["trained"]) for one in own)
        for row, own in zip(complete, sequences, strict=True)
    )
    failed = [row for row in rows if row["error"] is not None]
    assert {row["error"] for row in failed} == {"agent: ValueError: no luck with 5 (talk.py, line 17)"}
    for metrics in deterministic_metrics(whole):
        assert metrics["policy/gap"] < 1e-5
        assert metrics["agent/sequences"] > 2
    assert any(row["advantage"] for row in complete)


def test_a_run_that_is_killed_and_resumed_ends_with_the_same_bits(whole):
    killed = whole.parent / "killed"
    first = run_command(*words(whole.parent, "killed"), signals=[SignalAt("/metrics.jsonl", KILL, nth=3)])
    assert first.code == -KILL
    resumed = run_command("train", "--resume", str(killed))
    assert resumed.code == 0, resumed.err
    assert run_artifacts(killed) == run_artifacts(whole)


def test_two_processes_run_the_agents_of_their_shares(whole):
    place = ("run.name=two", "task.max_failed=0.5", "run.max_steps=1", "evaluate.skip=true")
    in_processes(2, trained, small_config(whole.parent, *place, "run.parallel=ddp", task="talk.py"))
    (two,), (one, *_) = (deterministic_metrics(path) for path in (whole.parent / "two", whole))
    assert one == pytest.approx(two, rel=1e-3, abs=1e-5)


def test_the_example_in_the_docs_is_the_file_and_it_runs(tmp_path):
    pytest.importorskip("openai")
    page = (ROOT / "docs" / "environments.md").read_text()
    agent, trainer = (ROOT / "examples" / name for name in ("guess_agent.py", "train_agent.py"))
    assert agent.read_text() in page
    assert trainer.read_text() in page
    assert len(agent.read_text().splitlines()) <= 60
    assert len(trainer.read_text().splitlines()) <= 25
    assert "groupwise" not in agent.read_text()
    settings = ["evaluate.skip=true", "rollout.prompts=4", "run.max_steps=2", "run.save_every=1"]
    small = [f"run.output_dir={tmp_path}", "run.name=run", *SMALL, *settings]
    ended = run_command("train", str(trainer), *small)
    assert ended.code == 0, ended.err
    rows = read_rollouts(tmp_path / "run" / "rollouts" / "step-000001.parquet")
    assert all(row["text"] == "lost" or row["text"].startswith("won after") for row in rows)
    assert [row["rewards"]["won"] for row in rows] == [float(row["text"] != "lost") for row in rows]
    assert all(metrics["policy/gap"] < 1e-5 for metrics in deterministic_metrics(tmp_path / "run"))
    saved = sorted((tmp_path / "run" / "checkpoints").glob("*/model.safetensors"))
    assert saved[0].read_bytes() != saved[1].read_bytes()


def test_a_program_that_is_a_command_line_is_trained(tmp_path):
    pytest.importorskip("openai")
    shutil.copy(ROOT / "examples" / "guess_agent.py", tmp_path)
    command = f"python {tmp_path / 'guess_agent.py'}"
    (tmp_path / "task.py").write_text(
        "import groupwise as gw\n"
        "rewards = {'short': lambda rollout, example: 1.0 / (1 + len(rollout.text))}\n"
        "games = [{'game': n, 'number': 3} for n in range(4)]\n"
        f"task = gw.Task(name='guess', examples=games, agent={command!r}, rewards=rewards)\n"
    )
    settings = ["evaluate.skip=true", "rollout.prompts=1", "rollout.group_size=2", "run.max_steps=1"]
    place = [f"run.output_dir={tmp_path}", "run.name=run"]
    ended = run_command("train", str(tmp_path / "task.py"), *place, *SMALL, *settings)
    assert ended.code == 0, ended.err
    rows = read_rollouts(tmp_path / "run" / "rollouts" / "step-000001.parquet")
    assert all(row["text"] == "lost" or row["text"].startswith("won after") for row in rows)
    assert json.loads((tmp_path / "run" / "training_stats.json").read_text())
