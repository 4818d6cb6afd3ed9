"""From rewards to samples: hand-worked numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from groupwise.algo.advantages import (
    ADVANTAGES,
    dr_grpo,
    gdpo,
    grpo,
    maxrl,
    overlong_penalty,
    rloo,
    scaled_by_batch,
    with_advantages,
    with_overlong_penalty,
)
from groupwise.algo.samples import (
    adapted_coefficient,
    batch_size,
    keep_top_entropy,
    mean_entropy,
    to_samples,
)
from groupwise.config import schema
from groupwise.records import Example, Finish, Group, Rollout, Sample, Turn
from tests.support.scripted_rollouts import with_trained


def rollout(
    reward: float = 0.0,
    *,
    rewards: dict[str, float] | None = None,
    length: int = 2,
    finish: Finish = "end",
    advantage: float = 0.0,
    error: str | None = None,
) -> Rollout:
    """A rollout with prompt (5, 6) and `length` trained tokens."""
    return Rollout(
        prompt="?",
        text="",
        tokens=(5, 6, *range(10, 10 + length)),
        trained=(False, False, *[True] * length),
        logprobs=(0.0, 0.0, *[-1.0] * length),
        entropies=(0.0, 0.0, *[0.5] * length),
        prompt_length=2,
        finish=finish,
        rewards=rewards or {},
        reward=reward,
        advantage=advantage,
        error=error,
    )


def group(*rollouts: Rollout) -> Group:
    return Group(example=Example({"question": "?"}), rollouts=rollouts)


def advantages(found: Group) -> list[float]:
    return [member.advantage for member in found.rollouts]


def test_every_advantage_of_the_settings_exists():
    assert set(ADVANTAGES) == set(schema.ADVANTAGES)


def test_grpo_divides_by_the_sample_standard_deviation():
    # mean 1, squared deviations 1, 1, 1, 9 over 3: deviation 2
    assert grpo([0, 0, 0, 4]) == pytest.approx([-0.5, -0.5, -0.5, 1.5])


def test_dr_grpo_only_centres():
    assert dr_grpo([0, 0, 0, 4]) == pytest.approx([-1, -1, -1, 3])


def test_rloo_compares_with_the_mean_of_the_others():
    assert rloo([0, 0, 0, 4]) == pytest.approx([-4 / 3, -4 / 3, -4 / 3, 4])


def test_maxrl_divides_by_the_mean_so_that_rare_successes_weigh_most():
    # one success in four: mean 1/4, (1 - 1/4) / (1/4) = 3; three in four: mean 3/4, 1/4 / (3/4) = 1/3
    assert maxrl([0, 0, 0, 1]) == pytest.approx([-1, -1, -1, 3])
    assert maxrl([0, 1, 1, 1]) == pytest.approx([-1, 1 / 3, 1 / 3, 1 / 3])
    assert maxrl([-1, 1]) == maxrl([-3, 1]) == [0, 0]


def turns(reward: float, *each: float, lengths: tuple[int, ...]) -> Rollout:
    """A rollout with turns of these lengths, an untrained token before each, and these rewards of turns."""
    trained = [flag for length in lengths for flag in (False, *[True] * length)]
    return with_trained(trained, reward=reward, turns=tuple(Turn(text="", reward=value) for value in each))


def test_a_turn_is_compared_with_the_same_turn_of_the_others_by_what_came_after_it():
    members = [
        turns(3.0, 1.0, 2.0, lengths=(2, 1)),  # returns 3, then 3 - 1 = 2
        turns(1.0, 1.0, 0.0, lengths=(1, 2)),  # returns 1, then 0
        turns(2.0, 2.0, lengths=(3,)),  # return 2; it has no second turn
    ]
    # first turn: 3, 1, 2 have mean 2 and deviation 1; second: 2 and 0 have mean 1 and deviation sqrt(2)
    found = with_advantages(group(*members), kind="turn", weights={})
    root = 1 / math.sqrt(2)
    assert [member.token_advantages for member in found.rollouts] == [
        pytest.approx((1.0, 1.0, root)),
        pytest.approx((-1.0, -root, -root)),
        None,
    ]
    assert found.rollouts[2].advantage == 0.0


def test_batch_std_scales_all_groups_alike():
    easy, hard = group(rollout(1.0), rollout(0.0)), group(rollout(4.0), rollout(0.0))
    centred = [with_advantages(one, kind="batch_std", weights={}) for one in (easy, hard)]
    assert [advantages(one) for one in centred] == [[0.5, -0.5], [2.0, -2.0]]
    same = group(rollout(0.0), rollout(0.0))
    # 1, 0, 4, 0, 0, 0: mean 5/6, squared deviations sum to 17 - 25/6 = 77/6, over 5: 77/30
    scale = math.sqrt(77 / 30)
    scaled = scaled_by_batch(centred, [*centred, same])
    assert [advantages(one) for one in scaled] == [
        pytest.approx([0.5 / scale, -0.5 / scale]),
        pytest.approx([2 / scale, -2 / scale]),
    ]
    assert scaled_by_batch([same], [same]) == [same]


def test_the_adaptive_entropy_bonus_grows_below_its_target_and_is_off_above():
    seen, coefficient = [], 0.0
    for entropy in (0.1, 0.1, 0.3, 0.1, 0.3, 0.3, 0.3):
        bonus, coefficient = adapted_coefficient(coefficient, entropy, target=0.2, step=0.5)
        seen.append((bonus, coefficient))
    assert seen == [(0.0, 0.5), (0.5, 1.0), (0.0, 0.5), (0.5, 1.0), (0.0, 0.5), (0.0, 0.0), (0.0, 0.0)]
    assert mean_entropy([group(rollout(length=2), rollout(length=1))], mask_truncated=False) == 0.5


def test_gdpo_normalises_each_reward_before_weighing_it():
    rewards = [{"right": 0, "short": 30}, {"right": 0, "short": 10}, {"right": 3, "short": 20}]
    # right: mean 1, deviation sqrt(3); short: mean 20, deviation 10
    third = 1 / math.sqrt(3)
    expected = [2 * -third + 0.5, 2 * -third - 0.5, 2 * 2 * third]
    assert gdpo(rewards, weights={"right": 2.0, "short": 0.5}) == pytest.approx(expected)


def test_gdpo_tells_apart_what_the_sum_of_rewards_cannot():
    rewards = [{"a": 1, "b": 0}, {"a": 0, "b": 1}, {"a": 0, "b": 1}]
    assert grpo([sum(parts.values()) for parts in rewards]) == [0, 0, 0]
    assert gdpo(rewards, weights={"b": 0.5})[0] > 0


def test_gdpo_counts_a_missing_reward_neither_for_nor_against():
    rewards = [{"a": 1.0}, {"a": 3.0}, {}]
    # mean 2 and deviation sqrt(2) of the two that have it
    assert gdpo(rewards, weights={}) == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2), 0])


def test_gdpo_gets_nothing_from_a_reward_that_only_one_member_has():
    assert gdpo([{"a": 1.0}, {}, {}], weights={}) == [0, 0, 0]


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.1 + 0.2, 0.3, 0.3], [0.7], []])
def test_a_group_without_difference_gets_exact_zeros(kind, rewards):
    found = with_advantages(
        group(*[rollout(reward, rewards={"a": reward}) for reward in rewards]), kind=kind, weights={}
    )
    assert advantages(found) == [0.0] * len(rewards)


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
def test_advantages_do_not_shrink_with_the_scale_of_small_rewards(kind):
    members = [rollout(reward, rewards={"a": reward}) for reward in (0.0, 0.0, 1e-5)]
    last = advantages(with_advantages(group(*members), kind=kind, weights={}))[-1]
    scaled = dict.fromkeys(("grpo", "gdpo", "turn"), 2 / math.sqrt(3))
    expected = {**scaled, "maxrl": 2.0, "dr_grpo": 2e-5 / 3, "batch_std": 2e-5 / 3, "rloo": 1e-5}
    assert last == pytest.approx(expected[kind], rel=1e-9)


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
def test_a_failed_rollout_moves_no_mean_and_gets_zero(kind):
    alive = [rollout(0.0, rewards={"a": 0.0}), rollout(4.0, rewards={"a": 4.0})]
    failed = rollout(-100.0, rewards={"a": -100.0}, error="the verifier timed out")
    with_failure = with_advantages(group(alive[0], failed, alive[1]), kind=kind, weights={})
    without = with_advantages(group(*alive), kind=kind, weights={})
    first, second = advantages(without)
    assert first < 0 < second
    assert advantages(with_failure) == [first, 0.0, second]


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
def test_one_valid_rollout_has_nothing_to_be_relative_to(kind):
    members = rollout(1.0, rewards={"a": 1.0}), rollout(error="boom")
    assert advantages(with_advantages(group(*members), kind=kind, weights={})) == [0.0, 0.0]


def test_a_reward_that_is_not_a_number_is_refused():
    with pytest.raises(AssertionError, match="finite"):
        with_advantages(group(rollout(1.0), rollout(math.nan)), kind="grpo", weights={})


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (80, 0.0), (81, -0.1), (90, -1.0), (100, -2.0), (120, -2.0)]
)
def test_the_overlong_penalty_grows_over_the_buffer(length, expected):
    assert overlong_penalty(length, max_tokens=100, buffer=20, penalty=2.0) == pytest.approx(expected)


def test_a_buffer_of_zero_turns_the_overlong_penalty_off():
    members = group(rollout(1.0, length=4))
    assert overlong_penalty(100, max_tokens=100, buffer=0, penalty=1.0) == 0.0
    assert with_overlong_penalty(members, max_tokens=4, buffer=0, penalty=1.0) is members


def test_the_overlong_penalty_is_a_reward_part_of_valid_rollouts():
    members = group(
        rollout(1.0, rewards={"right": 1.0}, length=4),
        rollout(1.0, rewards={"right": 1.0}, length=2),
        rollout(length=4, error="boom"),
    )
    long, short, failed = with_overlong_penalty(members, max_tokens=4, buffer=2, penalty=0.5).rollouts
    assert (long.reward, long.rewards) == (0.5, {"right": 1.0, "overlong": -0.5})
    assert (short.reward, short.rewards) == (1.0, {"right": 1.0, "overlong": 0.0})
    assert failed == members.rollouts[2]


def in_turns(*lengths: int) -> Rollout:
    """A rollout with turns of these lengths, and three tokens to read between two of them."""
    trained = (False,) * 2
    for number, length in enumerate(lengths):
        trained += (False,) * (3 if number else 0) + (True,) * length
    zeros = (0.0,) * len(trained)
    return replace(
        rollout(), tokens=tuple(range(len(trained))), trained=trained, logprobs=zeros, entropies=zeros
    )


@pytest.mark.parametrize(
    ("lengths", "expected"), [((60, 60), 0.0), ((60, 90, 85), -0.5), ((100, 1), -1.0), ((), 0.0)]
)
def test_the_overlong_penalty_is_for_the_longest_turn_which_is_what_has_a_limit(lengths, expected):
    (found,) = with_overlong_penalty(
        group(in_turns(*lengths)), max_tokens=100, buffer=20, penalty=1.0
    ).rollouts
    assert found.rewards == {"overlong": expected}
    assert found.length == sum(lengths)


def test_samples_have_the_advantage_on_trained_tokens_only():
    (sample,) = to_samples([group(rollout(advantage=0.5))], mask_truncated=False, keep_zero=False)
    assert sample == Sample(
        tokens=(5, 6, 10, 11),
        trained=(False, False, True, True),
        logprobs=(0.0, 0.0, -1.0, -1.0),
        entropies=(0.0, 0.0, 0.5, 0.5),
        advantages=(0.0, 0.0, 0.5, 0.5),
        prefix=2,
        group=0,
    )


MIXED = [
    group(rollout(advantage=1.0, length=1), rollout(advantage=0.0, length=2)),
    group(
        rollout(advantage=-1.0, length=3, finish="length"), rollout(length=4, error="boom"), rollout(length=0)
    ),
]


@pytest.mark.parametrize(
    ("mask_truncated", "keep_zero", "lengths"),
    [(False, False, [1, 3]), (False, True, [1, 2, 3]), (True, False, [1]), (True, True, [1, 2])],
)
def test_samples_are_the_rollouts_that_can_pull(mask_truncated, keep_zero, lengths):
    samples = to_samples(MIXED, mask_truncated=mask_truncated, keep_zero=keep_zero)
    assert [sample.length for sample in samples] == lengths


def test_samples_know_their_group():
    samples = to_samples(MIXED, mask_truncated=False, keep_zero=True)
    assert [sample.group for sample in samples] == [0, 0, 1]


def test_the_batch_counts_zero_advantages_but_not_failed_empty_or_masked_rollouts():
    assert batch_size(MIXED, mask_truncated=False) == (3, 6)
    assert batch_size(MIXED, mask_truncated=True) == (2, 3)


def with_entropies(*entropies: float, advantage: float) -> Sample:
    length = len(entropies)
    return Sample(
        tokens=(5, *range(10, 10 + length)),
        trained=(False, *[True] * length),
        logprobs=(0.0,) * (length + 1),
        entropies=(0.0, *entropies),
        advantages=(0.0, *[advantage] * length),
        prefix=1,
        group=0,
    )


def kept(samples: list[Sample], share: float) -> list[tuple[float, ...]]:
    return [sample.advantages[1:] for sample in keep_top_entropy(samples, share=share)]


def test_the_top_entropy_tokens_are_found_over_all_samples():
    samples = [with_entropies(0.1, 0.9, 0.2, advantage=1.0), with_entropies(0.8, 0.7, advantage=-1.0)]
    assert kept(samples, 0.4) == [(0, 1, 0), (-1, 0)]


def test_the_share_is_exact_when_entropies_are_equal():
    samples = [with_entropies(0.5, 0.5, 0.9, advantage=1.0), with_entropies(0.5, 0.5, advantage=-1.0)]
    assert kept(samples, 0.6) == [(1, 1, 1), (0, 0)]


def test_the_share_does_not_suffer_from_rounding():
    # 0.1 * 30 is a little more than 3 in floating point
    (found,) = kept([with_entropies(*[0.5] * 30, advantage=1.0)], 0.1)
    assert sum(found) == 3


def test_at_least_one_token_is_kept():
    assert kept([with_entropies(0.1, 0.2, advantage=1.0)], 0.01) == [(0, 1)]


def test_masked_tokens_stay_trained():
    (sample,) = keep_top_entropy([with_entropies(0.1, 0.2, advantage=1.0)], share=0.5)
    assert sample.trained == (False, True, True)
    assert sample.length == 2


def test_tokens_without_advantage_do_not_compete():
    signal, none = with_entropies(0.1, 0.2, advantage=1.0), with_entropies(0.8, 0.9, advantage=0.0)
    assert kept([signal, none], 0.5)[0] == kept([signal], 0.5)[0] == (0, 1)


def test_a_share_of_one_keeps_every_token():
    samples = [with_entropies(0.1, 0.2, advantage=1.0)]
    assert keep_top_entropy(samples, share=1.0) == samples
