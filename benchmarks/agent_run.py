"""The search agent as a new user meets it: `groupwise train search_qa`, on three seeds, without a GPU.

    python benchmarks/agent_run.py --output results                  # one seed after another
    python benchmarks/agent_run.py --output results --parallel 3     # at once, each on cores of its own
    python benchmarks/agent_run.py --output /tmp/quick --quick       # does it run? The figures mean nothing

Each run is a process of its own in an empty folder, held to `--threads` cores. Its time counts from the start
of the process to its end. Accuracy and MRR are what the run itself measured on its held-out questions before
and after, over sampled conversations, with 95 % intervals. Whether a figure is met is printed, not asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from machine import machine, markdown

import groupwise
from groupwise.evaluate.held_out import Evaluation, compare
from groupwise.evaluate.intervals import Interval

WHOLE_RUN_SECONDS = 600.0
TOOL_SHARE = 0.1
ON_CORES = (
    "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); "
    "os.execv(sys.executable, [sys.executable, '-m', 'groupwise', *sys.argv[2:]])"
)
QUICK = (
    *("run.max_steps=2", "rollout.prompts=2", "rollout.group_size=4", "rollout.max_tokens=24"),
    *("task.held_out=8", "evaluate.samples=2", "evaluate.every=0"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run reached."""

    seed: int
    steps: int
    whole: float
    step: float
    """Median seconds of a step, and the share of it that tools took."""
    tools: float
    before: dict[str, Interval]
    after: dict[str, Interval]
    change: dict[str, Any]
    """Paired, example by example."""
    curve: list[dict[str, float]]

    @property
    def accuracy(self) -> str:
        """The name of avg@k, whatever k is."""
        return next(name for name in self.after if name.startswith("avg@"))

    def disjoint(self, name: str) -> bool:
        return self.after[name].low > self.before[name].high


FIGURES: dict[str, Callable[[Run], bool]] = {
    f"whole run ≤ {WHOLE_RUN_SECONDS:g} s": lambda run: run.whole <= WHOLE_RUN_SECONDS,
    "answers: intervals disjoint": lambda run: run.disjoint(run.accuracy),
    "MRR: intervals disjoint": lambda run: run.disjoint("mrr"),
    f"tools < {TOOL_SHARE:.0%} of a step": lambda run: run.tools < TOOL_SHARE,
}


def train(seed: int, *, settings: Sequence[str], cores: Sequence[int], output: Path) -> Run:
    """Run once on these cores, and keep what there is to read."""
    words = ["train", "search_qa", "--seed", str(seed), *settings]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "TRACKIO_DIR": f"{folder}/trackio",
            "OMP_NUM_THREADS": str(len(cores)),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(Path(groupwise.__file__).resolve().parents[1]),
        }
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", ON_CORES, ",".join(map(str, cores)), *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        whole = time.perf_counter() - started
        if done.returncode:
            tail = "\n".join(done.stdout.splitlines()[-20:])
            raise SystemExit(f"`groupwise {' '.join(words)}` ended with code {done.returncode}:\n{tail}")
        (run_folder,) = (Path(folder) / "runs").iterdir()
        for name in ("before", "after"):
            shutil.copy(run_folder / "eval" / f"{name}.txt", output / f"seed-{seed}-{name}.txt")
        return read_run(run_folder, seed=seed, whole=whole)


def read_run(folder: Path, *, seed: int, whole: float) -> Run:
    before, after = (
        Evaluation.from_json(json.loads((folder / "eval" / f"{name}.json").read_text(encoding="utf-8")))
        for name in ("before", "after")
    )
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [row for row in map(json.loads, lines) if "time/step" in row]
    kept = ("step", "time/step", "time/tools", "reward/answer/mean", "reward/mrr/mean", "rollout/calls")
    return Run(
        seed=seed,
        steps=len(steps),
        whole=whole,
        step=statistics.median(row["time/step"] for row in steps),
        tools=statistics.median(row.get("time/tools", 0.0) / row["time/step"] for row in steps),
        before=before.intervals() | before.reward_intervals(),
        after=after.intervals() | after.reward_intervals(),
        change={name: asdict(change) for name, change in compare(before, after).items()},
        curve=[{name: row[name] for name in kept if name in row} for row in steps],
    )


def report(runs: Sequence[Run]) -> str:
    times = markdown(
        ("seed", "steps", "s a step", "tools", "whole run, s"),
        [
            [str(run.seed), str(run.steps), f"{run.step:.2f}", f"{run.tools:.1%}", f"{run.whole:.0f}"]
            for run in runs
        ],
    )
    reached = markdown(
        ("seed", "held out", "before", "after"),
        [
            [str(run.seed), name, str(run.before[name]), str(after)]
            for run in runs
            for name, after in run.after.items()
        ],
    )
    met = markdown(
        ("figure", *(f"seed {run.seed}" for run in runs)),
        [[figure, *("met" if holds(run) else "MISSED" for run in runs)] for figure, holds in FIGURES.items()],
    )
    return "\n\n".join([times, reached, met])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2, help="cores of each run")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, each on its own cores")
    parser.add_argument("--output", type=Path, required=True, help="folder of the result")
    parser.add_argument("--quick", action="store_true", help="a smoke run: hardly any work")
    parser.add_argument("settings", nargs="*", help="section.key=value for every run; none is the default")
    options = parser.parse_args()
    settings = [*(QUICK if options.quick else ()), *options.settings]
    ours = sorted(os.sched_getaffinity(0))
    if options.threads * options.parallel > len(ours):
        parser.error(f"{options.parallel} × {options.threads} cores are wanted, {len(ours)} are there")
    options.output.mkdir(parents=True, exist_ok=True)
    about = machine(threads=options.threads, torch=version("torch")) + f" · {options.parallel} at a time"
    print(about, flush=True)
    places: SimpleQueue[Sequence[int]] = SimpleQueue()
    for place in range(options.parallel):
        places.put(ours[place * options.threads : (place + 1) * options.threads])

    def run(seed: int) -> Run:
        cores = places.get()
        try:
            done = train(seed, settings=settings, cores=cores, output=options.output)
        finally:
            places.put(cores)
        print(f"seed {seed}: {done.whole:.0f} s", flush=True)
        return done

    with ThreadPoolExecutor(options.parallel) as threads:
        runs = list(threads.map(run, options.seeds))
    print(f"\n{report(runs)}")
    result = {"machine": about, "settings": settings, "runs": [asdict(one) for one in runs]}
    (options.output / "agent_run.json").write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
