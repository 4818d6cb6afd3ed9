"""What scoring costs in a training step: seconds of rewards against seconds of everything.

    python benchmarks/scoring_share.py --model FOLDER          # on a GPU: 512 completions a step
    python benchmarks/scoring_share.py --lengths 0 1000 16000  # ms for 512 answers of so many characters
    python benchmarks/scoring_share.py --quick                 # does it run? The figures mean nothing

Each task trains for a few steps on its own generated examples, and the medians of the run's own metrics
`time/reward` and `time/step` are shown, the first two steps left out. An untrained policy hardly ever ends
its answers, and the longer an answer, the more there is to read. A larger model takes longer for its step
and no longer for its rewards, so a small one is the hard case. `math` needs math-verify.

`--lengths` needs no model: 32 groups of 16 answers, of which a third are right and the others are answers to
other examples, after as many characters of text. No answer is seen twice. The examples are the tasks' own, or
those of `--data` for `math`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from machine import machine, markdown

from groupwise.config import read_config
from groupwise.isolation.time_limit import TimeLimits
from groupwise.records import Group, Rollout
from groupwise.rewards.runner import score_within
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


ENDS = {
    "countdown": ("solution", "</think>\n<answer>{}</answer>"),
    "gsm8k": ("answer", "<end_working_out>\n<SOLUTION>{}</SOLUTION>"),
    "math": ("answer", "So the answer is $\\boxed{{{}}}$."),
}
"""Where the answer of an example is found, and how a completion ends with it."""


def answer(text: str, member: int) -> Rollout:
    one = {"trained": (True,), "logprobs": (0.0,), "entropies": (0.0,), "prompt_length": 0}
    return Rollout(prompt="", text=text, tokens=(0,), finish="end", member=member, **one)  # type: ignore[arg-type]


def scoring_ms(name: str, length: int, *, data: Path | None, trial: int) -> float:
    """Return the milliseconds that the rewards of 32 groups of 16 fresh answers take."""
    task, rng = TASKS[name](), random.Random(f"{name} {length} {trial}")
    overrides = [f"task.name={name}", *([f"task.data={data}"] if data and name == "math" else [])]
    source = task.split(read_config(overrides=overrides).task, trial).train
    first = 600 * trial
    at = range(first, first + 600)
    rows = [
        source[i % len(source)] if isinstance(source, Sequence) else source.train(i, seed=trial) for i in at
    ]
    column, end = ENDS[name]
    groups = []
    for number, example in enumerate(rows[:32]):
        given = [example if member % 3 == 0 else rows[32 + 16 * number + member] for member in range(16)]
        words = [" ".join(str(rng.randrange(1000)) for _ in range(length // 4 + 1))[:length] for _ in given]
        texts = [text + end.format(one[column]) for text, one in zip(words, given, strict=True)]
        groups.append(Group(example=example, rollouts=tuple(answer(text, i) for i, text in enumerate(texts))))
    began = time.perf_counter()
    with TimeLimits(60.0) as limit:
        for group in groups:
            score_within(limit, group, rewards=task.rewards, weights=task.weights)
    return 1e3 * (time.perf_counter() - began)


def by_length(options: argparse.Namespace) -> None:
    for name in ENDS:  # imports and tables
        scoring_ms(name, 0, data=options.data, trial=99)
    rows = [
        [
            name,
            *(
                f"{statistics.median(scoring_ms(name, n, data=options.data, trial=t) for t in range(5)):.1f}"
                for n in options.lengths
            ),
        ]
        for name in ENDS
    ]
    print(markdown(("ms for 512 answers", *(f"{n} characters" for n in options.lengths)), rows))


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
    parser.add_argument("--lengths", nargs="+", type=int, help="time the rewards alone, at these lengths")
    parser.add_argument("--data", type=Path, help="rows for `math` with --lengths")
    options = parser.parse_args()
    if options.lengths:
        by_length(options)
        return
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
