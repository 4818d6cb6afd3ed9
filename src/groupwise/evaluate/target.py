"""What a user may name to be measured: a run, one of its checkpoints, an adapter, or a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from groupwise.config import read_config
from groupwise.config.schema import BUILT_IN
from groupwise.errors import ConfigError
from groupwise.learner.checkpoint import CHECKSUMS, latest_checkpoint, verify
from groupwise.model.resolve import ADAPTER, adapter_base, adapter_settings
from groupwise.tasks.task import closest
from groupwise.tracking.run_folder import RunFolder, is_agent, is_run

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The weights to measure, and the run they come from."""

    name: str
    """As the user wrote it."""
    base: str | None = None
    """The model by name; None: the run's own."""
    trained: Path | None = None
    """A folder with the weights, or the adapter on `base`, to measure."""
    rank: int = 0
    """Of that adapter; 0: `trained` is a whole model."""
    run: RunFolder | None = None
    cursor: int = 0
    """Training examples that the run had drawn by then."""
    code: Mapping[str, str] | None = None
    """The fingerprints of the task's functions that it was trained with, where they were kept."""
    agent: Path | None = None
    """The settings of the agent that was saved there."""

    @property
    def settings(self) -> Path | None:
        """The file with the settings that it was trained with, where there is one."""
        return self.run.config if self.run else self.agent

    @property
    def description(self) -> str:
        return str(self.trained or self.base)


def find_target(name: str) -> Target:
    """Tell what a name means; raise ConfigError when it means nothing."""
    path = Path(name).expanduser()
    if name not in BUILT_IN and path.is_dir():
        if is_run(path):
            return of_run(name, RunFolder(path))
        if is_checkpoint(path):
            return of_checkpoint(name, path)
        if is_elite(path):
            return of_run(name, RunFolder(path.resolve().parent))
        agent = RunFolder(path).config if is_agent(path) else None
        if (path / ADAPTER).is_file():
            rank = adapter_settings(path)["r"]
            return Target(name=name, base=adapter_base(path), trained=path, rank=rank, agent=agent)
        if (path / "config.json").is_file():
            return Target(name=name, base=str(path), agent=agent)
        raise ConfigError(f"{name} holds neither a run (config.yaml) nor a model (config.json, {ADAPTER})")
    if looks_like_path(path):
        raise ConfigError(f"there is no folder {name}; {path.parent} holds {held_by(path.parent)}")
    if path.exists() or not HUB_NAME.fullmatch(name):
        raise ConfigError(f"{name} is neither the folder of a run or a model nor the name of a model")
    return Target(name=name, base=name)


def looks_like_path(path: Path) -> bool:
    """Whether a name that is not there is one of a folder: it has its place in a folder that is there."""
    return not path.exists() and len(path.parts) > 1 and path.parent.is_dir()


def held_by(folder: Path) -> str:
    """The folders that are there instead."""
    names = sorted(one.name for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "none"


def is_checkpoint(path: Path) -> bool:
    return (path / CHECKSUMS).is_file() and run_of(path).config.is_file()


def is_elite(path: Path) -> bool:
    run = RunFolder(path.resolve().parent)
    return path.resolve() == run.elite.resolve() and is_run(run.path) and is_search(run)


def of_run(name: str, run: RunFolder) -> Target:
    """A run is measured at its last checkpoint; a search by its best member."""
    search = is_search(run)
    checkpoint = latest_checkpoint(run.checkpoints)
    if checkpoint is None:
        command = "evolve" if search else "train"
        raise ConfigError(f"{name} has no checkpoint yet: go on with groupwise {command} --resume {name}")
    return of_elite(name, run, checkpoint) if search else of_checkpoint(name, checkpoint)


def of_elite(name: str, run: RunFolder, checkpoint: Path) -> Target:
    """A search's best member has learned from no more examples than its last checkpoint counts."""
    if not run.elite.is_dir():
        raise ConfigError(f"{name} has no best member yet: go on with groupwise evolve --resume {name}")
    rank = adapter_settings(run.elite)["r"]
    state = verify(checkpoint)
    return Target(
        name=name, trained=run.elite, rank=rank, run=run, cursor=state["cursor"], code=state.get("code")
    )


def of_checkpoint(name: str, checkpoint: Path) -> Target:
    """A checkpoint is checked; its run's settings say whether it holds an adapter, and on which model."""
    run = run_of(checkpoint)
    if is_search(run):
        raise ConfigError(
            f"{name} holds all members of a search: name the search, {run.path}, for the best of them"
        )
    state = verify(checkpoint)
    rank = read_config(run.config).lora.r or 0
    return Target(
        name=name, trained=checkpoint, rank=rank, run=run, cursor=state["cursor"], code=state.get("code")
    )


def is_search(run: RunFolder) -> bool:
    return read_config(run.config).run.kind == "evolve"


def run_of(checkpoint: Path) -> RunFolder:
    """Return the folder that holds the folder `checkpoints`, whether or not it is a run's."""
    return RunFolder(checkpoint.resolve().parent.parent)


SUFFIXES = (".jsonl.gz", ".jsonl", ".json", ".parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Questions that everybody measures with, under the verifier of a task."""

    task: str
    file: str
    """What the file is called, less its suffix, in a folder of data."""
    hub: str | None
    """On the Hugging Face hub. None: the task's own held-out examples."""
    max_tokens: int
    """Longest answer, for a policy that was not trained on this task."""


BENCHMARKS: Mapping[str, Benchmark] = {
    "gsm8k": Benchmark(task="gsm8k", file="gsm8k_test", hub="openai/gsm8k:main@test", max_tokens=512),
    "math500": Benchmark(task="math", file="math500", hub="HuggingFaceH4/MATH-500@test", max_tokens=1024),
    "countdown": Benchmark(task="countdown", file="countdown_test", hub=None, max_tokens=256),
}


def benchmark_named(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise ConfigError(f"unknown benchmark {name!r}{closest(name, BENCHMARKS)}")
    return BENCHMARKS[name]


def source_of(benchmark: Benchmark, folder: str | None) -> str | None:
    """Return where the questions are: in the folder, if one is given, else on the hub; None: in the task."""
    if folder is None:
        return benchmark.hub
    paths = [Path(folder).expanduser() / f"{benchmark.file}{suffix}" for suffix in SUFFIXES]
    found = next((path for path in paths if path.is_file()), None)
    if found is None and benchmark.hub is not None:
        raise ConfigError(
            f"{folder} holds no {benchmark.file}{'/'.join(SUFFIXES)}: "
            f"without evaluate.data_dir the questions come from {benchmark.hub}"
        )
    return str(found) if found else None
