"""Compare losses, or ranks and learning rates of LoRA, on the built-in model at equal tokens, with intervals.

python benchmarks/algorithms.py out --parallel 16                # every algorithm, 5 seeds, on CPU cores
python benchmarks/algorithms.py out --compare adapters           # ranks and learning rates instead
python benchmarks/algorithms.py out --parallel 4 --device cuda
python benchmarks/algorithms.py out --table                      # the table of what is there

Each run samples `--tokens` tokens in training, then answers the held-out puzzles. The seed decides the
puzzles that are trained on and the noise; the held-out puzzles are always the same. Runs that are there are
not made again, and one that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ALGORITHMS: dict[str, dict[str, Any]] = {
    "dapo": {"algo.loss": "dapo"},
    "dr_grpo": {"algo.loss": "dr_grpo", "algo.advantage": "dr_grpo"},
    "gspo": {"algo.loss": "gspo", "algo.clip_low": 3e-4, "algo.clip_high": 4e-4},
    "cispo": {"algo.loss": "cispo", "algo.clip_high": 4.0},
    "maxrl": {"algo.loss": "dapo", "algo.advantage": "maxrl"},
    "dppo_tv": {"algo.loss": "dppo_tv"},
    "dppo_kl": {"algo.loss": "dppo_kl"},
    "sapo": {"algo.loss": "sapo"},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    f"r{rank}-{rate:.0e}": {"lora.r": rank, "lora.alpha": 2 * rank, "optim.learning_rate": rate}
    for rank in (4, 16, 64)
    for rate in (1e-5, 5e-5, 2e-4, 1e-3)
}
COMPARED = {"losses": ALGORITHMS, "adapters": ADAPTERS}
BASES = {"losses": "dapo", "adapters": "r16-5e-05"}
"""What the others are compared with, seed by seed."""


def main() -> None:
    options = parsed()
    variants = COMPARED[options.compare]
    names = options.only.split(",") if options.only else list(variants)
    unknown = sorted(set(names) - set(variants))
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; choose from {', '.join(variants)}")
    if options.these:
        for run in options.these.split(","):
            name, seed = run.split(":")
            one_run(options, name, int(seed))
        return
    if not options.table:
        make_all(options, [(name, seed) for seed in range(options.seeds) for name in names])
    print(table(options.folder, names, base=BASES[options.compare]))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compare", choices=COMPARED, default="losses")
    parser.add_argument("--only", help="some of these, with commas between")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1_500_000, help="tokens sampled in training, per run")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--held-out", type=int, default=512)
    parser.add_argument("--samples", type=int, default=8, help="answers to each held-out puzzle")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--these", help=argparse.SUPPRESS)
    return parser.parse_args()


def result_of(folder: Path, name: str, seed: int) -> dict[str, Any] | None:
    path = folder / f"{name}-{seed}.json"
    result: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    return result


def make_all(options: argparse.Namespace, runs: Sequence[tuple[str, int]]) -> None:
    """Make the runs that are missing. Each process has one thread and makes its share one after the other."""
    left = [run for run in runs if result_of(options.folder, *run) is None]
    options.folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(runs) - len(left)} of {len(runs)} runs are there", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = []
    for number in range(min(options.parallel, len(left))):
        share = ",".join(f"{name}:{seed}" for name, seed in left[number :: options.parallel])
        command = [sys.executable, __file__, *sys.argv[1:], "--these", share]
        with (options.folder / f"process-{number}.log").open("ab") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    for number, process in enumerate(processes):
        if process.wait():
            print(f"a run failed: see {options.folder / f'process-{number}.log'}", flush=True)


def one_run(options: argparse.Namespace, name: str, seed: int) -> None:
    """Train one variant with one seed until its tokens are used up, and measure it."""
    import groupwise as gw
    from groupwise.commands.eval import evaluate_command
    from groupwise.tracking.run_files import read_metrics

    class TokenBudget(gw.Callback):
        """Stops when the run has sampled its tokens, also over several sessions."""

        def on_run_start(self, run: gw.RunControl) -> None:
            rows = read_metrics(run.folder / "metrics.jsonl") if run.step else []
            self.tokens = sum(tokens_of(row) for row in rows)
            self.check(run)

        def after_update(self, run: gw.RunControl, metrics: Any) -> None:
            self.tokens += tokens_of(metrics)
            self.check(run)

        def check(self, run: gw.RunControl) -> None:
            if self.tokens >= options.tokens:
                run.stop(f"{self.tokens} tokens sampled")

    budget = TokenBudget()
    run_folder = options.folder / "runs" / f"{name}-{seed}"
    if (run_folder / "config.yaml").is_file():
        result = gw.train(resume=run_folder, callbacks=[budget])
    else:
        result = gw.train(
            "countdown",
            callbacks=[budget],
            seed=seed,
            batch_size=options.prompts,
            max_steps=100_000,
            output_dir=options.folder / "runs",
            run_name=f"{name}-{seed}",
            skip_evaluation=True,
            no_trackio=True,
            model={"device": options.device},
            track={"report": False, "rollouts_every": 1_000_000},
            **{
                "task.held_out": options.held_out,
                "run.save_every": 20,
                "optim.learning_rate": options.learning_rate,
                **COMPARED[options.compare][name],
            },
        )
    measured = evaluate_command(str(result), samples=options.samples, seed=0)[0]
    metrics = result.metrics
    record = {
        "variant": name,
        "seed": seed,
        "tokens": int(sum(tokens_of(row) for row in metrics.to_dict("records"))),
        "steps": result.steps,
        "greedy": measured["greedy"]["mean"],
        "avg": measured[f"avg@{options.samples}"]["mean"],
        "entropy": float(metrics["policy/entropy"].dropna().iloc[-1]),
        "settings": {key: getattr(options, key) for key in SHOWN},
    }
    (options.folder / f"{name}-{seed}.json").write_text(json.dumps(record, indent=1))


SHOWN = ("tokens", "learning_rate", "prompts", "held_out", "samples", "device")


def tokens_of(metrics: Any) -> int:
    """The tokens that a step sampled."""
    return round(metrics["speed/tokens_per_second"] * metrics["time/step"])


def table(folder: Path, names: Sequence[str], *, base: str) -> str:
    """Return the results as a Markdown table: mean over seeds with a 95 % t interval."""
    found = {
        name: {seed: one for seed in range(1000) if (one := result_of(folder, name, seed))} for name in names
    }
    lines = [
        "| variant | seeds | tokens | steps | held-out greedy, % | held-out avg@k, % | avg@k minus "
        f"{base}, same seeds | last entropy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    of_base = found.get(base, {})
    for name, runs in found.items():
        if not runs:
            continue
        both = sorted(runs.keys() & of_base.keys())
        gains = [runs[seed]["avg"] - of_base[seed]["avg"] for seed in both]
        cells = [
            name,
            str(len(runs)),
            f"{fmean(one['tokens'] for one in runs.values()):,.0f}",
            f"{fmean(one['steps'] for one in runs.values()):.0f}",
            percent([one["greedy"] for one in runs.values()]),
            percent([one["avg"] for one in runs.values()]),
            "" if name == base or not gains else percent(gains, signed=True),
            f"{fmean(one['entropy'] for one in runs.values()):.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    every = [one for runs in found.values() for one in runs.values()]
    conditions = every[0]["settings"] if every else {}
    return "\n".join([*lines, "", ", ".join(f"{key} {value}" for key, value in conditions.items())])


def percent(values: Sequence[float], *, signed: bool = False) -> str:
    """Format a mean over seeds with its interval, in per cent or points."""
    from groupwise.evaluate.intervals import student_quantile

    mean = 100 * fmean(values)
    sign = "+" if signed else ""
    if len(values) < 2:
        return f"{mean:{sign}.1f}"
    half = 100 * student_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return f"{mean:{sign}.1f} [{mean - half:{sign}.1f}, {mean + half:{sign}.1f}]"


if __name__ == "__main__":
    main()
