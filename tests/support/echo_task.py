"""A task that is answered by repeating a number."""

from __future__ import annotations

import groupwise as gw


def echo(rollout: gw.Rollout, example: gw.Example) -> float:
    if rollout.text == "broken":
        raise ValueError("no")
    return float(rollout.text == str(example["n"]))


ECHO_TASK = gw.Task(
    name="echo",
    examples=[{"n": n} for n in range(20)],
    prompt=lambda example: f"Say {example['n']}",
    rewards={"echo": echo, "short": lambda rollout, example: float(len(rollout.text) < 2)},
    weights={"short": 0.5},
)
