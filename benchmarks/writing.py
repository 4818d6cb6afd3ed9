"""What it costs a training step that every rollout is written down: steps with and without, in turn.

    python benchmarks/writing.py --model FOLDER       # on a GPU: 512 completions a step
    python benchmarks/writing.py --quick              # does it run? The figures mean nothing

The same settings and seed train several times, by turns with every rollout written (as a run does by itself)
and with none. Writing happens mostly on a thread of its own, so what counts is the wall clock from one step
to the next. The first steps compile kernels and are left out; of the others the median is taken, and the
fastest of the runs of each kind. `watching.py` counts the processor time of writing on a CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import machine, markdown

from groupwise.config import read_config
from groupwise.training import step_metrics, train

UNCOUNTED = 3
"""Steps at the beginning."""
NEVER = 100_000


def seconds_a_step(options: argparse.Namespace, folder: Path, *, every: int) -> float:
    """Train for a few steps that write every so many; return the median time from one to the next."""
    moments: list[float] = []
    measure = step_metrics.signs
    step_metrics.signs = marking(measure, moments)
    try:
        train(
            read_config(
                overrides=[
                    f"model.name={options.model}",
                    f"task.name={options.task}",
                    f"rollout.prompts={options.prompts}",
                    f"rollout.group_size={options.group_size}",
                    f"rollout.max_tokens={options.max_tokens}",
                    "rollout.refill=0",
                    "optim.learning_rate=1e-7",
                    "evaluate.skip=true",
                    f"run.max_steps={UNCOUNTED + options.steps}",
                    f"run.save_every={NEVER}",
                    f"run.output_dir={folder}",
                    f"run.name=run-{len(list(folder.iterdir()))}",
                    "track.trackers=[]",
                    "track.report=false",
                    f"track.rollouts_every={every}",
                ]
            )
        )
    finally:
        step_metrics.signs = measure
    return median(after - before for before, after in pairwise(moments[UNCOUNTED - 1 :]))


def marking(measure: Callable[..., Any], moments: list[float]) -> Callable[..., Any]:
    """`measure`, called once a step at the same place in it, with the time of each call kept."""

    def marked(*values: Any, **named: Any) -> Any:
        moments.append(time.perf_counter())
        return measure(*values, **named)

    return marked


def main() -> None:
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="a name or a folder")
    parser.add_argument("--task", default="gsm8k")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.group_size, options.max_tokens = 2, 4, 16
        options.steps, options.turns = 2, 1
    about = machine(threads=torch.get_num_threads(), torch=torch.__version__)
    about = f"{torch.cuda.get_device_name()} · {about}" if torch.cuda.is_available() else about
    times: dict[int, list[float]] = {1: [], NEVER: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.turns):
            for every, taken in times.items():
                taken.append(seconds_a_step(options, Path(folder), every=every))
    written, unwritten = min(times[1]), min(times[NEVER])
    rows = [
        [name, f"{min(taken):.4f}", " ".join(f"{one:.4f}" for one in taken)]
        for name, taken in (("every rollout written", times[1]), ("none", times[NEVER]))
    ]
    print(f"\n{about}\n{options.model}, {options.prompts} × {options.group_size} completions\n")
    print(markdown(("", "s a step", "each run"), rows))
    print(f"\nwriting: {100 * (written / unwritten - 1):+.2f} % of a step")
    if options.json:
        result = {"machine": about, "written": times[1], "unwritten": times[NEVER]}
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
