"""What scoring costs in a training step: seconds of rewards against seconds of everything.

    python benchmarks/scoring_share.py --model FOLDER          # on a GPU: 512 completions a step
    python benchmarks/scoring_share.py --quick                 # does it run? The figures mean nothing

Each task trains for a few steps on its own generated examples, and the medians of the run's own metrics
`time/reward` and `time/step` are shown, the first two steps left out. An untrained policy hardly ever ends
its answers, and the longer an answer, the more there is to read. A larger model takes longer for its step
and no longer for its rewards, so a small one is the hard case. `math` needs math-verify.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from machine import machine, markdown

from groupwise.config import read_config
from groupwise.tasks import TASKS
from groupwise.training import train

UNCOUNTED = 2
"""Steps at the beginning: kernels are compiled, memory is taken."""


def steps_of(task: str, options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Train for a few steps and return their metrics."""
    config = read_config(
        overrides=[
            f"model.name={options.model}",
            f"task.name={task}",
            f"rollout.prompts={options.prompts}",
            f"rollout.group_size={options.group_size}",
            f"rollout.max_tokens={options.max_tokens}",
            "rollout.refill=0",
            "optim.learning_rate=1e-7",
            "evaluate.skip=true",
            f"run.max_steps={UNCOUNTED + options.steps}",
            f"run.output_dir={folder}",
            f"run.name={task}",
            "run.save_every=1000",
            "track.trackers=[]",
            "track.rollouts_every=1000",
        ]
    )
    lines = (train(config) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[UNCOUNTED:]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="a name or a folder")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["countdown", "gsm8k"])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.group_size, options.max_tokens, options.steps = 2, 4, 16, 2
    about = machine(threads=torch.get_num_threads(), torch=torch.__version__)
    about = f"{torch.cuda.get_device_name()} · {about}" if torch.cuda.is_available() else about
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for task in options.tasks:
            steps = steps_of(task, options, Path(folder))
            names = ("time/reward", "time/rollout", "time/update", "time/step", "rollout/length")
            found[task] = {name: statistics.median(step[name] for step in steps) for name in names}
    print(f"\n{about}\n{options.model}, {options.prompts} × {options.group_size} completions\n")
    rows = [
        [
            task,
            f"{1e3 * one['time/reward']:.1f}",
            f"{one['time/step']:.2f}",
            f"{100 * one['time/reward'] / one['time/step']:.2f} %",
            f"{one['rollout/length']:.0f}",
        ]
        for task, one in found.items()
    ]
    print(markdown(("task", "scoring, ms", "step, s", "share", "tokens an answer"), rows))
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "tasks": found}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
