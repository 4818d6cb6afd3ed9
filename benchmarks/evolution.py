"""Does a population find a better model than its parts would, for the same number of tokens?

    python benchmarks/evolution.py --jobs 8 --threads 2 --output results   # a quarter of an hour on 16 cores
    python benchmarks/evolution.py --tokens 60000 --seeds 2                # does it run?

The built-in model learns Countdown under adapters of rank 16. Every arm may sample the same number of tokens,
in training and in the evaluations that it selects by, and each is run with several seeds:

- **halving**: `groupwise evolve` as it comes: four members, whose first values are drawn from the usual
  bounds (but for the first, which has the default settings), the worse half dropped at each selection, where
  it is worse beyond doubt in paired evaluations; whoever is left gets the tokens;
- **evolved**: the same first four members in a tournament with elitism, a member replaced only by one that is
  better beyond doubt;
- **random**: the same four members with the same first values, none ever replaced, the best taken at the end;
- **default**: one member with the default settings gets all the tokens.

What counts is accuracy on held-out puzzles that played no part in selection: of samples (avg@k) and greedy.
Intervals are Student's, over seeds; differences are paired by seed. --methods also knows pbt.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from machine import machine, markdown

from groupwise.evaluate.intervals import student_quantile

ARMS = {
    "evolved": ["evolve.method=tournament"],
    "pbt": ["evolve.method=pbt"],
    "halving": ["evolve.method=halving"],
    "random": ["evolve.method=random"],
    "default": ["evolve.method=random", "evolve.population=1"],
}
COMMON = [
    *("run.max_steps=100000", "run.save_every=100000", "track.trackers=[]", "track.report=false"),
    *("rollout.prompts=12", "model.device=cpu", "evolve.population=4", "evolve.every=4"),
    *("evaluate.every=0", "evaluate.during=64", "evaluate.samples=4", "task.held_out=320"),
]


def run_job(arm: str, seed: int, *, tokens: int, folder: Path) -> dict[str, Any]:
    """One search in this process; returns what it reached."""
    from groupwise.config import read_config
    from groupwise.evolution.evolve_run import evolve

    overrides = ["run.kind=evolve", *COMMON, *ARMS[arm], f"run.seed={seed}", f"evolve.tokens={tokens}"]
    overrides += [f"run.output_dir={folder}", f"run.name={arm}-{seed}"]
    started = time.monotonic()
    path = evolve(read_config(overrides=overrides))
    told = json.loads((path / "evolution.json").read_text(encoding="utf-8"))
    before = json.loads((path / "eval" / "before.json").read_text(encoding="utf-8"))
    judged = told["judged"]
    average = next(name for name in judged if name.startswith("eval/avg@") and name[-1].isdigit())
    copied = sum(event["what"] == "copied" for event in told["events"])
    return {
        "arm": arm,
        "seed": seed,
        "average": judged[average],
        "greedy": judged["eval/greedy"],
        "before": before[average],
        "steps": told["steps"],
        "tokens": told["tokens"],
        "copied": copied,
        "best": told["best"],
        "seconds": time.monotonic() - started,
    }


def start_job(arm: str, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The same in a process of its own, with its own number of threads."""
    result = folder / f"{arm}-{seed}.json"
    words = [sys.executable, __file__, "--job", arm, str(seed), str(folder), "--tokens", str(options.tokens)]
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    environment["GOMP_SPINCOUNT"] = (
        "10000"  # as the command sets it: waiting threads leave the cores to others
    )
    with (folder / f"{arm}-{seed}.log").open("w", encoding="utf-8") as log:
        code = subprocess.run(words, env=environment, stdout=log, stderr=log, check=False).returncode
    if code:
        tail = (folder / f"{arm}-{seed}.log").read_text(encoding="utf-8").splitlines()[-3:]
        return {"arm": arm, "seed": seed, "error": " ".join(tail)}
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    print(
        f"{arm} {seed}: avg {100 * found['average']:.1f} %, greedy {100 * found['greedy']:.1f} %, "
        f"{found['steps']} steps, {found['tokens']:,} tokens, {found['seconds']:.0f} s",
        flush=True,
    )
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half width of Student's interval; of one value, no width."""
    if len(values) < 2:
        return fmean(values), math.nan
    return fmean(values), student_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def points(values: list[float], *, sign: bool = False) -> str:
    mean, half = interval([100 * value for value in values])
    return f"{mean:+.1f} ± {half:.1f}" if sign else f"{mean:.1f} ± {half:.1f}"


def table(found: list[dict[str, Any]], methods: list[str]) -> str:
    rows = []
    for arm in methods:
        own = [row for row in found if row["arm"] == arm]
        if own:
            rows.append(
                [
                    arm,
                    str(len(own)),
                    *(points([row[what] for row in own]) for what in WHAT),
                    f"{fmean(row['steps'] for row in own):.0f}",
                    f"{fmean(row['copied'] for row in own):.1f}",
                    f"{fmean(row['tokens'] for row in own):,.0f}",
                    f"{fmean(row['seconds'] for row in own):.0f}",
                ]
            )
    return markdown(["Arm", "seeds", "avg %", "greedy %", "steps", "copied", "tokens", "s"], rows)


def differences(found: list[dict[str, Any]], methods: list[str]) -> str:
    """Each way of selecting against each that does not select, paired by seed."""
    by = {(row["arm"], row["seed"]): row for row in found}
    rows = []
    for arm in methods:
        for other in methods:
            seeds = [seed for a, seed in by if a == arm and (other, seed) in by]
            if arm in UNSELECTED or other not in UNSELECTED or not seeds:
                continue
            gains = [
                points([by[arm, s][what] - by[other, s][what] for s in seeds], sign=True) for what in WHAT
            ]
            rows.append([f"{arm} − {other}", str(len(seeds)), *gains])
    return markdown(["Difference, points", "seeds", "avg", "greedy"], rows) if rows else ""


UNSELECTED = ("random", "default")
WHAT = ("average", "greedy")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--methods", nargs="+", choices=ARMS, default=["evolved", "halving", "random", "default"]
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1_200_000, help="that each arm may sample")
    parser.add_argument("--jobs", type=int, default=1, help="searches at once")
    parser.add_argument("--threads", type=int, default=2, help="of each")
    parser.add_argument(
        "--output", type=Path, help="a folder for evolution.json and the searches' own folders"
    )
    parser.add_argument("--job", nargs=3, metavar=("ARM", "SEED", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        arm, seed, name = options.job
        result = run_job(arm, int(seed), tokens=options.tokens, folder=Path(name))
        (Path(name) / f"{arm}-{seed}.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
        return
    from importlib.metadata import version

    about = machine(threads=options.threads, torch=version("torch"))
    print(f"{about} · {options.jobs} searches at once · {options.tokens:,} tokens each", flush=True)
    wanted = [(arm, seed) for seed in range(options.seeds) for arm in options.methods]
    with tempfile.TemporaryDirectory() as name:
        folder = (options.output or Path(name)) / "searches"
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            found = list(pool.map(lambda job: start_job(*job, options, folder), wanted))
    failed = [row for row in found if "error" in row]
    for row in failed:
        print(f"{row['arm']} {row['seed']} failed: {row['error']}")
    found = [row for row in found if "error" not in row]
    print("\n" + table(found, options.methods) + "\n\n" + differences(found, options.methods) + "\n")
    if options.output:
        result = {"machine": about, "tokens": options.tokens, "jobs": found, "failed": failed}
        (options.output / "evolution.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
