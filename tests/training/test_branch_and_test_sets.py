"""A run continues from a chosen checkpoint in a new folder; test sets, epochs and the history of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import groupwise as gw
from groupwise.config import config_from_keywords
from groupwise.config.schema import TaskConfig
from groupwise.errors import CheckpointError, ConfigError
from groupwise.tasks import load_task
from groupwise.tracking.run_folder import RunFolder
from groupwise.training import train
from groupwise.training.resume import with_epochs
from groupwise.training.run_end import next_commands
from tests.support.small_runs import run_artifacts, small_config, task_file

KEEP = ("run.save_every=1", "run.keep_last=9")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of four steps with a test set."""
    folder = tmp_path_factory.mktemp("runs")
    task_file(folder)
    (folder / "hard.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in (3, 4, 100)))
    return train(small_config(folder, *KEEP, f"task.test_sets={{hard: {folder / 'hard.jsonl'}}}"))


@pytest.fixture(scope="module")
def branched(run):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    made = gw.train(str(run.parent / "luck.py"), resume=run / "checkpoints" / "step-000002")
    return before, made


def test_a_chosen_checkpoint_continues_in_a_new_folder_and_nothing_later_is_lost(run, branched):
    before, made = branched
    assert made == run.parent / "run-from-2"
    assert {path: path.read_bytes() for path in before} == before
    assert json.loads((made / "parent.json").read_text()) == {
        "run": str(run),
        "checkpoint": "step-000002",
        "step": 2,
    }


def test_the_branch_ends_with_the_same_bits_as_the_run(run, branched):
    _, made = branched
    expected, found = run_artifacts(run), run_artifacts(made)
    for name in ("checkpoints/step-000004/model.safetensors", "metrics", "eval/before.json"):
        assert found[name] == expected[name]


def test_a_branch_keeps_its_settings(run):
    with pytest.raises(CheckpointError, match="a resumed run keeps its settings"):
        gw.train(str(run.parent / "luck.py"), resume=run / "checkpoints" / "step-000002", learning_rate=0.01)
    assert not (run.parent / "run-from-2-2").exists()


def test_a_test_set_is_measured_before_and_after(run):
    stats = json.loads((run / "training_stats.json").read_text())
    for when in ("before", "after"):
        stored = json.loads((run / "eval" / "hard" / f"{when}.json").read_text())
        assert len(stored["examples"]) == 3
        assert stats["test_sets"]["hard"][when]["eval/greedy"] == stored["eval/greedy"]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/hard/greedy"] == stats["test_sets"]["hard"]["after"]["eval/greedy"]


def test_the_statistics_hold_loss_and_rewards_as_lists(run):
    history = json.loads((run / "training_stats.json").read_text())["history"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert history["step"] == [1, 2, 3, 4]
    assert history["loss"] == [row["policy/loss"] for row in rows]
    assert history["reward"] == [row["reward/mean"] for row in rows]
    assert history["reward/luck"] == [row["reward/luck/mean"] for row in rows]


def test_epochs_are_counted_in_prompts(tmp_path):
    task_file(tmp_path)
    config = small_config(tmp_path, "run.num_epochs=2", "task.held_out=4")
    task = load_task(config.task)
    assert with_epochs(config, task).run.max_steps == 14  # 2 × 20 examples, 3 a step


def test_epochs_of_an_endless_task_are_refused():
    config = config_from_keywords(num_epochs=2)
    with pytest.raises(ConfigError, match="the examples of countdown are endless"):
        with_epochs(config, load_task(TaskConfig(name="countdown")))


def test_after_a_run_with_adapters_the_next_commands_name_the_adapter():
    for task in ("countdown", "defined in Python"):
        config = config_from_keywords(lora_r=4, max_steps=3, **{"task.name": task})
        lines = next_commands(config, RunFolder(Path("runs/x")), done=True)
        commands = [line.split()[1] for line, _ in lines]
        assert {"chat", "serve", "merge"} <= set(commands)
        assert any("runs/x/checkpoints/step-000003" in purpose for _, purpose in lines)
