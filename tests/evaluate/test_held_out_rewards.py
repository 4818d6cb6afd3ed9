"""The rewards of held-out answers, whatever their range."""

from __future__ import annotations

import pytest

from groupwise.commands.eval import reward_lines
from groupwise.evaluate.held_out import Evaluation
from groupwise.evaluate.intervals import mean_interval, reward_interval


def evaluation(totals: tuple[float, ...], right: tuple[int, ...] = (0, 2)) -> Evaluation:
    return Evaluation(
        examples=("a", "b"),
        greedy_right=(False, True),
        sampled_right=right,
        samples=2,
        failed=0,
        length=3.0,
        rewards={"score": totals},
        totals=totals,
        spreads={"score": 1.5, "": 1.5},
    )


def test_a_reward_outside_of_0_and_1_has_a_mean_an_interval_and_a_spread():
    reward = evaluation((-3.0, 5.0)).reward_intervals()["score"]
    # Deviations 4 and 4, and two more of 4: sqrt(4 × 16) / (2 + 2) = 2, times Student's 12.706.
    assert (reward.mean, reward.low, reward.high) == pytest.approx((1.0, 1 - 25.4124, 1 + 25.4124), abs=1e-3)
    assert reward.std == 1.5


def test_a_reward_between_0_and_1_has_the_interval_of_a_share():
    share, reward = mean_interval([0.25, 0.75, 0.5]), reward_interval([0.25, 0.75, 0.5], std=0.2)
    assert (reward.mean, reward.low, reward.high) == (share.mean, share.low, share.high)


def test_the_held_out_reward_is_shown_beside_accuracy():
    scores = evaluation((-3.0, 5.0)).scores()
    assert [*scores] == ["greedy", "avg@2", "pass@2", "reward"]
    assert scores["reward"].brief() == "1.000"
    assert scores["reward"].gain(0.25) == "+0.750"
    assert evaluation((-3.0, 5.0)).metrics()["eval/reward"] == 1.0


def test_a_reward_that_is_the_accuracy_is_not_shown_twice():
    assert "reward" not in evaluation((0.0, 1.0)).scores()


def test_an_evaluation_keeps_its_rewards_on_disk():
    one = evaluation((-3.0, 5.0))
    again = Evaluation.from_json(one.to_json())
    assert (again.totals, again.spreads) == (one.totals, one.spreads)


def test_the_report_shows_every_reward_with_its_spread():
    stored = {"mean": 1.0, "low": -2.0, "high": 4.0, "std": 1.5}
    change = {"mean": 0.5, "low": 0.1, "high": 0.9, "improved": 1, "worsened": 0, "p_value": 1.0}
    lines = list(reward_lines({"rewards": {"score": stored}, "change": {"reward/score": change}}))
    assert lines[1].split() == [
        "score",
        "1.000",
        "±",
        "1.500",
        "[-2.000,",
        "4.000]",
        "+0.500",
        "[+0.100,",
        "+0.900]",
    ]
