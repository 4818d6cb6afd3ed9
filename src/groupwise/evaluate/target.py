"""Resolve what the user names to evaluate, serve or chat with: a run, one of its checkpoints, an adapter or a
model. Also the names of benchmarks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from groupwise.config import Config, read_config
from groupwise.config.schema import ADAPTER, BUILT_IN, rank_known_to_vllm
from groupwise.errors import ConfigError
from groupwise.learner.checkpoint import CHECKSUMS, latest_checkpoint, verify
from groupwise.model.resolve import adapter_base, adapter_settings, local_folder, name_for_others
from groupwise.tasks.task import closest
from groupwise.tracking.run_folder import RunFolder, is_agent, is_run

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The weights to evaluate, and the run they come from."""

    name: str
    """The name that the user gave."""
    base: str | None = None
    """Name or path of the base model. None: the run's own."""
    trained: Path | None = None
    """Folder with the trained weights, or with an adapter on `base`."""
    rank: int = 0
    """Rank of the adapter; 0 if `trained` is a full model."""
    run: RunFolder | None = None
    cursor: int = 0
    """Number of training examples that the run had used."""
    code: Mapping[str, str] | None = None
    """Fingerprints of the task's functions at training time, if they were saved."""
    agent: Path | None = None
    """Settings file of a saved agent."""

    @property
    def settings(self) -> Path | None:
        """The settings file of the training, if there is one."""
        return self.run.config if self.run else self.agent

    @property
    def description(self) -> str:
        return str(self.trained or self.base)


def find_target(name: str) -> Target:
    """Resolve a name; raise ConfigError if it is neither a run nor a model."""
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
        raise ConfigError(f"{name} contains neither a run (config.yaml) nor a model (config.json, {ADAPTER})")
    if looks_like_path(path):
        raise ConfigError(f"there is no folder {name}; {path.parent} contains {subfolders(path.parent)}")
    if path.exists() or not HUB_NAME.fullmatch(name):
        raise ConfigError(f"{name} is neither a folder with a run or a model nor the name of a model")
    return Target(name=name, base=name)


def looks_like_path(path: Path) -> bool:
    """Whether a name is a path that does not exist: its parent folder does."""
    return not path.exists() and len(path.parts) > 1 and path.parent.is_dir()


def subfolders(folder: Path) -> str:
    """Return the names of the first subfolders, or "no folders"."""
    names = sorted(one.name for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "no folders"


def is_checkpoint(path: Path) -> bool:
    return (path / CHECKSUMS).is_file() and run_of(path).config.is_file()


def is_elite(path: Path) -> bool:
    run = RunFolder(path.resolve().parent)
    return path.resolve() == run.elite.resolve() and is_run(run.path) and is_search(run)


def of_run(name: str, run: RunFolder) -> Target:
    """Return the last checkpoint of a run, or the best member of a population."""
    search = is_search(run)
    checkpoint = latest_checkpoint(run.checkpoints)
    if checkpoint is None:
        command = "evolve" if search else "train"
        raise ConfigError(f"{name} has no checkpoint yet: resume it by groupwise {command} --resume {name}")
    return of_elite(name, run, checkpoint) if search else of_checkpoint(name, checkpoint)


def of_elite(name: str, run: RunFolder, checkpoint: Path) -> Target:
    """Return the best member of a population; its last checkpoint bounds the examples it has seen."""
    if not run.elite.is_dir():
        raise ConfigError(f"{name} has no best member yet: resume it by groupwise evolve --resume {name}")
    rank = adapter_settings(run.elite)["r"]
    state = verify(checkpoint)
    return Target(
        name=name, trained=run.elite, rank=rank, run=run, cursor=state["cursor"], code=state.get("code")
    )


def of_checkpoint(name: str, checkpoint: Path) -> Target:
    """Verify a checkpoint. The run's settings decide whether it is an adapter, and on which model."""
    run = run_of(checkpoint)
    if is_search(run):
        raise ConfigError(
            f"{name} is a checkpoint of a whole population; use {run.path} to evaluate its best member"
        )
    state = verify(checkpoint)
    rank = read_config(run.config).lora.r or 0
    return Target(
        name=name, trained=checkpoint, rank=rank, run=run, cursor=state["cursor"], code=state.get("code")
    )


def is_search(run: RunFolder) -> bool:
    return read_config(run.config).run.kind == "evolve"


def run_of(checkpoint: Path) -> RunFolder:
    """Return the parent of the folder `checkpoints`, whether or not it is a run."""
    return RunFolder(checkpoint.resolve().parent.parent)


SUFFIXES = (".jsonl.gz", ".jsonl", ".json", ".parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A standard benchmark, scored by the rewards of a task."""

    task: str
    file: str
    """File name in a data folder, without suffix."""
    hub: str | None
    """Name on the Hugging Face Hub. None: the task's own held-out examples."""
    max_tokens: int
    """Maximum length of an answer, for a policy that was not trained on this task."""


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
    """Return the source of the questions: a file of the folder, if given, else the Hub. None: the task."""
    if folder is None:
        return benchmark.hub
    paths = [Path(folder).expanduser() / f"{benchmark.file}{suffix}" for suffix in SUFFIXES]
    file = next((path for path in paths if path.is_file()), None)
    if file is None and benchmark.hub is not None:
        raise ConfigError(
            f"{folder} contains no {benchmark.file}{'/'.join(SUFFIXES)}; "
            f"unset evaluate.data_dir to load the questions from {benchmark.hub}"
        )
    return str(file) if file else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A run, checkpoint, adapter or model, resolved before any weights are loaded."""

    target: Target
    config: Config

    @property
    def vllm_command(self) -> str:
        """The command that serves the same with vLLM; it first merges adapters that vLLM does not support."""
        target, model = self.target, name_for_others(self.config.model.name)
        if not target.rank or target.trained is None:
            return shlex.join(["vllm", "serve", str(target.trained or model)])
        settings = adapter_settings(target.trained)
        unsupported = settings.get("use_dora") or settings.get("modules_to_save")
        if unsupported or (target.settings is not None and self.config.model.quantization):
            merge = shlex.join(["groupwise", "merge", target.name, "--output-path", "merged"])
            return f"{merge} && vllm serve merged"
        adapters = ["--enable-lora", "--max-lora-rank", str(rank_known_to_vllm(target.rank))]
        named = f"{Path(target.name).name}={target.trained}"
        return shlex.join(["vllm", "serve", model, *adapters, "--lora-modules", named])


def find_named(name: str, overrides: Sequence[str]) -> ResolvedModel:
    """Resolve the name of a run, checkpoint, adapter or model, and read its settings."""
    target = find_target(name)
    known = {} if target.base is None else {"model": target.base}
    config = read_config(target.settings, overrides=overrides, defaults=known)
    config = replace(config, model=replace(config.model, name=target.base or config.model.name))
    local_folder(config.model.name)
    return ResolvedModel(target=target, config=config.resolve())
