"""Alarms: planted failures are told, healthy runs are left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from groupwise.records import Group
from groupwise.report.alarms import Alarm, MetricSeries, alarms, segments
from groupwise.report.run_reader import MetricsTail, RunReader, StoredEvaluation, evaluations
from groupwise.tracking.run_folder import RunFolder
from tests.support.synthetic_runs import good_groups, group_of, healthy, make_run, rollout

Change = Callable[[int], dict[str, float]]


def rows(steps: int, change: Change = lambda step: {}) -> list[dict[str, float]]:
    return [{"step": step, **healthy(step), **change(step)} for step in range(1, steps + 1)]


def names(found: list[Alarm]) -> set[str]:
    return {alarm.name for alarm in found}


def test_a_run_that_learns_raises_nothing() -> None:
    measured = [
        StoredEvaluation(step=step, name="", scores={"avg@8": (0.3 + step / 100, 0.0, 1.0)}, prompts=9)
        for step in range(0, 41, 10)
    ]
    assert alarms(rows(40), measured) == []
    assert alarms([]) == []


def fallen(change: tuple[float, float, float]) -> list[StoredEvaluation]:
    before = StoredEvaluation(step=0, name="before", scores={"pass@2": (0.6, 0.5, 0.7)}, prompts=128)
    scores = {"pass@2": (0.6 + change[0], 0.3, 0.6)}
    return [
        before,
        StoredEvaluation(step=40, name="after", scores=scores, prompts=128, changes={"pass@2": change}),
    ]


def test_a_held_out_score_that_fell_beyond_its_interval_is_told() -> None:
    (alarm,) = alarms(rows(40), fallen((-0.156, -0.25, -0.06)))
    assert (alarm.name, alarm.last, alarm.active) == ("held-out-fell", 40, True)
    assert "pass@2 fell by 15.6 points [-25.0, -6.0]" in alarm.saw
    assert alarms(rows(40), fallen((-0.156, -0.35, 0.04))) == []  # chance may have done it
    assert alarms(rows(40), fallen((-0.01, -0.015, -0.005))) == []  # certain, and too little to matter


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("no-signal", lambda s: {"advantage/zero_variance": 0.8}),
        ("length-drift", lambda s: {"rollout/length": 50.0 if s < 15 else 130.0, "reward/mean": 1.2}),
        ("length-drift", lambda s: {"rollout/length": 50.0 if s < 15 else 9.0, "reward/mean": 1.2}),
        ("cut-off", lambda s: {"rollout/truncated": 0.5}),
        ("format-only", lambda s: {"reward/correct/mean": 0.01, "reward/mean": 1.01}),
        (
            "rewards-diverge",
            lambda s: {"reward/strict/mean": 0.3, "reward/correct/mean": 0.3 + max(s - 12, 0) / 50},
        ),
        ("repeated", lambda s: {"rollout/repeated": 0.1 if s < 12 else 0.8}),
        ("same-answer", lambda s: {"rollout/same_answer": 0.0 if s < 12 else 0.6}),
        ("looping", lambda s: {"rollout/looping": 0.2}),
        ("sampler-gap", lambda s: {"policy/gap": 0.045}),
        ("sampler-gap", lambda s: {"policy/gap": 1e-4 if s < 15 else 0.015}),
        ("policy-drift", lambda s: {"policy/kl": s / 10}),
        ("failures", lambda s: {"rollout/failed": 0.2}),
        ("mask", lambda s: {"rollout/mask_faults": 0.01 if s == 20 else 0.0}),
    ],
)
def test_each_failure_raises_its_own_alarm_and_no_other(name: str, change: Change) -> None:
    found = alarms(rows(40, change))
    assert names(found) == {name}
    assert all(alarm.saw and alarm.advice and alarm.metric for alarm in found)


def test_rewards_that_were_never_equal_or_stay_equal_raise_nothing() -> None:
    unequal: Change = lambda s: {"reward/near/mean": 0.4, "reward/correct/mean": 0.3 + s / 80}  # noqa: E731
    assert alarms(rows(40, unequal)) == []
    equal: Change = lambda s: {"reward/strict/mean": 0.28 + s / 80, "reward/correct/mean": 0.3 + s / 80}  # noqa: E731
    assert alarms(rows(40, equal)) == []
    fallen: Change = lambda s: {"reward/strict/mean": 0.3 - s / 400, "reward/correct/mean": 0.3}  # noqa: E731
    assert alarms(rows(40, fallen)) == []


def test_rewards_that_begin_near_zero_are_equal_by_chance() -> None:
    for lower, higher in ((0.03, 0.05), (0.12, 0.14)):
        cold: Change = lambda s, lower=lower, higher=higher: {  # noqa: E731
            "reward/format/mean": min(higher + max(s - 6, 0) * 0.08, 0.9),
            "reward/correct/mean": lower + s / 250,
        }
        assert "rewards-diverge" not in names(alarms(rows(40, cold)))


def test_answers_that_grow_longer_and_earn_more_are_learning() -> None:
    longer: Change = lambda s: {"rollout/length": 50.0 + 4 * s, "reward/mean": 1.0 + s / 40}  # noqa: E731
    assert alarms(rows(40, longer)) == []


def test_short_answers_that_were_alike_from_the_start_are_the_task() -> None:
    yes_or_no: Change = lambda s: {  # noqa: E731
        "rollout/same_answer": 1.0,
        "rollout/repeated": 0.8,
        "rollout/length": 2.0,
    }
    assert alarms(rows(40, yes_or_no)) == []


def test_an_alarm_says_what_it_saw_and_when_it_was_over() -> None:
    change: Change = lambda s: {"rollout/mask_faults": 0.25 if 10 <= s <= 12 else 0.0}  # noqa: E731
    (alarm,) = alarms(rows(30, change))
    assert (alarm.first, alarm.last, alarm.active) == (10, 12, False)
    assert "In 25.0 % of the answers the loss mask is wrong" in alarm.saw


def test_alarms_that_still_hold_come_first() -> None:
    change: Change = lambda s: {"rollout/mask_faults": float(s == 5), "policy/gap": 0.045}  # noqa: E731
    assert [(alarm.name, alarm.active) for alarm in alarms(rows(30, change))] == [
        ("sampler-gap", True),
        ("mask", False),
    ]


def test_a_gap_of_one_step_does_not_end_a_stretch_and_short_ones_do_not_count() -> None:
    holds = np.array([1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1], dtype=bool)
    assert list(segments(holds, at_least=3)) == [(0, 3)]
    assert list(segments(holds, at_least=2)) == [(0, 3), (6, 7)]
    assert list(segments(holds, at_least=1))[-1] == (11, 11)


def test_recent_is_the_mean_of_eight_steps_of_those_that_have_the_metric() -> None:
    course = MetricSeries([{"step": 1, "x": 1.0}, {"step": 2}, {"step": 3, "x": None}, {"step": 4, "x": 4.0}])
    assert course.recent("x").tolist() == [1.0, 1.0, 1.0, 2.5]
    assert np.isnan(course.recent("absent")).all()
    ten = MetricSeries([{"step": step, "x": float(step)} for step in range(1, 11)])
    assert ten.recent("x")[-1] == pytest.approx(6.5)  # 3 … 10
    assert ten.begin("x") == pytest.approx(4.5)  # 1 … 8


# Planted in a whole run, written by the real writers and found from its folder alone.


def found_in(run: Path) -> dict[str, Alarm]:
    return {one["name"]: Alarm(**one) for one in RunReader(RunFolder(run)).alarmed()["alarms"]}


def test_a_planted_reward_hack_is_told(tmp_path: Path) -> None:
    """The policy finds one text that the reward pays for whatever was asked; accuracy sinks."""

    def groups(step: int) -> list[Group]:
        if step < 12:
            return good_groups(step)
        hack = "the answer is always <answer>1</answer>"
        return [
            group_of([rollout(hack, member=m, prompt=f"{g}?", reward=2.0) for m in range(3)], question=f"{g}")
            for g in range(3)
        ]

    def metrics(step: int) -> dict[str, float]:
        return {**healthy(step), "reward/mean": 1.0 if step < 12 else 2.0}

    make_run(
        tmp_path / "hack",
        steps=30,
        groups=groups,
        metrics=metrics,
        accuracy=lambda step: 0.4 if step < 12 else 0.05,
    )
    found = found_in(tmp_path / "hack")
    assert {"reward-hack", "same-answer"} <= set(found)
    assert found["reward-hack"].active
    assert "held-out accuracy fell from 40 % to 5 %" in found["reward-hack"].saw
    assert found["same-answer"].first >= 12


def test_a_planted_mask_bug_is_told_at_its_step(tmp_path: Path) -> None:
    def groups(step: int) -> list[Group]:
        made = good_groups(step)
        if step != 4:
            return made
        wrong = rollout("off by one", trained=(False, False, *(True,) * 12))
        return [*made, group_of([wrong])]

    make_run(tmp_path / "mask", groups=groups)
    found = found_in(tmp_path / "mask")
    assert set(found) == {"mask"}
    assert (found["mask"].first, found["mask"].last, found["mask"].active) == (4, 4, False)
    assert "14.3 %" in found["mask"].saw  # one of seven


def test_a_planted_collapse_is_told(tmp_path: Path) -> None:
    def groups(step: int) -> list[Group]:
        if step < 12:
            return good_groups(step)
        question = f"{step}?"
        return [
            group_of(
                [rollout(f"same {step}", member=m, prompt=question) for m in range(4)], question=question
            )
        ]

    def metrics(step: int) -> dict[str, float]:
        late = step >= 12
        return {
            **healthy(step),
            "policy/entropy": 0.01 if late else 0.5,
            "advantage/zero_variance": 0.9 if late else 0.1,
        }

    make_run(tmp_path / "collapse", steps=30, groups=groups, metrics=metrics)
    found = found_in(tmp_path / "collapse")
    assert {"collapse", "repeated", "no-signal"} <= set(found)
    assert "Entropy fell from 0.5 to 0.01 nats per token" in found["collapse"].saw


def test_a_run_with_nothing_planted_is_left_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "fine", steps=40)
    assert alarms(MetricsTail(run.metrics).rows(), evaluations(run)) == []
