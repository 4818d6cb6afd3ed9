"""The default run as a new user meets it: `groupwise train` without arguments, on three seeds.

    python benchmarks/default_run.py                  # three whole runs, about 15 minutes on two cores
    python benchmarks/default_run.py --busy 2         # beside two processes that occupy a core each
    python benchmarks/default_run.py --commands       # how long the first commands of a user take
    python benchmarks/default_run.py --quick          # does it run? The figures mean nothing

Each run is a process of its own in an empty folder, so it finds no settings and leaves nothing behind; the
first has no arguments at all, the others only `--seed`. Times count from the start of the process: to the
first line, to the first step shown, and to its end. Accuracies are what the run itself measured on its
held-out puzzles before and after, with 95 % intervals. Whether a figure is met is printed, not asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

from machine import machine, markdown

FIRST_STEP_SECONDS = 8.0
WHOLE_RUN_SECONDS = 150.0
COMMANDS = {
    ("--help",): 0.3,
    ("train", "--help"): 0.3,
    ("doctor",): 10.0,
    ("doctor", "--model", "smollm2"): 10.0,
}
"""What a user runs first, and the seconds that it should take at most."""
STEP_LINE = re.compile(r"step \d+/\d+ ")
QUICK = (
    "run.max_steps=2",
    "rollout.prompts=4",
    "rollout.max_tokens=32",
    "task.held_out=16",
    "evaluate.every=0",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A measured share and its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run showed and reached."""

    seed: int
    steps: int
    first_line: float
    first_step: float
    whole: float
    before: dict[str, Score]
    """By name: greedy, avg@8, pass@8."""
    after: dict[str, Score]

    @property
    def average(self) -> str:
        """The name of avg@k, whatever k is."""
        return next(name for name in self.after if name.startswith("avg@"))

    def disjoint(self, name: str) -> bool:
        return self.after[name].low > self.before[name].high


FIGURES: dict[str, Callable[[Run], bool]] = {
    f"first step shown < {FIRST_STEP_SECONDS:g} s": lambda run: run.first_step < FIRST_STEP_SECONDS,
    f"whole run ≤ {WHOLE_RUN_SECONDS:g} s": lambda run: run.whole <= WHOLE_RUN_SECONDS,
    "sampled accuracy at least doubles": lambda run: (
        run.after[run.average].mean >= 2 * run.before[run.average].mean > 0
    ),
    "sampled: intervals disjoint": lambda run: run.disjoint(run.average),
    "greedy accuracy rises": lambda run: run.after["greedy"].mean > run.before["greedy"].mean,
    "greedy: intervals disjoint": lambda run: run.disjoint("greedy"),
}


def train(seed: int, *, settings: Sequence[str], threads: int | None) -> Run:
    """Run once and watch what it prints and when."""
    words = [*(["--seed", str(seed)] if seed else []), *settings]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TRACKIO_DIR": f"{folder}/trackio"}
        if threads is not None:
            environment |= {"OMP_NUM_THREADS": str(threads)}
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "groupwise", "train", *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None, "asked for a pipe"
        lines = [(time.perf_counter() - started, line.rstrip()) for line in process.stdout]
        code = process.wait()
        whole = time.perf_counter() - started
        if code:
            tail = "\n".join(line for _, line in lines[-20:])
            raise SystemExit(f"`groupwise train {' '.join(words)}` ended with code {code}:\n{tail}")
        (run_folder,) = (Path(folder) / "runs").iterdir()
        stats = json.loads((run_folder / "training_stats.json").read_text(encoding="utf-8"))
    return Run(
        seed=seed,
        steps=stats["steps"],
        first_line=lines[0][0],
        first_step=next(at for at, line in lines if STEP_LINE.match(line)),
        whole=whole,
        before=scores(stats["before"]),
        after=scores(stats["after"]),
    )


def scores(metrics: dict[str, float]) -> dict[str, Score]:
    """From "eval/greedy", "eval/greedy_low" and "eval/greedy_high" to one score, for each name."""
    names = [key.removeprefix("eval/").removesuffix("_low") for key in metrics if key.endswith("_low")]
    return {
        name: Score(
            mean=metrics[f"eval/{name}"], low=metrics[f"eval/{name}_low"], high=metrics[f"eval/{name}_high"]
        )
        for name in names
    }


def commands() -> str:
    """Time the first commands: medians of five processes each."""

    def seconds(words: Sequence[str]) -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "groupwise", *words], capture_output=True, check=True)
        return time.perf_counter() - started

    times = {words: median(seconds(words) for _ in range(5)) for words in COMMANDS}
    return markdown(
        ("command", "s", "target"),
        [
            [f"groupwise {' '.join(words)}", f"{taken:.2f}", f"< {COMMANDS[words]:g}"]
            for words, taken in times.items()
        ],
    )


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Occupy a core with each of some processes."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def report(runs: Sequence[Run]) -> str:
    times = markdown(
        ("seed", "steps", "first line, s", "first step, s", "whole run, s"),
        [
            [
                str(run.seed),
                str(run.steps),
                f"{run.first_line:.1f}",
                f"{run.first_step:.1f}",
                f"{run.whole:.0f}",
            ]
            for run in runs
        ],
    )
    accuracies = markdown(
        ("seed", "held-out accuracy", "before", "after", "after / before"),
        [
            [str(run.seed), name, str(run.before[name]), str(after), ratio(run.before[name], after)]
            for run in runs
            for name, after in run.after.items()
        ],
    )
    met = markdown(
        ("figure", *(f"seed {run.seed}" for run in runs)),
        [[figure, *("met" if holds(run) else "MISSED" for run in runs)] for figure, holds in FIGURES.items()],
    )
    return "\n\n".join([times, accuracies, met])


def ratio(before: Score, after: Score) -> str:
    return f"{after.mean / before.mean:.2f} ×" if before.mean else "–"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, help="None: what torch chooses, as for a user")
    parser.add_argument("--busy", type=int, default=0, help="other processes that occupy a core each")
    parser.add_argument("--commands", action="store_true", help="time the first commands instead")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: one seed, two steps, hardly any work"
    )
    parser.add_argument(
        "settings", nargs="*", help="section.key=value for every run; none is the default run"
    )
    options = parser.parse_args()
    seeds, settings = options.seeds, options.settings
    if options.quick:
        seeds, settings = seeds[:1], [*QUICK, *settings]
    about = machine(threads=options.threads or os.cpu_count() or 1, torch=version("torch"))
    print(about, flush=True)
    if options.commands:
        print(f"\n{commands()}")
        return
    runs = []
    for seed in seeds:
        with busy(options.busy):
            runs.append(train(seed, settings=settings, threads=options.threads))
        print(f"seed {seed}: {runs[-1].whole:.0f} s", flush=True)
    print(f"\n{report(runs)}")
    if options.json:
        result = {"machine": about, "settings": settings, "runs": [asdict(run) for run in runs]}
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
