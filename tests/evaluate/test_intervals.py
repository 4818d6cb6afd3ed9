from __future__ import annotations

import math
import random

import pytest

from groupwise.evaluate.intervals import (
    Interval,
    exact_interval,
    mean_interval,
    paired_difference,
    pass_at_k,
    sign_test,
    student_quantile,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (1, 2, 0.0253, 0.9747),  # 1 - (1 - p)² = 0.05: only 1 and 2 of 2 are as extreme
        (0, 10, 0.0, 0.2829),  # P(X >= 6) = P(X = 0): above it, 0 is more extreme than 6
        (8, 10, 0.4444, 0.9632),
        (5, 10, 0.2224, 0.7776),
    ],
)
def test_the_exact_interval_matches_known_values(
    successes: int, trials: int, low: float, high: float
) -> None:
    interval = exact_interval(successes, trials)
    assert interval.mean == successes / trials
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("trials", [1, 8, 9, 16, 40])
def test_the_exact_interval_covers_every_accuracy_at_least_95_times_in_100(trials: int) -> None:
    intervals = [exact_interval(right, trials) for right in range(trials + 1)]
    for accuracy in (step / 997 for step in range(1, 997)):
        covered = math.fsum(
            math.comb(trials, right) * accuracy**right * (1 - accuracy) ** (trials - right)
            for right, interval in enumerate(intervals)
            if interval.low <= accuracy <= interval.high
        )
        assert covered >= 0.95 - 1e-9  # Wilson's falls to 83 % with 8 trials


def test_the_exact_interval_lies_inside_that_of_clopper_and_pearson() -> None:
    # 3 of 8: p with P(X >= 3) = 0.025 and with P(X <= 3) = 0.025
    interval = exact_interval(3, 8)
    assert 0.0852 < interval.low < 3 / 8 < interval.high < 0.7551


def test_the_exact_interval_takes_many_trials() -> None:
    interval = exact_interval(7000, 14000)
    assert (interval.low, interval.high) == pytest.approx((0.5 - 0.00829, 0.5 + 0.00829), abs=1e-4)
    assert exact_interval(14000, 14000).high == 1.0


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),  # z² / (n + z²): not empty at 0
        (10, 10, 0.7225, 1.0),
        (1, 2, 0.0945, 0.9055),
    ],
)
def test_wilson_matches_known_values(successes: int, trials: int, low: float, high: float) -> None:
    interval = wilson(successes, trials)
    assert interval.mean == successes / trials
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)


def test_no_trials_are_refused() -> None:
    for interval in (wilson, exact_interval):
        with pytest.raises(ValueError, match="0 of 0"):
            interval(0, 0)


def test_an_interval_reads_as_percent() -> None:
    assert str(Interval(0.41, 0.3683, 0.4529)) == "41.0 % [36.8, 45.3]"


def test_one_answer_per_prompt_gives_the_exact_interval() -> None:
    assert mean_interval([1, 0, 1, 1, 0]) == exact_interval(3, 5)


def test_prompts_that_always_or_never_succeed_count_once_however_many_answers_they_got() -> None:
    per_prompt = [1.0] * 20 + [0.0] * 20
    assert mean_interval(per_prompt).low == exact_interval(20, 40).low
    assert (
        mean_interval(per_prompt).low < exact_interval(160, 320).low
    )  # 8 answers each, counted as independent


def test_answers_that_differ_within_prompts_are_worth_more_than_one_trial_each() -> None:
    # p = 1/2; two further prompts, 1/4 away: var(mean) = 6 (1/4)² / 6² = 1/96, so n = 96 / 4 = 24
    # trials, fewer by Student's quantile at 3 degrees: 24 (1.960 / 3.182)² = 9.10
    expected = wilson(4.553, 9.105)
    assert mean_interval([0.25, 0.75, 0.25, 0.75]).high == pytest.approx(expected.high, abs=2e-3)
    assert expected.high < wilson(2, 4).high


def test_no_success_at_all_still_has_an_upper_bound() -> None:
    assert mean_interval([0.0] * 10).high == pytest.approx(0.2829, abs=5e-5)


def test_mean_interval_refuses_scores_outside_zero_and_one() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        mean_interval([0.5, 1.5])


@pytest.mark.parametrize("prompts", [8, 16, 60])
def test_mean_interval_covers_the_truth_at_least_94_times_in_100(prompts: int) -> None:
    noise = random.Random(0)
    covered = 0
    for _ in range(1000):
        # each prompt has its own difficulty, uniform, so the true mean is 1/2
        means = []
        for _ in range(prompts):
            difficulty = noise.random()
            means.append(sum(noise.random() < difficulty for _ in range(8)) / 8)
        interval = mean_interval(means)
        covered += interval.low <= 0.5 <= interval.high
    assert 0.94 <= covered / 1000 <= 0.985


@pytest.mark.parametrize("prompts", [8, 16])
def test_a_paired_interval_covers_the_truth_where_one_prompt_in_ten_improves(prompts: int) -> None:
    noise = random.Random(0)
    covered = 0
    for _ in range(1000):
        after = [float(noise.random() < 0.1) for _ in range(prompts)]
        difference = paired_difference([0.0] * prompts, after)
        covered += difference.low <= 0.1 <= difference.high
    assert covered / 1000 >= 0.94  # Student's interval covers it 57 and 81 times in 100


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 2, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (8, 3, 1, 3 / 8),  # pass@1 is the mean
        (8, 1, 8, 1.0),
        (8, 0, 8, 0.0),
        (5, 4, 2, 1.0),  # two draws from one wrong answer cannot both be wrong
    ],
)
def test_pass_at_k_matches_the_hand_worked_value(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected)


def test_pass_at_k_refuses_more_draws_than_answers() -> None:
    with pytest.raises(ValueError, match="k=9"):
        pass_at_k(8, 1, 9)


@pytest.mark.parametrize(
    ("improved", "worsened", "expected"),
    [
        (5, 0, 2 / 32),
        (9, 1, 2 * 11 / 1024),  # 1 + 10 of 2^10, both tails
        (3, 3, 1.0),
        (0, 0, 1.0),
    ],
)
def test_sign_test_counts_coin_flips(improved: int, worsened: int, expected: float) -> None:
    assert sign_test(improved, worsened) == pytest.approx(expected)


def test_paired_difference_matches_the_hand_worked_value() -> None:
    difference = paired_difference([0, 0, 0, 1, 1], [1, 1, 0, 1, 0])
    # differences 1, 1, 0, 0, -1 and two further ones, 1 and -1: centre 1/7, variance 5/7 - 1/49 = 34/49
    half = 2.776 * math.sqrt(34 / 49 / 7)
    assert difference.mean == pytest.approx(0.2)
    assert (difference.low, difference.high) == pytest.approx((1 / 7 - half, 1.0), abs=0.005)  # never above 1
    assert (difference.improved, difference.worsened) == (2, 1)
    assert difference.p_value == pytest.approx(1.0)  # 2 * (1 + 3) / 8
    assert str(difference).startswith("+20.0 points [")


def test_ten_of_ten_improved_prompts_leave_doubt() -> None:
    difference = paired_difference([0.0] * 10, [1.0] * 10)
    # centre 10/12, variance 1 - 100/144 = 44/144, half = 2.262 sqrt(44/144/12) = 0.361
    assert (difference.mean, difference.high) == (1.0, 1.0)
    assert difference.low == pytest.approx(10 / 12 - 0.361, abs=0.005)


def test_prompts_that_did_not_change_do_not_prove_that_none_would() -> None:
    # 12 prompts, none changed: variance 2/14, half = 2.201 sqrt(2/14/14) = 0.222
    difference = paired_difference([1.0, 0.0] * 6, [1.0, 0.0] * 6)
    assert (difference.low, difference.high) == pytest.approx((-0.222, 0.222), abs=0.002)


def test_small_changes_of_averages_keep_a_narrow_interval() -> None:
    before = [0.5] * 64
    difference = paired_difference(before, [0.5 + 0.125 * (index % 2) for index in range(64)])
    assert difference.high - difference.low < 0.04


def test_a_paired_interval_of_rewards_reaches_as_far_as_their_range() -> None:
    difference = paired_difference([-2.0, 2.0] * 4, [-2.0, 2.0] * 4)
    assert difference.low < -1 < 1 < difference.high


def test_paired_difference_needs_the_same_prompts() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired_difference([0, 1], [1])


@pytest.mark.parametrize(
    ("degrees", "table"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042)]
)
def test_student_quantile_matches_the_table(degrees: int, table: float) -> None:
    assert student_quantile(degrees) == pytest.approx(table, rel=5e-3)
