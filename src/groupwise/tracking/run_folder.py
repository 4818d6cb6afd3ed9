"""The folder of a run: its paths, its creation, the lock that admits one training process, and training.log.

training.log has the messages of the `groupwise` logger with timestamps.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from groupwise.errors import ConfigError
from groupwise.files import alive

STEP_NAME = re.compile(r"step-(\d{6,})")
SETTINGS = "config.yaml"
RUNS = "runs"
"""Default name of the folder of runs."""
EVOLUTION = "evolution.json"
"""The members of a search; see `evolution.evolve_state.EvolutionLog`."""
AGENT = "agent.json"
"""The file that distinguishes a saved agent from a run; both have a config.yaml."""


def is_agent(folder: Path) -> bool:
    return (folder / AGENT).is_file()


def is_run(folder: Path) -> bool:
    return (folder / SETTINGS).is_file() and not is_agent(folder)


def refuse_agent(folder: Path) -> None:
    """Raise an error if the folder is a saved agent, which is not a run."""
    if is_agent(folder):
        raise ConfigError(
            f"{folder} is not a run but a saved agent ({AGENT}): load it in Python with "
            f"groupwise.Agent.load({str(folder)!r})"
        )


def run_of_checkpoint(path: Path) -> RunFolder | None:
    """Return the run that a checkpoint belongs to; None if the path is not a checkpoint of a run."""
    run = path.resolve().parent.parent
    return RunFolder(run) if step_of(path.resolve().name) is not None and is_run(run) else None


def refuse_checkpoint(path: Path) -> None:
    """Raise an error if the path is a checkpoint where a run is required."""
    if (run := run_of_checkpoint(path)) is not None:
        raise ConfigError(f"{path} is a checkpoint, not a run; use its run folder, {run.path}")


def step_name(step: int) -> str:
    """Return the name of a step's file or folder: 10 -> "step-000010"."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """Return the step in a file or folder name: "step-000010.parquet" -> 10. None if there is none."""
    match = STEP_NAME.fullmatch(name.partition(".")[0])
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run, and the paths in it."""

    path: Path

    def absolute(self) -> RunFolder:
        """Return the folder with an absolute path, because a reward may change the working directory."""
        return RunFolder(Path(os.path.abspath(self.path)))

    @classmethod
    def create(cls, output_dir: str | Path, *, name: str | None, task: str, model: str) -> RunFolder:
        """Create the folder of a new run. The default name is built from task, model and time."""
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
            raise ConfigError(f"cannot create a run folder in {output_dir}: {error.strerror}") from error
        if any(not entry.name.startswith(".") for entry in path.iterdir()):
            raise ConfigError(
                f"{path} already contains a run: resume it with --resume {path}, or choose another name"
            )
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open the folder of an existing run."""
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
    def parent(self) -> Path:
        """The file that names the run and the checkpoint that a branched run continues."""
        return self.path / "parent.json"

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
        """The best member of an evolve run."""
        return self.path / "elite"

    @property
    def evaluations(self) -> Path:
        return self.path / "eval"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    def remove_unstarted(self) -> None:
        """Remove the files of a run that ended before its first step, so that its name is free again.

        Rollouts that were recorded stay: they show why the step failed.
        """
        if (
            self.metrics.exists()
            or any(self.checkpoints.glob("step-*"))
            or any(self.rollouts.glob("*.parquet"))
        ):
            return
        with suppress(OSError):  # files of the user stay, and their folder with them
            for file in (self.config, self.log, self.tokenizer, self.path / ".lock"):
                file.unlink(missing_ok=True)
            made = (self.rollouts, self.updates, self.completions, self.evaluations, self.plots)
            for folder in (*made, self.checkpoints, self.path / "tensorboard", self.path / "wandb"):
                shutil.rmtree(folder, ignore_errors=True)
            self.path.rmdir()
            if self.path.parent.name == RUNS:
                self.path.parent.rmdir()  # fails if there are other runs

    def check_paths(self) -> None:
        """Raise ConfigError if anything but a regular file, or a folder, is where a resumed run writes."""
        files = [self.metrics, self.log, self.stats, self.tokenizer, self.report, self.path / ".lock"]
        named = {folder for folder in self.evaluations.glob("*") if folder.is_dir()}  # one for each test set
        files += [file for folder in named for file in folder.iterdir()]
        for folder in (self.rollouts, self.updates, self.completions, self.evaluations, self.plots):
            if folder == self.evaluations and folder.is_dir():
                files += set(folder.iterdir()) - named
            elif folder.is_dir():
                files += folder.iterdir()
            elif os.path.lexists(folder):
                raise ConfigError(f"{folder} is not a folder: move it away and resume again")
        for file in files:
            if os.path.lexists(file) and not file.is_file():
                raise ConfigError(f"{file} is not a regular file: move it away and resume again")

    def lock(self) -> IO[str]:
        """Lock the folder for this process. Closing the returned file, or the end of the process, unlocks it.

        This is a POSIX record lock, which forked children do not inherit: a worker that outlives a killed
        trainer must not keep the run from being resumed.
        """
        try:
            file = (self.path / ".lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write to {self.path}: {error.strerror or error}; make it writable, or resume a copy "
                "of it"
            ) from error
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            owner = file.read().strip()
            file.close()
            holder = f"process {owner}" if owner else "another process"
            raise ConfigError(f"{self.path} is in use by {holder}: wait until it ends, or stop it") from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        return file


def owner(folder: RunFolder) -> int | None:
    """Return the id of the process that is training in a folder. Must not be called by that process itself.

    POSIX releases all locks that a process holds on a file as soon as it closes any descriptor of the file.
    """
    try:
        with (folder.path / ".lock").open(encoding="utf-8") as file:
            process = int(file.read().strip() or 0)
            if not process or not alive(process):
                return None
            # Another process may have this id by now; only the lock is reliable.
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return process
    except (OSError, ValueError):
        return None
    return None


def make_unique(parent: Path, name: str) -> Path:
    """Create a new folder; append a number if two runs start in the same second."""
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
    """Return the last part of a task or model name: "Qwen/Qwen2.5-0.5B" -> "Qwen2.5-0.5B"."""
    last = Path(name).name.removesuffix(".py")
    return re.sub(r"[^\w.-]+", "-", last).strip("-.") or "run"


LOGGER = logging.getLogger("groupwise")


class LogFile(logging.FileHandler):
    """A file handler that ignores OS errors: a full disk is reported when the run writes its other files."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


@contextmanager
def log_to(path: Path) -> Iterator[logging.Logger]:
    """Log to a file, and not to the terminal, inside the block."""
    handler = LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level_before = LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    # A reward that calls `logging.warning(…)` adds a terminal handler to the root logger.
    propagated, LOGGER.propagate = LOGGER.propagate, False
    try:
        yield LOGGER
    finally:
        LOGGER.propagate = propagated
        LOGGER.setLevel(level_before)
        LOGGER.removeHandler(handler)
        handler.close()
