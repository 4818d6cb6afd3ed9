"""What it costs to call a user's rewards in a worker process: the same rewards there and in the trainer.

    python benchmarks/worker_cost.py                           # 128 completions of 512 tokens
    python benchmarks/worker_cost.py --prompts 32 --group-size 16 --tokens 2048 --step-seconds 30

A cheap reward in each style scores the groups of one step, over and over: the difference is what sending
costs, whatever the reward does. It is shown as a share of a step of `--step-seconds`; the defaults are the
batch and the time of a step with Qwen2.5-1.5B's shape and LoRA on an H200 (docs/benchmarks.md).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from machine import machine, markdown

from groupwise.isolation.time_limit import TimeLimits
from groupwise.records import Example, Group, Rollout
from groupwise.rewards.runner import score_within
from groupwise.tasks import Task, isolated


def each(rollout: Rollout, example: Example) -> float:
    return float(str(example["answer"]) in rollout.text)


def together(completions: list[Any], answer: list[Any], **columns: Any) -> list[float]:
    return [float(str(a) in c[0]["content"]) for c, a in zip(completions, answer, strict=True)]


def step_of(options: argparse.Namespace) -> list[Group]:
    """Return groups as a step has them: distinct numbers, so that nothing is sent once for many."""
    prompt, tokens = 100, options.tokens
    messages = [{"role": "user", "content": "How many apples are left in the basket? " * 8}]

    def rollout(group: int, member: int) -> Rollout:
        noise = tuple(-((group * 31 + member * 17 + n) % 1009) / 1009 for n in range(tokens))
        return Rollout(
            prompt=messages,
            text=f"{member} apples are left " * (tokens // 5),
            tokens=tuple(range(prompt + tokens)),
            trained=(False,) * prompt + (True,) * tokens,
            logprobs=(0.0,) * prompt + noise,
            entropies=(0.0,) * prompt + noise[::-1],
            prompt_length=prompt,
            finish="end",
            member=member,
        )

    return [
        Group(
            example=Example({"question": "apples", "answer": str(group)}),
            rollouts=tuple(rollout(group, member) for member in range(options.group_size)),
        )
        for group in range(options.prompts)
    ]


def seconds_of(task: Task, groups: list[Group], repeats: int) -> float:
    """Return the median time to score all groups; the first time, in which a worker starts, is left out."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        with TimeLimits(5.0) as limit:
            for group in groups:
                score_within(limit, group, rewards=task.rewards, weights=task.weights)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--step-seconds", type=float, default=2.76, help="what a step takes")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.repeats = 2, 1
    groups = step_of(options)
    found: dict[str, dict[str, float]] = {}
    for name, reward in (("one rollout a call", each), ("TRL style", together)):
        task = Task(name="cost", examples=[{"n": 1}], prompt=lambda row: "q", rewards={"it": reward})
        here = seconds_of(task, groups, options.repeats)
        with isolated(task) as moved:
            found[name] = {"here": here, "worker": seconds_of(moved, groups, options.repeats)}
    about = machine(threads=torch.get_num_threads(), torch=torch.__version__)
    print(f"\n{about}\n{options.prompts} × {options.group_size} completions of {options.tokens} tokens\n")
    rows = [
        [
            name,
            f"{1e3 * one['here']:.1f}",
            f"{1e3 * one['worker']:.1f}",
            f"{100 * (one['worker'] - one['here']) / options.step_seconds:.2f} %",
        ]
        for name, one in found.items()
    ]
    share = f"of a step of {options.step_seconds:g} s"
    print(markdown(("reward", "in the trainer, ms", "in a worker, ms", share), rows))
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "rewards": found}, indent=1))


if __name__ == "__main__":
    main()
