"""Unit tests in the sandbox: 512 answers of 50 ms CPU time each, scored as a training step scores them.

python benchmarks/code_rewards.py                 # as many processes at a time as there are cores
python benchmarks/code_rewards.py --workers 8 --answers 128 --milliseconds 0    # the cost of a run itself
"""

from __future__ import annotations

import argparse
import os
import time

from groupwise.isolation.sandbox import Sandbox
from groupwise.isolation.time_limit import TimeLimits
from groupwise.records import Example, Group, Rollout
from groupwise.rewards import text_rewards
from groupwise.rewards.runner import RewardContext, score_within
from groupwise.rewards.score_ahead import score_ahead

ANSWER = """```python
import time


def add(a, b):
    if a == {number}:
        until = time.process_time() + {seconds}
        while time.process_time() < until:
            pass
    return a + b
```"""
GROUP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--answers", type=int, default=512)
    parser.add_argument("--milliseconds", type=float, default=50.0, help="CPU time of each answer")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    text_rewards.sandbox.close()
    text_rewards.sandbox = Sandbox(workers=options.workers)
    began = time.monotonic()
    score([group(-1, 0.0)], options.workers)
    missing = ", ".join(text_rewards.sandbox.missing) or "nothing"
    print(f"start {time.monotonic() - began:.2f} s; not cut off from {missing}")
    groups = [group(number, options.milliseconds / 1000) for number in range(options.answers // GROUP)]
    began = time.monotonic()
    scored = score(groups, options.workers)
    took = time.monotonic() - began
    assert all(rollout.reward == 1.0 for one in scored for rollout in one.rollouts)
    count = GROUP * len(groups)
    busy = count * options.milliseconds / 1000 / options.workers
    print(f"{count} answers of {options.milliseconds:g} ms, {options.workers} at a time: {took:.2f} s")
    besides = 1000 * (took - busy) * options.workers / count
    print(f"the answers alone: {busy:.2f} s; besides {besides:.1f} ms each")


def group(number: int, seconds: float) -> Group:
    """Return a group of different answers: equal ones would be tested once."""
    example = Example(
        {"tests": [f"assert add({member}, {number}) == {member + number}" for member in range(GROUP)]}
    )
    texts = [ANSWER.format(number=member, seconds=seconds) for member in range(GROUP)]
    return Group(example=example, rollouts=tuple(map(answered, texts)))


def answered(text: str) -> Rollout:
    parts = {"prompt": "", "tokens": (0,), "trained": (True,), "logprobs": (0.0,), "entropies": (0.0,)}
    return Rollout(text=text, prompt_length=0, finish="end", **parts)  # type: ignore[arg-type]


def score(groups: list[Group], workers: int) -> list[Group]:
    rewards, context = {"tests": text_rewards.unit_tests()}, RewardContext()
    score_ahead(groups, rewards=rewards, seconds=60.0, concurrency=max(64, workers), context=context)
    with TimeLimits(60.0) as limit:
        return [score_within(limit, one, rewards=rewards, weights={}, context=context) for one in groups]


if __name__ == "__main__":
    main()
