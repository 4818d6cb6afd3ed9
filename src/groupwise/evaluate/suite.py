"""The known benchmarks: which task judges each, and where its questions come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from groupwise.errors import ConfigError
from groupwise.tasks.task import closest

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
