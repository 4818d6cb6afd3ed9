"""Runs of a second or two, real in every part, whose bytes can be compared."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from groupwise.config import Config, read_config

LUCK = """
import zlib
import groupwise as gw

def luck(rollout: gw.Rollout, example: gw.Example) -> float:
    return float(zlib.crc32(rollout.text.encode()) % 4 == 0)

task = gw.Task(
    name="luck",
    examples=[{"n": n} for n in range(24)],
    prompt=lambda example: f"{example['n']} + 1",
    rewards={"luck": luck},
    perfect=1.0,
)
"""
"""A task that any policy gets right now and then, so that groups with and without signal both occur."""

SMALL = (
    *("run.max_steps=4", "run.save_every=2", "run.keep_last=3", "track.trackers=[]", "model.device=cpu"),
    *("rollout.prompts=3", "rollout.group_size=4", "rollout.max_tokens=6", "rollout.temperature=1.5"),
    *("evaluate.every=3", "evaluate.samples=2", "track.report=false"),
)

Artifacts = dict[str, Any]


def task_file(folder: Path, text: str = LUCK) -> Path:
    path = folder / "luck.py"
    path.write_text(text)
    return path


def small_config(folder: Path, *overrides: str, task: str = "luck.py") -> Config:
    """Return the settings of a small run named `run` in this folder, whose task file lies there too."""
    place = (f"run.output_dir={folder}", "run.name=run", f"task.name={folder / task}")
    return read_config(overrides=[*place, *SMALL, *overrides])


def run_artifacts(run: Path) -> Artifacts:
    """Return what must not depend on how often a run was stopped: weights, metrics, rollouts."""
    kept = ("model.safetensors", "adapter_model.safetensors", "optimizer.safetensors", "optimizer.json")
    paths = [
        path
        for path in sorted(run.rglob("*"))
        if path.name in kept or (path.is_file() and path.parent.name in ("rollouts", "completions", "eval"))
    ]
    files: Artifacts = {path.relative_to(run).as_posix(): path.read_bytes() for path in paths}
    return files | {"metrics": deterministic_metrics(run)}


def deterministic_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of every step without times, speeds and memory."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if not name.startswith(("time/", "speed/", "memory/"))}
        for row in rows
    ]


class SignalAt(NamedTuple):
    """A signal that a process sends itself when it touches, the nth time, a path that holds this text."""

    path: str
    signal: int
    nth: int = 1


def command(words: Sequence[str], signals: Sequence[SignalAt], output: Path) -> None:
    """Run the `groupwise` command; each signal arrives at its moment, in the given order."""
    from groupwise import cli

    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT), descriptor)

    waiting = list(signals)
    touched = 0

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal touched
        if waiting and event in TOUCHES and waiting[0].path in str(arguments[0]):
            touched += 1
            if touched == waiting[0].nth:
                touched = 0
                os.kill(os.getpid(), waiting.pop(0).signal)

    sys.addaudithook(listen)
    sys.exit(cli.main(words))


TOUCHES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["groupwise.cli", "groupwise.training", "peft", "tests.support.preloaded"])


class CommandResult(NamedTuple):
    """Exit code of a command (negative when a signal ended it) and what it printed."""

    code: int
    out: str
    err: str


def run_command(*words: str, signals: Sequence[SignalAt] = ()) -> CommandResult:
    """Run the command in a process of its own."""
    with TemporaryDirectory() as folder:
        output = Path(folder)
        process = PROCESSES.Process(target=command, args=(words, signals, output))
        process.start()
        process.join(120)
        assert process.exitcode is not None
        return CommandResult(process.exitcode, (output / "out").read_text(), (output / "err").read_text())


KILL, INTERRUPT, TERMINATE = signal.SIGKILL, signal.SIGINT, signal.SIGTERM
