"""A user's own task, from a file, from Python, with rewards of any manners."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import groupwise as gw
from groupwise.config import read_config
from groupwise.tracking.rollout_files import read_rollouts
from tests.support.small_runs import SMALL, deterministic_metrics, run_command, task_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "capitals.py"
QUICK = ("run.max_steps=2", "evaluate.every=0")


def shell(folder: Path, *words: str) -> Any:
    place = (f"run.output_dir={folder}", "run.name=run")
    return run_command("train", *place, *SMALL, *QUICK, *words)


def here(folder: Path, task: gw.Task, **more: Any) -> Path:
    return gw.train(
        task,
        max_steps=2,
        output_dir=folder,
        run_name="run",
        no_trackio=True,
        max_tokens=6,
        batch_size=3,
        group_size=4,
        temperature=1.5,
        model={"device": "cpu"},
        **{"evaluate": {"every": 0, "samples": 2}, **more},
    )


def test_the_example_runs_from_the_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(EXAMPLE.parent)
    ended = shell(tmp_path, "capitals.py", "--model", "tiny")
    assert ended.code == 0, ended.err
    config = read_config(tmp_path / "run" / "config.yaml")
    assert (config.task.name, config.model.name, config.run.max_steps) == ("capitals.py", "tiny", 2)
    parts = {
        name for row in deterministic_metrics(tmp_path / "run") for name in row if name.startswith("reward/")
    }
    assert {"reward/correct/mean", "reward/short/mean"} <= parts


def test_the_example_runs_from_python(tmp_path, monkeypatch):
    monkeypatch.chdir(EXAMPLE.parent)
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(gw, "train", lambda task, **settings: calls.append({"task": task, **settings}))
    exec(compile(EXAMPLE.read_text(), EXAMPLE, "exec"), {"__name__": "__main__"})
    monkeypatch.undo()
    (call,) = calls
    assert (call["model"], call["max_steps"]) == ("Qwen/Qwen2.5-0.5B-Instruct", 100)
    run = here(tmp_path, call["task"])
    assert run == tmp_path / "run"
    assert read_config(run / "config.yaml").task.name == "capitals"
    assert len(deterministic_metrics(run)) == 2


def counting(n: int = 24) -> list[dict[str, Any]]:
    return [{"n": k, "gold": str(k)} for k in range(n)]


def trl_style(prompts: list[Any], completions: list[str], gold: list[str], **kwargs: Any) -> list[float]:
    """As TRL's documentation writes them: columns by name, the rest swallowed."""
    assert len(prompts) == len(completions) == len(gold)
    return [
        (len(completion) + len(answer)) % 3 / 2 for completion, answer in zip(completions, gold, strict=True)
    ]


def test_a_trl_reward_works_unchanged(tmp_path):
    task = gw.Task(
        name="trl", examples=counting(), prompt=lambda row: str(row["n"]), rewards={"trl_style": trl_style}
    )
    run = here(tmp_path, task)
    rows = read_rollouts(run / "rollouts" / "step-000001.parquet")
    for row in rows:
        assert row["reward"] == (len(row["text"]) + len(row["example"]["gold"])) % 3 / 2


MANNERS = """
import time
import groupwise as gw

def sometimes(rollout: gw.Rollout, example: gw.Example) -> float:
    if rollout.member == 1:
        raise ValueError("no gold")
    if rollout.member == 2 and example["n"] % 8 == 0:
        time.sleep(60)
    return float(rollout.member == 3)

task = gw.Task(name="manners", examples=[{"n": n} for n in range(24)],
               prompt=lambda row: str(row["n"]), rewards={"sometimes": sometimes})
"""


def test_raising_and_hanging_rewards_are_recorded_counted_and_left_out(tmp_path):
    path = task_file(tmp_path, MANNERS)
    ended = shell(tmp_path, str(path), "--skip-evaluation", "task.reward_seconds=0.1", "rollout.prompts=12",
                  "rollout.refill=0", "run.max_steps=1")  # fmt: skip
    assert ended.code == 0, ended.err
    rows = read_rollouts(tmp_path / "run" / "rollouts" / "step-000001.parquet")
    errors = {row["member"]: row["error"] for row in rows if row["error"] is not None}
    assert errors == {
        1: "reward sometimes: ValueError: no gold (luck.py, line 7)",
        2: "reward sometimes: took longer than 0.1 s",
    }
    failed = [row for row in rows if row["error"] is not None]
    assert all(row["advantage"] == 0.0 and row["rewards"] == {} for row in failed)
    (metrics,) = deterministic_metrics(tmp_path / "run")
    assert metrics["rollout/failed"] == pytest.approx(len(failed) / len(rows))
    valid = [row["reward"] for row in rows if row["error"] is None]
    assert metrics["reward/mean"] == pytest.approx(sum(valid) / len(valid))


def test_past_max_failed_the_run_stops_with_code_3(tmp_path):
    path = task_file(tmp_path, MANNERS)
    ended = shell(tmp_path, str(path), "--skip-evaluation", "task.reward_seconds=0.1", "task.max_failed=0.1")
    assert ended.code == 3
    assert "of the rollouts failed (task.max_failed is 0.1); the first: reward sometimes:" in ended.err
    assert (tmp_path / "run" / "rollouts" / "step-000001.parquet").is_file()


def test_data_too_small_to_hold_any_out_trains_without_evaluation(tmp_path):
    ended = shell(tmp_path, str(task_file(tmp_path)), "--data", str(rows_file(tmp_path, 3)))
    assert ended.code == 0, ended.err
    assert "there are no held-out examples: accuracy is not measured" in ended.out
    assert not (tmp_path / "run" / "eval").exists()
    assert len(deterministic_metrics(tmp_path / "run")) == 2


def rows_file(folder: Path, count: int) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": 100 + n}) + "\n" for n in range(count)))
    return path


def test_examples_come_from_a_file_and_only_as_many_as_wanted(tmp_path):
    data = rows_file(tmp_path, 30)
    ended = shell(
        tmp_path, str(task_file(tmp_path)), "--data", str(data), "--max-examples", "2", "--skip-evaluation"
    )
    assert ended.code == 0, ended.err
    found = [
        row["example"]["n"]
        for path in (tmp_path / "run" / "rollouts").iterdir()
        for row in read_rollouts(path)
    ]
    assert len(set(found)) == 2
    assert min(found) >= 100


def test_a_prompt_that_fails_is_the_users_mistake_and_leaves_no_run(tmp_path):
    text = (
        "import groupwise as gw\n"
        "task = gw.Task(name='t', examples=[{'a': 1}], prompt=lambda row: row['b'], rewards={'r': len})"
    )
    ended = shell(tmp_path, str(task_file(tmp_path, text)))
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "task t: prompt failed on an example: the example has no column 'b'; it has ['a']" in ended.err
    assert not (tmp_path / "run").exists()


def test_data_that_lies_beside_the_task_file_alone_is_missed_in_the_folder_that_was_searched(
    tmp_path, monkeypatch
):
    (tmp_path / "cap").mkdir()
    rows_file(tmp_path / "cap", 3)
    text = (
        "import groupwise as gw\n"
        "rows = gw.load_examples('rows.jsonl')\n"
        "task = gw.Task(name='t', examples=rows, prompt=str, rewards={'r': len})"
    )
    task_file(tmp_path / "cap", text)
    monkeypatch.chdir(tmp_path)
    ended = shell(tmp_path, "cap/luck.py")
    assert (ended.code, ended.err) == (2, f"error: no such file: rows.jsonl in {tmp_path}\n")
