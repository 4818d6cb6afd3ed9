"""Several rewards to one: hand-worked numbers, and what the obvious ways get wrong."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest

from groupwise.algo.advantages import with_advantages
from groupwise.algo.reward_combination import (
    COMBINED,
    agreeing,
    by_component,
    by_deviation,
    by_length,
    with_combined,
)
from groupwise.records import Example, Group, Rollout


def rollout(error: str | None = None, **rewards: float) -> Rollout:
    return Rollout(
        prompt="?", text="", tokens=(1, 2), trained=(False, True), logprobs=(0.0, -1.0), entropies=(0.0, 0.0),
        prompt_length=1, finish="end", rewards=rewards, reward=sum(rewards.values()), error=error,
    )  # fmt: skip


def group(*rollouts: Rollout) -> Group:
    return Group(example=Example({}), rollouts=rollouts)


def combined(kind: str, *rollouts: Rollout, **weights: float) -> list[float]:
    return [r.reward for r in with_combined(group(*rollouts), kind=kind, weights=weights).rollouts]


def test_uniform_is_the_mean_and_a_weight_of_0_takes_no_part():
    members = rollout(a=1.0, b=0.0, c=9.0), rollout(a=0.0, b=0.0, c=9.0)
    assert combined("uniform", *members, c=0.0) == [0.5, 0.0]
    assert combined("uniform", *members, b=0.0, c=0.0) == [1.0, 0.0]
    assert combined("sum", *members) == [10.0, 9.0]


def test_std_weighs_by_spread():
    # Spreads 1 and 2 (values ±1 and ±2): weights 1/3 and 2/3.
    assert by_deviation([[1.0, 2.0], [-1.0, -2.0]]) == pytest.approx([5 / 3, -5 / 3])
    assert by_deviation([[1.0, 5.0], [0.0, 5.0]]) == [1.0, 0.0]


@pytest.mark.parametrize("kind", sorted(COMBINED))
def test_a_group_whose_rewards_agree_stays_equal_and_finite(kind):
    values = combined(kind, rollout(a=0.5, b=0.5), rollout(a=0.5, b=0.5))
    assert values[0] == values[1]
    assert math.isfinite(values[0])


def test_l2_keeps_signs():
    assert by_length([[3.0, 4.0], [-3.0, -4.0], [-1.0, 0.0]]) == [5.0, -5.0, -1.0]


def test_pca_of_rewards_that_move_together_is_their_standardised_mean():
    assert by_component([[0.0, 0.0], [1.0, 10.0]]) == pytest.approx([-1.0, 1.0])


def test_pca_never_inverts_a_reward():
    rng = random.Random(0)
    for _ in range(200):
        table = [[rng.random(), rng.random(), rng.random()] for _ in range(8)]
        better = [*table[0]]
        better[rng.randrange(3)] += 1e-7  # the weights hardly move, so no reward may count against
        before, after = by_component(table)[0], by_component([better, *table[1:]])[0]
        assert after >= before - 1e-5


def test_pca_of_opposed_rewards_falls_back_to_the_mean():
    assert by_component([[0.0, 1.0], [1.0, 0.0]]) == [0.5, 0.5]


def test_a_missing_reward_counts_as_the_mean_of_the_others_and_failures_are_left_alone():
    members = rollout(a=1.0, b=1.0), rollout(a=0.0, b=0.0), rollout(a=1.0), rollout(error="x")
    assert combined("uniform", *members) == [1.0, 0.0, 0.75, 0.0]


def test_the_mean_filter_drops_mixed_members_and_centres_the_rest_anew():
    good, bad, mixed = rollout(a=1.0, b=1.0), rollout(a=0.0, b=0.0), rollout(a=1.0, b=0.0)
    unweighted = partial(agreeing, weights={})
    assert unweighted([good, bad, mixed]) == [good, bad]
    found = with_advantages(group(good, bad, mixed), kind="dr_grpo", weights={}, chosen=unweighted)
    assert [r.advantage for r in found.rollouts] == [1.0, -1.0, 0.0]


def test_the_mean_filter_goes_by_weighted_rewards():
    # Means 0.5 and 30. Less length is better: right and short agree, and so do wrong and long.
    best, worst = rollout(correct=1.0, length=10.0), rollout(correct=0.0, length=50.0)
    wordy, curt = rollout(correct=1.0, length=50.0), rollout(correct=0.0, length=10.0)
    members = [best, worst, wordy, curt]
    assert agreeing(members, weights={"correct": 1.0, "length": -0.5}) == [best, worst]
    assert agreeing(members, weights={"correct": 1.0, "length": 0.5}) == [wordy, curt]
    assert agreeing(members, weights={"correct": 1.0, "length": 0.0}) == members
