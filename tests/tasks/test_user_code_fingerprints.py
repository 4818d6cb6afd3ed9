"""A task's code has a fingerprint that changes with what it does, and with nothing else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from groupwise.config.schema import TaskConfig
from groupwise.tasks import TASKS, isolated, load_task
from groupwise.tasks.registry import run_file
from groupwise.tasks.user_code import changed_code, code_of

TASK = """import zlib
import time
import groupwise as gw

STARTED = time.time()
BONUS = 0.5

def share(text):
    return zlib.crc32(text.encode()) % 4

def scaled(factor):
    def twice(rollout, example):
        return factor * share(rollout.text)
    return twice

class Long:
    def __call__(self, rollout, example):
        return float(len(rollout.text) > 3)

def luck(rollout, example):
    return float(share(rollout.text) == 0) + BONUS + 0 * STARTED

task = gw.Task(
    name="luck",
    examples=[{"n": n} for n in range(24)],
    prompt=lambda example: f"{example['n']} + 1",
    rewards={"luck": luck, "scaled": scaled(2.0), "long": Long()},
    weights={"scaled": 0.1},
)

def main():
    gw.train(task, max_steps=2)

if __name__ == "__main__":
    main()
"""


def code(folder: Path, text: str) -> dict[str, str]:
    path = folder / "own.py"
    path.write_text(text)
    return code_of(load_task(TaskConfig(name=str(path))))


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("== 0)", "== 1)", ["reward luck"]),
        ("BONUS = 0.5", "BONUS = 0.75", ["reward luck"]),
        ("% 4", "% 5", ["reward luck", "reward scaled"]),  # what both call
        ("scaled(2.0)", "scaled(3.0)", ["reward scaled"]),
        ("> 3", "> 5", ["reward long"]),
        ('+ 1",', '+ 2",', ["prompt"]),
        ('{"scaled": 0.1}', '{"scaled": 0.2}', ["weights"]),
        ('"luck": luck, ', "", ["reward luck", "accuracy"]),
        ("max_steps=2", "max_steps=4, resume='run'", []),
        ("def luck(", "# by chance\n\ndef  luck(", []),
    ],
)
def test_the_parts_that_changed_are_named(tmp_path, old, new, changed):
    assert TASK.count(old) == 1
    assert changed_code(code(tmp_path, TASK), code(tmp_path, TASK.replace(old, new))) == changed


def test_a_file_edited_in_the_same_second_runs_as_it_is_now(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "own.py"

    def bonus(text: str) -> float:
        path.write_text(text)
        os.utime(path, (1_700_000_000, 1_700_000_000))
        return run_file(path)[0].BONUS

    assert bonus(TASK) == 0.5
    assert bonus(TASK.replace("BONUS = 0.5", "BONUS = 0.7")) == 0.7


def test_a_checkpoint_that_does_not_tell_has_no_changes(tmp_path):
    assert changed_code(None, code(tmp_path, TASK)) == []


def test_the_code_of_built_in_tasks_belongs_to_the_version():
    for name in ("countdown", "gsm8k", "math"):
        assert code_of(TASKS[name]()) == {}


def test_a_worker_process_does_not_change_the_fingerprint(tmp_path: Path) -> None:
    look = 'def look(word: str) -> str:\n    """Look it up."""\n    return str(share(word))\n\n'
    tool = look + "task = gw.Task(tools=[look],"
    path = tmp_path / "own.py"
    path.write_text(TASK.replace("task = gw.Task(", tool, 1))
    task = load_task(TaskConfig(name=str(path)))
    with isolated(task) as moved:
        assert moved.rewards["luck"] is not task.rewards["luck"]
        assert moved.tools[0] is not task.tools[0]
        assert code_of(moved) == code_of(task)
