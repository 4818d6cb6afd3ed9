"""Alarms: silent failures told from a run's metrics, each with what was seen, when, and what to try.

Nothing is read but the rows of metrics.jsonl and the evaluations. A stretch of steps on which a rule
holds is one alarm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from groupwise.report.history import Measured, Row
from groupwise.report.rules import (
    Course,
    Flags,
    Verdict,
    collapse,
    cut_off,
    failures,
    format_only,
    held_out_fell,
    length_drift,
    looping,
    mask_faults,
    no_signal,
    policy_drift,
    repeated,
    reward_hack,
    same_answer,
    sampler_gap,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One stretch of steps on which something looked wrong."""

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
class Watchman:
    """A rule with its words."""

    name: str
    title: str
    rule: Callable[[Course], Verdict]
    advice: str
    metric: str
    patience: int = 3
    """Steps in a row on which the rule must hold."""


def alarms(rows: Sequence[Row], measured: Sequence[Measured] = ()) -> list[Alarm]:
    """Return every alarm of a run: those that still hold first, then the latest, then the gravest."""
    if not rows:
        return []
    course = Course(rows, measured)
    found = [alarm for watchman in WATCHMEN for alarm in raised(watchman, course)]
    return sorted(found, key=lambda alarm: (not alarm.active, -alarm.last))


def raised(watchman: Watchman, course: Course) -> Iterator[Alarm]:
    holds, describe = watchman.rule(course)
    for start, end in stretches(holds, at_least=watchman.patience):
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


def stretches(holds: Flags, *, at_least: int) -> Iterator[tuple[int, int]]:
    """Yield first and last index of each stretch that is long enough; a gap of one step does not end it."""
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


WATCHMEN = (
    Watchman(
        name="mask",
        title="The mask does not fit what was sampled",
        rule=mask_faults,
        advice="Look at a faulty rollout by token, coloured by mask; then at the environment that adds tool "
        "output to the stream. Results of this run are not to be trusted.",
        metric="rollout/mask_faults",
        patience=1,
    ),
    Watchman(
        name="reward-hack",
        title="Reward rises, held-out accuracy falls",
        rule=reward_hack,
        advice="Read the answers of highest reward and ask whether you would have paid for them; tighten the"
        " reward that they exploit (groupwise verify tests it on known cases), or give it less "
        "weight.",
        metric="reward/mean",
    ),
    Watchman(
        name="held-out-fell",
        title="A held-out score fell",
        rule=held_out_fell,
        advice="Where pass@k falls and avg@k does not, answers lose variety: raise rollout.temperature or "
        "algo.entropy_bonus, or lower the learning rate. Where all fall, go back to an earlier checkpoint.",
        metric="reward/mean",
        patience=1,
    ),
    Watchman(
        name="format-only",
        title="Only the easy part of the reward is earned",
        rule=format_only,
        advice="Lower the weight of the part that is earned, start from easier examples or a warm start, or "
        "give partial credit for the part that is missed.",
        metric="reward/mean",
        patience=5,
    ),
    Watchman(
        name="collapse",
        title="The policy has collapsed",
        rule=collapse,
        advice="Go back to an earlier checkpoint with a lower learning rate, a higher rollout.temperature, "
        "algo.entropy_bonus or a wider algo.clip_high.",
        metric="policy/entropy",
    ),
    Watchman(
        name="same-answer",
        title="Answers do not depend on the prompt",
        rule=same_answer,
        advice="The reward can be had without reading the question: check it with groupwise verify --pairs"
        " on that answer to several prompts.",
        metric="rollout/same_answer",
    ),
    Watchman(
        name="repeated",
        title="Answers of a group repeat each other",
        rule=repeated,
        advice="Raise rollout.temperature or algo.entropy_bonus, lower the learning rate, or use harder "
        "examples.",
        metric="rollout/repeated",
    ),
    Watchman(
        name="no-signal",
        title="Most groups teach nothing",
        rule=no_signal,
        advice="At a high reward the examples are too easy, at a low one too hard: change their difficulty, "
        "enlarge rollout.group_size, or let rollout.refill draw more rounds.",
        metric="advantage/zero_variance",
    ),
    Watchman(
        name="length-drift",
        title="Answers change length without earning more",
        rule=length_drift,
        advice="Look for padding or for answers that give up early; algo.overlong_buffer penalises the long,"
        " algo.loss=dr_grpo does not favour long wrong answers.",
        metric="rollout/length",
    ),
    Watchman(
        name="cut-off",
        title="Answers are cut off",
        rule=cut_off,
        advice="Raise rollout.max_tokens, or set algo.mask_truncated or algo.overlong_buffer.",
        metric="rollout/truncated",
    ),
    Watchman(
        name="looping",
        title="Answers run in circles",
        rule=looping,
        advice="Lower the learning rate or raise the temperature; algo.mask_truncated keeps loops out of the"
        " loss.",
        metric="rollout/looping",
    ),
    Watchman(
        name="sampler-gap",
        title="Sampler and trainer disagree",
        rule=sampler_gap,
        advice="Compare dtypes and attention of the two; keep algo.correction on. Past algo.max_gap the run "
        "stops.",
        metric="policy/gap",
    ),
    Watchman(
        name="policy-drift",
        title="The policy is far from the reference",
        rule=policy_drift,
        advice="Raise algo.beta or lower the learning rate.",
        metric="policy/kl",
    ),
    Watchman(
        name="failures",
        title="Rollouts fail",
        rule=failures,
        advice="Open a failed rollout (filter by end: error) and read its error; raise task.reward_seconds "
        "if it is time.",
        metric="rollout/failed",
    ),
)
