"""How often the 95 % intervals of `groupwise eval` cover the truth, by simulation.

    python benchmarks/coverage.py            # the table of docs/evaluation.md, about 20 seconds

Prompts are drawn from a population with a known mean, scored as `eval` scores them, and the interval is
asked whether it covers that mean. Deterministic.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from groupwise.evaluate.intervals import exact_interval, mean_interval, paired_difference

TRIALS = 4000
ACCURACIES = 4999
"""Into how many parts the accuracies between 0 and 1 are divided."""
PROMPTS = (8, 16, 32, 128)
Draw = Callable[[random.Random], float]
"""One prompt's score, or its change."""


def sampled(a: float, b: float, *, samples: int = 8) -> Draw:
    """avg@k of a prompt whose difficulty is drawn from Beta(a, b): its mean is a / (a + b)."""

    def draw(noise: random.Random) -> float:
        difficulty = noise.betavariate(a, b)
        return sum(noise.random() < difficulty for _ in range(samples)) / samples

    return draw


def changed(improved: float, worsened: float) -> Draw:
    """The change of a greedy answer."""

    def draw(noise: random.Random) -> float:
        lot = noise.random()
        return 1.0 if lot < improved else -1.0 if lot < improved + worsened else 0.0

    return draw


def resampled(a: float, b: float) -> Draw:
    """The change of avg@8 where training changed nothing."""

    def draw(noise: random.Random) -> float:
        difficulty = noise.betavariate(a, b)
        before, after = (sum(noise.random() < difficulty for _ in range(8)) / 8 for _ in range(2))
        return after - before

    return draw


def covers_mean(scores: list[float], truth: float) -> bool:
    interval = mean_interval(scores)
    return interval.low <= truth <= interval.high


def covers_change(changes: list[float], truth: float) -> bool:
    difference = paired_difference([0.0] * len(changes), changes)
    return difference.low <= truth <= difference.high


def lowest_coverage(prompts: int) -> float:
    """The exact coverage of greedy's interval at the accuracy where it is lowest."""
    intervals = [exact_interval(right, prompts) for right in range(prompts + 1)]
    return min(
        math.fsum(
            math.comb(prompts, right) * accuracy**right * (1 - accuracy) ** (prompts - right)
            for right, interval in enumerate(intervals)
            if interval.low <= accuracy <= interval.high
        )
        for accuracy in (step / ACCURACIES for step in range(1, ACCURACIES))
    )


CASES: tuple[tuple[str, Draw, float, Callable[[list[float], float], bool]], ...] = (
    ("avg@8, all difficulties equally common", sampled(1, 1), 0.5, covers_mean),
    ("avg@8, prompts mostly always or never right", sampled(0.5, 0.5), 0.5, covers_mean),
    ("avg@8, mean 20 %, a few easy prompts", sampled(0.2, 0.8), 0.2, covers_mean),
    ("avg@8, mean 10 %, very few easy prompts", sampled(0.1, 0.9), 0.1, covers_mean),
    ("avg@8, mean 10 %, all hard", sampled(1, 9), 0.1, covers_mean),
    ("avg@2, all difficulties equally common", sampled(1, 1, samples=2), 0.5, covers_mean),
    ("change of greedy, 10 % improve", changed(0.1, 0.0), 0.1, covers_change),
    ("change of greedy, 90 % improve", changed(0.9, 0.0), 0.9, covers_change),
    ("change of greedy, 20 % improve, 5 % worsen", changed(0.2, 0.05), 0.15, covers_change),
    ("change of greedy, 50 % improve, 10 % worsen", changed(0.5, 0.1), 0.4, covers_change),
    ("change of avg@8, no true change", resampled(1, 1), 0.0, covers_change),
    ("change of avg@8, no true change, hard prompts", resampled(0.1, 0.9), 0.0, covers_change),
)


def main() -> None:
    print("| coverage of a 95 % interval |" + "".join(f" {prompts} prompts |" for prompts in PROMPTS))
    print("|---|" + "---|" * len(PROMPTS))
    cells = [lowest_coverage(prompts) for prompts in PROMPTS]
    print("| greedy, the worst of all accuracies |" + "".join(f" {100 * cell:.1f} % |" for cell in cells))
    for name, draw, truth, covers in CASES:
        cells = []
        for prompts in PROMPTS:
            noise = random.Random(prompts)
            hits = sum(covers([draw(noise) for _ in range(prompts)], truth) for _ in range(TRIALS))
            cells.append(hits / TRIALS)
        print(f"| {name} |" + "".join(f" {100 * cell:.1f} % |" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
