"""What silent failures look like in the metrics: arrays over steps in, "holds here" and its words out.

A rule returns where it holds and a function that says, for one of those places, what was seen there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from groupwise.report.history import Measured, Row

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Verdict = tuple[Flags, Callable[[int], str]]

WINDOW = 8
"""Steps over which a metric is averaged before a rule looks at it."""


class Course:
    """The metrics as arrays over steps, NaN where a step lacks one."""

    def __init__(self, rows: Sequence[Row], measured: Sequence[Measured] = ()) -> None:
        self.steps = np.array([row["step"] for row in rows], dtype=np.int64)
        self.rows = rows
        self.measured = measured

    def __len__(self) -> int:
        return len(self.steps)

    def names(self) -> set[str]:
        return {name for row in self.rows for name in row}

    def of(self, name: str) -> Floats:
        values = [row.get(name) for row in self.rows]
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

    def recent(self, name: str) -> Floats:
        """The mean of the last WINDOW steps at each step, of those that have the metric."""
        values = self.of(name)
        known = np.isfinite(values)
        sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
        counts = np.concatenate([[0], np.cumsum(known)])
        ends = np.arange(1, len(values) + 1)
        starts = np.maximum(ends - WINDOW, 0)
        number = counts[ends] - counts[starts]
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(number > 0, (sums[ends] - sums[starts]) / number, np.nan)

    def begin(self, name: str) -> float:
        """The mean of the first WINDOW steps: what later ones are compared with."""
        values = self.of(name)[:WINDOW]
        known = values[np.isfinite(values)]
        return float(known.mean()) if len(known) else float("nan")

    def settled(self) -> Flags:
        """Where there are enough steps to compare with the beginning."""
        return np.arange(len(self)) >= 2 * WINDOW - 1

    def accuracy(self) -> Floats:
        """Held-out accuracy (sampled, else greedy) as last measured at each step; NaN before the first."""
        found = np.full(len(self), np.nan)
        for one in self.measured:
            name = next((name for name in one.scores if name.startswith("avg@")), "greedy")
            if name in one.scores:
                found[self.steps >= one.step] = one.scores[name][0]
        return found


def percent(value: Any) -> str:
    return f"{100 * float(value):.0f} %"


def no_signal(course: Course) -> Verdict:
    share, reward = course.recent("advantage/zero_variance"), course.recent("reward/mean")
    return (
        share > 0.6,
        lambda i: (
            f"{percent(share[i])} of the groups got one and the same reward for every answer, at a mean "
            f"reward of {reward[i]:.3g}: they teach nothing."
        ),
    )


def length_drift(course: Course) -> Verdict:
    length, begin = course.recent("rollout/length"), course.begin("rollout/length")
    reward, reward_begin = course.recent("reward/mean"), course.begin("reward/mean")
    moved = (length > 2 * begin) | (length < 0.5 * begin)
    # Longer answers that earn more are what learning to reason looks like.
    margin = 0.1 * max(abs(reward_begin), 0.1)
    return (
        course.settled() & moved & ~(reward > reward_begin + margin),
        lambda i: (
            f"Answers went from {begin:.0f} to {length[i]:.0f} tokens while the reward went from "
            f"{reward_begin:.3g} to {reward[i]:.3g}."
        ),
    )


def cut_off(course: Course) -> Verdict:
    share = course.recent("rollout/truncated")
    return share > 0.3, lambda i: f"{percent(share[i])} of the answers ran out of tokens before they ended."


def format_only(course: Course) -> Verdict:
    """One reward is earned in full and another hardly at all, for long and without progress."""
    parts = sorted(
        n for n in course.names() if n.startswith("reward/") and n.count("/") == 2 and n.endswith("/mean")
    )
    recent = {part: course.recent(part) for part in parts}
    best = {part: float(np.nanmax(course.of(part), initial=0.0)) for part in parts}
    holds = np.zeros(len(course), dtype=bool)
    pairs: dict[int, tuple[str, str]] = {}
    for earned in parts:
        for missed in parts:
            if earned == missed or best[earned] <= 0:
                continue
            full = (recent[earned] >= 0.85 * best[earned]) & (recent[earned] >= 0.3)
            idle = (recent[missed] <= 0.05) & (recent[missed] <= course.begin(missed) + 0.02)
            here = course.settled() & full & idle
            holds |= here
            pairs.update(dict.fromkeys(map(int, np.flatnonzero(here)), (earned, missed)))

    def describe(i: int) -> str:
        earned, missed = pairs[i]
        return (
            f"The reward “{part_name(earned)}” is at {recent[earned][i]:.3g} and “{part_name(missed)}” at "
            f"{recent[missed][i]:.3g}, where it began at {course.begin(missed):.3g}: the policy takes what "
            "is easy."
        )

    return holds, describe


def part_name(metric: str) -> str:
    return metric.removeprefix("reward/").removesuffix("/mean")


def reward_hack(course: Course) -> Verdict:
    """The training reward rises while held-out accuracy does not."""
    reward, begin = course.recent("reward/mean"), course.begin("reward/mean")
    accuracy = course.accuracy()
    first = next((one for one in course.measured), None)
    before = float("nan") if first is None else Course([{"step": first.step}], [first]).accuracy()[0]
    measured_since = np.array([any(0 < one.step <= step for one in course.measured) for step in course.steps])
    risen = reward > begin + max(0.15 * abs(begin), 0.1)
    return (
        course.settled() & measured_since & risen & (accuracy < before - 0.02),
        lambda i: (
            f"The training reward rose from {begin:.3g} to {reward[i]:.3g} while held-out accuracy fell from "
            f"{percent(before)} to {percent(accuracy[i])}."
        ),
    )


FELL = 0.05
"""A held-out score that fell by less is not worth an alarm, however certain."""


def held_out_fell(course: Course) -> Verdict:
    """A held-out score is worse than before training, prompt by prompt, beyond its 95 % interval."""
    holds = np.zeros(len(course), dtype=bool)
    worst: dict[int, tuple[str, float, float, float]] = {}
    for one in course.measured:
        fallen = [
            (change[0], name)
            for name, change in one.changes.items()
            if change[2] < 0 and change[0] <= -FELL and name.startswith(("greedy", "avg@", "pass@"))
        ]
        since = course.steps >= one.step
        holds[since] = bool(fallen)
        if fallen:
            _, name = min(fallen)
            worst.update(dict.fromkeys(map(int, np.flatnonzero(since)), (name, *one.changes[name])))

    def describe(i: int) -> str:
        name, mean, low, high = worst[i]
        return (
            f"{name} fell by {-100 * mean:.1f} points [{100 * low:+.1f}, {100 * high:+.1f}] since before "
            "training, on the same held-out prompts."
        )

    return holds, describe


def repeated(course: Course) -> Verdict:
    share, begin = course.recent("rollout/repeated"), course.begin("rollout/repeated")
    return (
        course.settled() & (share > 0.5) & (share > begin + 0.25),
        lambda i: (
            f"{percent(share[i])} of the answers repeat another answer of their group word for word; at the "
            f"beginning it was {percent(begin)}."
        ),
    )


def same_answer(course: Course) -> Verdict:
    share, begin = course.recent("rollout/same_answer"), course.begin("rollout/same_answer")
    length = course.recent("rollout/length")
    risen = course.settled() & (share > 0.3) & (share > begin + 0.25)
    return risen | (
        (share > 0.9) & (length >= 8)
    ), lambda i: f"{percent(share[i])} of the answers were given, word for word, to other prompts too."


def collapse(course: Course) -> Verdict:
    entropy, begin = course.recent("policy/entropy"), course.begin("policy/entropy")
    silent, silent_begin = course.recent("advantage/zero_variance"), course.begin("advantage/zero_variance")
    alike = (course.recent("rollout/repeated") > 0.5) | (silent > max(0.4, silent_begin + 0.2))
    return (
        course.settled() & (entropy < 0.25 * begin) & alike,
        lambda i: (
            f"Entropy fell from {begin:.3g} to {entropy[i]:.3g} nats a token, and {percent(silent[i])} of "
            "the groups have no variety left to learn from."
        ),
    )


def looping(course: Course) -> Verdict:
    share = course.recent("rollout/looping")
    return (
        share > 0.05,
        lambda i: f"{percent(share[i])} of the answers end in a loop that only the limit stops.",
    )


def mask_faults(course: Course) -> Verdict:
    share = course.of("rollout/mask_faults")
    return (
        share > 0,
        lambda i: (
            f"In {max(100 * share[i], 0.1):.1f} % of the answers the mask contradicts what was sampled: "
            "tokens of the prompt or of a tool are trained, or sampled ones are not."
        ),
    )


def sampler_gap(course: Course) -> Verdict:
    gap, begin = course.recent("policy/gap"), course.begin("policy/gap")
    # Rounding to bfloat16 alone makes a gap of a few hundredths; what grows is something else.
    grown = course.settled() & (gap > 3 * begin) & (gap > 0.01)
    return (
        (gap > 0.04) | grown,
        lambda i: (
            f"Sampler and trainer disagree by {gap[i]:.3g} nats a token; at the beginning it was {begin:.3g}."
        ),
    )


def policy_drift(course: Course) -> Verdict:
    kl = course.recent("policy/kl")
    return kl > 1.0, lambda i: f"The policy is {kl[i]:.3g} nats a token away from the reference."


def failures(course: Course) -> Verdict:
    share = course.recent("rollout/failed")
    return (
        share > 0.05,
        lambda i: f"{percent(share[i])} of the rollouts could not be scored and were left out.",
    )
