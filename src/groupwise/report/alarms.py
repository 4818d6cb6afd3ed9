"""Alarms: rules that detect silent failures in a run's metrics.

A rule takes the metrics as arrays over steps. It returns a mask of the steps at which it holds, and a
function that describes what was observed at one of these steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from groupwise.report.run_reader import Row, StoredEvaluation

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Verdict = tuple[Flags, Callable[[int], str]]

WINDOW = 8
"""Number of steps over which rules average a metric."""


class MetricSeries:
    """Metrics as arrays over steps; NaN where a step has no value."""

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
        """Return the mean over the last WINDOW steps at each step, ignoring missing values."""
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
        """Return the mean over the first WINDOW steps, the baseline of later ones."""
        values = self.of(name)[:WINDOW]
        known = values[np.isfinite(values)]
        return float(known.mean()) if len(known) else float("nan")

    def settled(self) -> Flags:
        """Return the steps that are late enough to compare with the baseline."""
        return np.arange(len(self)) >= 2 * WINDOW - 1

    def accuracy(self) -> Floats:
        """Return the latest held-out accuracy at each step (sampled, else greedy); NaN before the first."""
        result = np.full(len(self), np.nan)
        for evaluation in self.measured:
            name = next((name for name in evaluation.scores if name.startswith("avg@")), "greedy")
            if name in evaluation.scores:
                result[self.steps >= evaluation.step] = evaluation.scores[name][0]
        return result


def percent(value: Any) -> str:
    return f"{100 * float(value):.0f} %"


def no_signal(series: MetricSeries) -> Verdict:
    share, reward = series.recent("advantage/zero_variance"), series.recent("reward/mean")
    return (
        share > 0.6,
        lambda i: (
            f"In {percent(share[i])} of the groups all answers got the same reward (mean reward "
            f"{reward[i]:.3g}), so they give no gradient."
        ),
    )


def length_drift(series: MetricSeries) -> Verdict:
    length, begin = series.recent("rollout/length"), series.begin("rollout/length")
    reward, reward_begin = series.recent("reward/mean"), series.begin("reward/mean")
    moved = (length > 2 * begin) | (length < 0.5 * begin)
    # Longer answers with a higher reward are expected when a model learns to reason.
    margin = 0.1 * max(abs(reward_begin), 0.1)
    return (
        series.settled() & moved & ~(reward > reward_begin + margin),
        lambda i: (
            f"The mean answer length went from {begin:.0f} to {length[i]:.0f} tokens, while the reward went "
            f"from {reward_begin:.3g} to {reward[i]:.3g}."
        ),
    )


def cut_off(series: MetricSeries) -> Verdict:
    share = series.recent("rollout/truncated")
    return share > 0.3, lambda i: f"{percent(share[i])} of the answers were truncated at rollout.max_tokens."


def reward_parts(series: MetricSeries) -> list[str]:
    """Return the metrics that hold the mean of one reward: reward/NAME/mean."""
    return sorted(
        n for n in series.names() if n.startswith("reward/") and n.count("/") == 2 and n.endswith("/mean")
    )


def format_only(series: MetricSeries) -> Verdict:
    """One reward is near its maximum while another stays near zero without progress."""
    parts = reward_parts(series)
    recent = {part: series.recent(part) for part in parts}
    best = {part: float(np.nanmax(series.of(part), initial=0.0)) for part in parts}
    holds = np.zeros(len(series), dtype=bool)
    pairs: dict[int, tuple[str, str]] = {}
    for earned in parts:
        for missed in parts:
            if earned == missed or best[earned] <= 0:
                continue
            full = (recent[earned] >= 0.85 * best[earned]) & (recent[earned] >= 0.3)
            idle = (recent[missed] <= 0.05) & (recent[missed] <= series.begin(missed) + 0.02)
            here = series.settled() & full & idle
            holds |= here
            pairs.update(dict.fromkeys(map(int, np.flatnonzero(here)), (earned, missed)))

    def describe(i: int) -> str:
        earned, missed = pairs[i]
        return (
            f"The reward “{part_name(earned)}” is at {recent[earned][i]:.3g}, but “{part_name(missed)}” is "
            f"at {recent[missed][i]:.3g} (initially {series.begin(missed):.3g}): the policy learns only the "
            "easy part."
        )

    return holds, describe


def part_name(metric: str) -> str:
    return metric.removeprefix("reward/").removesuffix("/mean")


def rewards_diverge(series: MetricSeries) -> Verdict:
    """Two rewards of the same answers that were equal at the beginning diverge as one of them rises."""
    # Half a window: a policy can find a hole in a reward within a few steps.
    first = {part: series.of(part)[: WINDOW // 2] for part in reward_parts(series)}
    holds = np.zeros(len(series), dtype=bool)
    pairs: dict[int, tuple[str, str]] = {}
    for higher, lower in permutations(first, 2):
        begin = first[higher].mean()
        # Rewards that few answers earn, or nearly every answer, are equal by chance.
        if not (0.15 <= begin <= 0.95 and np.all(np.abs(first[higher] - first[lower]) <= 0.05)):
            continue
        recent = series.recent(higher)
        here = series.settled() & (recent > begin + 0.1) & (recent > series.recent(lower) + 0.1)
        holds |= here
        pairs.update(dict.fromkeys(map(int, np.flatnonzero(here)), (higher, lower)))

    def describe(i: int) -> str:
        higher, lower = pairs[i]
        return (
            f"The rewards “{part_name(higher)}” and “{part_name(lower)}” were equal at the beginning "
            f"({first[higher].mean():.3g}); now they are {series.recent(higher)[i]:.3g} and "
            f"{series.recent(lower)[i]:.3g} for the same answers."
        )

    return holds, describe


def reward_hack(series: MetricSeries) -> Verdict:
    """The training reward rises while held-out accuracy does not."""
    reward, begin = series.recent("reward/mean"), series.begin("reward/mean")
    accuracy = series.accuracy()
    first = next((evaluation for evaluation in series.measured), None)
    before = float("nan") if first is None else MetricSeries([{"step": first.step}], [first]).accuracy()[0]
    measured_since = np.array(
        [any(0 < evaluation.step <= step for evaluation in series.measured) for step in series.steps]
    )
    risen = reward > begin + max(0.15 * abs(begin), 0.1)
    return (
        series.settled() & measured_since & risen & (accuracy < before - 0.02),
        lambda i: (
            f"The training reward rose from {begin:.3g} to {reward[i]:.3g} while held-out accuracy fell from "
            f"{percent(before)} to {percent(accuracy[i])}."
        ),
    )


FELL = 0.05
"""Smallest drop of a held-out score that raises an alarm, even if a smaller one is significant."""


def held_out_fell(series: MetricSeries) -> Verdict:
    """A held-out score is worse than before training, prompt by prompt, beyond its 95 % interval."""
    holds = np.zeros(len(series), dtype=bool)
    worst: dict[int, tuple[str, float, float, float]] = {}
    for evaluation in series.measured:
        fallen = [
            (change[0], name)
            for name, change in evaluation.changes.items()
            if change[2] < 0 and change[0] <= -FELL and name.startswith(("greedy", "avg@", "pass@"))
        ]
        since = series.steps >= evaluation.step
        holds[since] = bool(fallen)
        if fallen:
            _, name = min(fallen)
            worst.update(dict.fromkeys(map(int, np.flatnonzero(since)), (name, *evaluation.changes[name])))

    def describe(i: int) -> str:
        name, mean, low, high = worst[i]
        return (
            f"{name} fell by {-100 * mean:.1f} points [{100 * low:+.1f}, {100 * high:+.1f}] compared with "
            "before training, on the same held-out prompts."
        )

    return holds, describe


def repeated(series: MetricSeries) -> Verdict:
    share, begin = series.recent("rollout/repeated"), series.begin("rollout/repeated")
    return (
        series.settled() & (share > 0.5) & (share > begin + 0.25),
        lambda i: (
            f"{percent(share[i])} of the answers are identical to another answer of their group (initially "
            f"{percent(begin)})."
        ),
    )


def same_answer(series: MetricSeries) -> Verdict:
    share, begin = series.recent("rollout/same_answer"), series.begin("rollout/same_answer")
    length = series.recent("rollout/length")
    risen = series.settled() & (share > 0.3) & (share > begin + 0.25)
    return risen | (
        (share > 0.9) & (length >= 8)
    ), lambda i: f"{percent(share[i])} of the answers are identical to answers to other prompts."


def collapse(series: MetricSeries) -> Verdict:
    entropy, begin = series.recent("policy/entropy"), series.begin("policy/entropy")
    silent, silent_begin = series.recent("advantage/zero_variance"), series.begin("advantage/zero_variance")
    alike = (series.recent("rollout/repeated") > 0.5) | (silent > max(0.4, silent_begin + 0.2))
    return (
        series.settled() & (entropy < 0.25 * begin) & alike,
        lambda i: (
            f"Entropy fell from {begin:.3g} to {entropy[i]:.3g} nats per token, and in "
            f"{percent(silent[i])} of the groups all rewards are equal."
        ),
    )


def looping(series: MetricSeries) -> Verdict:
    share = series.recent("rollout/looping")
    return (
        share > 0.05,
        lambda i: f"{percent(share[i])} of the answers repeat themselves until they reach the token limit.",
    )


def mask_faults(series: MetricSeries) -> Verdict:
    share = series.of("rollout/mask_faults")
    return (
        share > 0,
        lambda i: (
            f"In {max(100 * share[i], 0.1):.1f} % of the answers the loss mask is wrong: prompt or tool "
            "tokens are trained, or sampled tokens are not."
        ),
    )


def sampler_gap(series: MetricSeries) -> Verdict:
    gap, begin = series.recent("policy/gap"), series.begin("policy/gap")
    # Rounding to bfloat16 causes a gap of a few hundredths; a growing gap has another cause.
    grown = series.settled() & (gap > 3 * begin) & (gap > 0.01)
    return (
        (gap > 0.04) | grown,
        lambda i: (
            f"Log-probabilities of sampler and trainer differ by {gap[i]:.3g} nats per token (initially "
            f"{begin:.3g})."
        ),
    )


def policy_drift(series: MetricSeries) -> Verdict:
    kl = series.recent("policy/kl")
    return kl > 1.0, lambda i: f"The KL divergence from the reference is {kl[i]:.3g} nats per token."


def failures(series: MetricSeries) -> Verdict:
    share = series.recent("rollout/failed")
    return (
        share > 0.05,
        lambda i: f"{percent(share[i])} of the rollouts could not be scored and were excluded.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A range of steps at which a rule held."""

    name: str
    title: str
    saw: str
    """What was observed: one sentence with numbers."""
    advice: str
    first: int
    last: int
    active: bool
    """Whether it still held at the last step."""
    metric: str
    """The metric to look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmRule:
    """A rule with its title and advice."""

    name: str
    title: str
    check: Callable[[MetricSeries], Verdict]
    advice: str
    metric: str
    patience: int = 3
    """Number of consecutive steps for which the rule must hold."""


def alarms(rows: Sequence[Row], measured: Sequence[StoredEvaluation] = ()) -> list[Alarm]:
    """Return all alarms of a run: active ones first, then the latest, then the most severe."""
    if not rows:
        return []
    series = MetricSeries(rows, measured)
    result = [alarm for rule in ALARM_RULES for alarm in raised(rule, series)]
    return sorted(result, key=lambda alarm: (not alarm.active, -alarm.last))


def raised(rule: AlarmRule, series: MetricSeries) -> Iterator[Alarm]:
    holds, describe = rule.check(series)
    for start, end in segments(holds, at_least=rule.patience):
        yield Alarm(
            name=rule.name,
            title=rule.title,
            saw=describe(end),
            advice=rule.advice,
            first=int(series.steps[start]),
            last=int(series.steps[end]),
            active=end == len(series) - 1,
            metric=rule.metric,
        )


def segments(holds: Flags, *, at_least: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last index of each long enough segment; gaps of one step are ignored."""
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
        title="The loss mask does not match the sampled tokens",
        check=mask_faults,
        advice="Do not trust the results of this run. Inspect a faulty rollout by token, coloured by mask, "
        "and the environment that adds tool output to the token stream.",
        metric="rollout/mask_faults",
        patience=1,
    ),
    AlarmRule(
        name="reward-hack",
        title="The reward rises while held-out accuracy falls",
        check=reward_hack,
        advice="Read the answers with the highest reward and check whether they deserve it. Tighten the "
        "reward that they exploit (groupwise verify tests it on known cases), or lower its weight.",
        metric="reward/mean",
    ),
    AlarmRule(
        name="rewards-diverge",
        title="Two rewards that were equal diverge",
        check=rewards_diverge,
        advice="Read answers that earn only one of them: that reward accepts something wrong, or the other "
        "refuses something right. If it has a hole, close it and train again from the start.",
        metric="reward/mean",
    ),
    AlarmRule(
        name="held-out-fell",
        title="A held-out score fell",
        check=held_out_fell,
        advice="If pass@k falls but avg@k does not, answers are losing diversity: raise rollout.temperature "
        "or algo.entropy_bonus, or lower the learning rate. If all scores fall, go back to an earlier "
        "checkpoint.",
        metric="reward/mean",
        patience=1,
    ),
    AlarmRule(
        name="format-only",
        title="The policy earns only the easy part of the reward",
        check=format_only,
        advice="Lower the weight of the easy reward, start with easier examples or a warm start, or give "
        "partial credit for the hard reward.",
        metric="reward/mean",
        patience=5,
    ),
    AlarmRule(
        name="collapse",
        title="The policy has collapsed",
        check=collapse,
        advice="Go back to an earlier checkpoint. Lower the learning rate, or raise rollout.temperature, "
        "algo.entropy_bonus or algo.clip_high.",
        metric="policy/entropy",
    ),
    AlarmRule(
        name="same-answer",
        title="Answers do not depend on the prompt",
        check=same_answer,
        advice="The policy may earn the reward without reading the prompt: score the repeated answer for "
        "several prompts with groupwise verify --pairs.",
        metric="rollout/same_answer",
    ),
    AlarmRule(
        name="repeated",
        title="Answers within a group are identical",
        check=repeated,
        advice="Raise rollout.temperature or algo.entropy_bonus, lower the learning rate, or use harder "
        "examples.",
        metric="rollout/repeated",
    ),
    AlarmRule(
        name="no-signal",
        title="Most groups give no training signal",
        check=no_signal,
        advice="If the reward is high, the examples are too easy; if it is low, they are too hard. Change "
        "their difficulty, or raise rollout.group_size or rollout.refill.",
        metric="advantage/zero_variance",
    ),
    AlarmRule(
        name="length-drift",
        title="Answer length changes but the reward does not rise",
        check=length_drift,
        advice="Look for padding, or for answers that give up early. algo.overlong_buffer penalises long "
        "answers; algo.loss=dr_grpo does not favour long wrong answers.",
        metric="rollout/length",
    ),
    AlarmRule(
        name="cut-off",
        title="Answers are truncated",
        check=cut_off,
        advice="Raise rollout.max_tokens, or set algo.mask_truncated or algo.overlong_buffer.",
        metric="rollout/truncated",
    ),
    AlarmRule(
        name="looping",
        title="Answers repeat themselves in loops",
        check=looping,
        advice="Lower the learning rate or raise rollout.temperature. algo.mask_truncated excludes truncated "
        "answers from the loss.",
        metric="rollout/looping",
    ),
    AlarmRule(
        name="sampler-gap",
        title="Sampler and trainer disagree",
        check=sampler_gap,
        advice="Compare the dtypes and attention implementations of both, and keep algo.correction on. The "
        "run stops if the gap exceeds algo.max_gap.",
        metric="policy/gap",
    ),
    AlarmRule(
        name="policy-drift",
        title="The policy is far from the reference",
        check=policy_drift,
        advice="Raise algo.beta or lower the learning rate.",
        metric="policy/kl",
    ),
    AlarmRule(
        name="failures",
        title="Rollouts fail",
        check=failures,
        advice="Open a failed rollout (finish reason: error) and read its error. If it is a timeout, raise "
        "task.reward_seconds.",
        metric="rollout/failed",
    ),
)
