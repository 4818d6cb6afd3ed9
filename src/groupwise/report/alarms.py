"""What silent failures look like in the metrics: arrays over steps in, "holds here" and its words out.

A rule returns where it holds and a function that says, for one of those places, what was seen there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from groupwise.report.history import Row, StoredEvaluation

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Verdict = tuple[Flags, Callable[[int], str]]

WINDOW = 8
"""Steps over which a metric is averaged before a rule looks at it."""


class MetricSeries:
    """The metrics as arrays over steps, NaN where a step lacks one."""

    def __init__(self, rows: Sequence[Row], measured: Sequence[StoredEvaluation] = ()) -> None:
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


def no_signal(course: MetricSeries) -> Verdict:
    share, reward = course.recent("advantage/zero_variance"), course.recent("reward/mean")
    return (
        share > 0.6,
        lambda i: (
            f"{percent(share[i])} of the groups got one and the same reward for every answer, at a mean "
            f"reward of {reward[i]:.3g}: they teach nothing."
        ),
    )


def length_drift(course: MetricSeries) -> Verdict:
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


def cut_off(course: MetricSeries) -> Verdict:
    share = course.recent("rollout/truncated")
    return share > 0.3, lambda i: f"{percent(share[i])} of the answers ran out of tokens before they ended."


def format_only(course: MetricSeries) -> Verdict:
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


def reward_hack(course: MetricSeries) -> Verdict:
    """The training reward rises while held-out accuracy does not."""
    reward, begin = course.recent("reward/mean"), course.begin("reward/mean")
    accuracy = course.accuracy()
    first = next((one for one in course.measured), None)
    before = float("nan") if first is None else MetricSeries([{"step": first.step}], [first]).accuracy()[0]
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


def held_out_fell(course: MetricSeries) -> Verdict:
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


def repeated(course: MetricSeries) -> Verdict:
    share, begin = course.recent("rollout/repeated"), course.begin("rollout/repeated")
    return (
        course.settled() & (share > 0.5) & (share > begin + 0.25),
        lambda i: (
            f"{percent(share[i])} of the answers repeat another answer of their group word for word; at the "
            f"beginning it was {percent(begin)}."
        ),
    )


def same_answer(course: MetricSeries) -> Verdict:
    share, begin = course.recent("rollout/same_answer"), course.begin("rollout/same_answer")
    length = course.recent("rollout/length")
    risen = course.settled() & (share > 0.3) & (share > begin + 0.25)
    return risen | (
        (share > 0.9) & (length >= 8)
    ), lambda i: f"{percent(share[i])} of the answers were given, word for word, to other prompts too."


def collapse(course: MetricSeries) -> Verdict:
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


def looping(course: MetricSeries) -> Verdict:
    share = course.recent("rollout/looping")
    return (
        share > 0.05,
        lambda i: f"{percent(share[i])} of the answers end in a loop that only the limit stops.",
    )


def mask_faults(course: MetricSeries) -> Verdict:
    share = course.of("rollout/mask_faults")
    return (
        share > 0,
        lambda i: (
            f"In {max(100 * share[i], 0.1):.1f} % of the answers the mask contradicts what was sampled: "
            "tokens of the prompt or of a tool are trained, or sampled ones are not."
        ),
    )


def sampler_gap(course: MetricSeries) -> Verdict:
    gap, begin = course.recent("policy/gap"), course.begin("policy/gap")
    # Rounding to bfloat16 alone makes a gap of a few hundredths; what grows is something else.
    grown = course.settled() & (gap > 3 * begin) & (gap > 0.01)
    return (
        (gap > 0.04) | grown,
        lambda i: (
            f"Sampler and trainer disagree by {gap[i]:.3g} nats a token; at the beginning it was {begin:.3g}."
        ),
    )


def policy_drift(course: MetricSeries) -> Verdict:
    kl = course.recent("policy/kl")
    return kl > 1.0, lambda i: f"The policy is {kl[i]:.3g} nats a token away from the reference."


def failures(course: MetricSeries) -> Verdict:
    share = course.recent("rollout/failed")
    return (
        share > 0.05,
        lambda i: f"{percent(share[i])} of the rollouts could not be scored and were left out.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One segment of steps on which something looked wrong."""

    name: str
    title: str
    saw: str
    """What was measured, in a sentence with its numbers."""
    advice: str
    first: int
    last: int
    active: bool
    """Whether it still held at the last step."""
    metric: str
    """The curve to look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmRule:
    """A rule with its words."""

    name: str
    title: str
    rule: Callable[[MetricSeries], Verdict]
    advice: str
    metric: str
    patience: int = 3
    """Steps in a row on which the rule must hold."""


def alarms(rows: Sequence[Row], measured: Sequence[StoredEvaluation] = ()) -> list[Alarm]:
    """Return every alarm of a run: those that still hold first, then the latest, then the gravest."""
    if not rows:
        return []
    course = MetricSeries(rows, measured)
    found = [alarm for watchman in ALARM_RULES for alarm in raised(watchman, course)]
    return sorted(found, key=lambda alarm: (not alarm.active, -alarm.last))


def raised(watchman: AlarmRule, course: MetricSeries) -> Iterator[Alarm]:
    holds, describe = watchman.rule(course)
    for start, end in segments(holds, at_least=watchman.patience):
        yield Alarm(
            name=watchman.name,
            title=watchman.title,
            saw=describe(end),
            advice=watchman.advice,
            first=int(course.steps[start]),
            last=int(course.steps[end]),
            active=end == len(course) - 1,
            metric=watchman.metric,
        )


def segments(holds: Flags, *, at_least: int) -> Iterator[tuple[int, int]]:
    """Yield first and last index of each segment that is long enough; a gap of one step does not end it."""
    start = end = -1
    for index in map(int, np.flatnonzero(holds)):
        if start >= 0 and index - end > 2:
            if end - start + 1 >= at_least:
                yield start, end
            start = -1
        start = index if start < 0 else start
        end = index
    if start >= 0 and end - start + 1 >= at_least:
        yield start, end


ALARM_RULES = (
    AlarmRule(
        name="mask",
        title="The mask does not fit what was sampled",
        rule=mask_faults,
        advice="Look at a faulty rollout by token, coloured by mask; then at the environment that adds tool "
        "output to the stream. Results of this run are not to be trusted.",
        metric="rollout/mask_faults",
        patience=1,
    ),
    AlarmRule(
        name="reward-hack",
        title="Reward rises, held-out accuracy falls",
        rule=reward_hack,
        advice="Read the answers of highest reward and ask whether you would have paid for them; tighten the"
        " reward that they exploit (groupwise verify tests it on known cases), or give it less "
        "weight.",
        metric="reward/mean",
    ),
    AlarmRule(
        name="held-out-fell",
        title="A held-out score fell",
        rule=held_out_fell,
        advice="Where pass@k falls and avg@k does not, answers lose variety: raise rollout.temperature or "
        "algo.entropy_bonus, or lower the learning rate. Where all fall, go back to an earlier checkpoint.",
        metric="reward/mean",
        patience=1,
    ),
    AlarmRule(
        name="format-only",
        title="Only the easy part of the reward is earned",
        rule=format_only,
        advice="Lower the weight of the part that is earned, start from easier examples or a warm start, or "
        "give partial credit for the part that is missed.",
        metric="reward/mean",
        patience=5,
    ),
    AlarmRule(
        name="collapse",
        title="The policy has collapsed",
        rule=collapse,
        advice="Go back to an earlier checkpoint with a lower learning rate, a higher rollout.temperature, "
        "algo.entropy_bonus or a wider algo.clip_high.",
        metric="policy/entropy",
    ),
    AlarmRule(
        name="same-answer",
        title="Answers do not depend on the prompt",
        rule=same_answer,
        advice="The reward can be had without reading the question: check it with groupwise verify --pairs"
        " on that answer to several prompts.",
        metric="rollout/same_answer",
    ),
    AlarmRule(
        name="repeated",
        title="Answers of a group repeat each other",
        rule=repeated,
        advice="Raise rollout.temperature or algo.entropy_bonus, lower the learning rate, or use harder "
        "examples.",
        metric="rollout/repeated",
    ),
    AlarmRule(
        name="no-signal",
        title="Most groups teach nothing",
        rule=no_signal,
        advice="At a high reward the examples are too easy, at a low one too hard: change their difficulty, "
        "enlarge rollout.group_size, or let rollout.refill draw more rounds.",
        metric="advantage/zero_variance",
    ),
    AlarmRule(
        name="length-drift",
        title="Answers change length without earning more",
        rule=length_drift,
        advice="Look for padding or for answers that give up early; algo.overlong_buffer penalises the long,"
        " algo.loss=dr_grpo does not favour long wrong answers.",
        metric="rollout/length",
    ),
    AlarmRule(
        name="cut-off",
        title="Answers are cut off",
        rule=cut_off,
        advice="Raise rollout.max_tokens, or set algo.mask_truncated or algo.overlong_buffer.",
        metric="rollout/truncated",
    ),
    AlarmRule(
        name="looping",
        title="Answers run in circles",
        rule=looping,
        advice="Lower the learning rate or raise the temperature; algo.mask_truncated keeps loops out of the"
        " loss.",
        metric="rollout/looping",
    ),
    AlarmRule(
        name="sampler-gap",
        title="Sampler and trainer disagree",
        rule=sampler_gap,
        advice="Compare dtypes and attention of the two; keep algo.correction on. Past algo.max_gap the run "
        "stops.",
        metric="policy/gap",
    ),
    AlarmRule(
        name="policy-drift",
        title="The policy is far from the reference",
        rule=policy_drift,
        advice="Raise algo.beta or lower the learning rate.",
        metric="policy/kl",
    ),
    AlarmRule(
        name="failures",
        title="Rollouts fail",
        rule=failures,
        advice="Open a failed rollout (filter by end: error) and read its error; raise task.reward_seconds "
        "if it is time.",
        metric="rollout/failed",
    ),
)
