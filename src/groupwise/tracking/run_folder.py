"""Where everything of a run lies on disk, and who may write there."""

from __future__ import annotations

import fcntl
import os
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from groupwise.errors import ConfigError
from groupwise.files import alive

STEP_NAME = re.compile(r"step-(\d{6,})")
SETTINGS = "config.yaml"
AGENT = "agent.json"
"""What only the folder of a saved agent holds, which has settings as a run has."""


def is_agent(folder: Path) -> bool:
    return (folder / AGENT).is_file()


def is_run(folder: Path) -> bool:
    return (folder / SETTINGS).is_file() and not is_agent(folder)


def refuse_agent(folder: Path) -> None:
    """Nothing may train, or look for steps, where an agent was saved."""
    if is_agent(folder):
        raise ConfigError(
            f"{folder} is not a run but a saved agent ({AGENT}): it goes on in Python, by "
            f"groupwise.Agent.load({str(folder)!r})"
        )


def refuse_checkpoint(path: Path) -> None:
    """A run goes on after its last checkpoint; a copy of it can go on after an earlier one."""
    run = path.resolve().parent.parent
    if step_of(path.resolve().name) is not None and is_run(run):
        raise ConfigError(
            f"{path} is a checkpoint of {run}: --resume {run} goes on after its last one; to go on after "
            "this one, copy that folder, remove the later checkpoints from the copy, and resume the copy"
        )


def step_name(step: int) -> str:
    """The name of a file or folder that belongs to one step: 10 -> "step-000010"."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step in a name made by `step_name`, an extension allowed: "step-000010.parquet" -> 10."""
    match = STEP_NAME.fullmatch(name.partition(".")[0])
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run, and the paths in it."""

    path: Path

    def absolute(self) -> RunFolder:
        """Return the folder by its absolute path: a reward may change the working directory."""
        return RunFolder(Path(os.path.abspath(self.path)))

    @classmethod
    def create(cls, output_dir: str | Path, *, name: str | None, task: str, model: str) -> RunFolder:
        """Make the folder of a new run; without a name it gets task, model and time."""
        try:
            if name is None:
                return cls(
                    make_unique(
                        Path(output_dir), f"{short(task)}-{short(model)}-{datetime.now():%Y%m%d-%H%M%S}"
                    )
                )
            if Path(name).name != name or name in ("", ".."):
                raise ConfigError(f"run.name must be a plain folder name; got {name!r}")
            path = Path(output_dir) / name
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make a run folder in {output_dir}: {error.strerror}") from error
        if any(not entry.name.startswith(".") for entry in path.iterdir()):
            raise ConfigError(
                f"{path} already holds a run: continue it with --resume {path}, or choose another name"
            )
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Find the folder of an existing run."""
        folder = cls(Path(path))
        if not folder.path.is_dir():
            raise ConfigError(f"there is no run folder {path}")
        refuse_agent(folder.path)
        refuse_checkpoint(folder.path)
        if not folder.config.is_file():
            raise ConfigError(f"{path} is not a run folder: it has no {SETTINGS}")
        return folder

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def config(self) -> Path:
        return self.path / SETTINGS

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "training.log"

    @property
    def stats(self) -> Path:
        return self.path / "training_stats.json"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    def rollouts_at(self, step: int) -> Path:
        return self.rollouts / f"{step_name(step)}.parquet"

    @property
    def updates(self) -> Path:
        return self.path / "updates"

    def updates_at(self, step: int) -> Path:
        return self.updates / f"{step_name(step)}.parquet"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def completions(self) -> Path:
        return self.path / "completions"

    def completions_at(self, step: int) -> Path:
        return self.completions / f"{step_name(step)}.txt"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint_at(self, step: int) -> Path:
        return self.checkpoints / step_name(step)

    @property
    def elite(self) -> Path:
        """The best member of a search."""
        return self.path / "elite"

    @property
    def evaluations(self) -> Path:
        return self.path / "eval"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    def lock(self) -> IO[str]:
        """Claim the folder for this process; closing the returned file, or dying, gives it back.

        A POSIX record lock, because children made by fork do not inherit it: a worker that outlives a
        killed trainer must not keep its folder from being resumed.
        """
        try:
            file = (self.path / ".lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write in {self.path}: {error.strerror}; make it writable, or resume a copy of it"
            ) from error
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            owner = file.read().strip()
            file.close()
            who = f"process {owner}" if owner else "another process"
            raise ConfigError(f"{self.path} is in use by {who}: wait for it or stop it first") from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        return file


def owner(folder: RunFolder) -> int | None:
    """Return the process that trains in a folder now. Never to be asked by that process itself.

    A process that closes any file of the name `.lock` gives all its locks on it back.
    """
    try:
        with (folder.path / ".lock").open(encoding="utf-8") as file:
            process = int(file.read().strip() or 0)
            if not process or not alive(process):
                return None
            # The number may belong to another process by now: only the lock tells.
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return process
    except (OSError, ValueError):
        return None
    return None


def make_unique(parent: Path, name: str) -> Path:
    """Make a folder that did not exist, numbering the name when two runs start in one second."""
    parent.mkdir(parents=True, exist_ok=True)
    attempt = 1
    while True:
        path = parent / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            attempt += 1
        else:
            return path


def short(name: str) -> str:
    """The part of a task or model name that tells it apart: "Qwen/Qwen2.5-0.5B" -> "Qwen2.5-0.5B"."""
    last = Path(name).name.removesuffix(".py")
    return re.sub(r"[^\w.-]+", "-", last).strip("-.") or "run"
