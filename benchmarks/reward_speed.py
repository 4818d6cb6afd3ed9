"""How fast a batch of slow rewards is scored: async judges of 200 ms, and Python rewards of 50 ms of CPU.

python benchmarks/reward_speed.py [--workers 16] [--concurrency 128]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from groupwise.records import Example, Group, Rollout
from groupwise.rewards.runner import RewardContext
from groupwise.rewards.score_ahead import score_ahead
from groupwise.tasks import Task, isolated

GROUPS, MEMBERS = 32, 16


async def judge(rollout: Rollout, example: Example) -> float:
    await asyncio.sleep(0.2)
    return 1.0


def code(rollout: Rollout, example: Example) -> float:
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    return 1.0


def rollout() -> Rollout:
    empty: dict[str, Any] = {"tokens": (), "trained": (), "logprobs": (), "entropies": ()}
    return Rollout(prompt="?", text="answer", prompt_length=0, finish="end", **empty)


def measure(function: Any, *, workers: int, concurrency: int) -> float:
    """Return the seconds that a batch takes, after one call that starts the workers."""
    task = Task(name="t", examples=[{"q": 1}], prompt=str, rewards={"reward": function})
    example = Example({"q": 1})
    with isolated(task, workers=workers) as moved:
        for groups, members in ((workers, 4), (GROUPS, MEMBERS)):
            batch = [
                Group(example=example, rollouts=tuple(rollout() for _ in range(members)))
                for _ in range(groups)
            ]
            context = RewardContext()
            started = time.perf_counter()
            score_ahead(batch, rewards=moved.rewards, seconds=30.0, concurrency=concurrency, context=context)
            seconds = time.perf_counter() - started
            assert list(context.ready.values()) == [1.0] * (groups * members)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=128)
    options = parser.parse_args()
    calls = GROUPS * MEMBERS
    seconds = measure(judge, workers=1, concurrency=options.concurrency)
    print(f"{calls} async calls of 200 ms, {options.concurrency} at a time: {seconds:.2f} s")
    seconds = measure(code, workers=options.workers, concurrency=1)
    print(f"{calls} rewards of 50 ms of CPU, {options.workers} workers: {seconds:.2f} s")


if __name__ == "__main__":
    main()
