"""The sampling distribution: what each setting keeps, worked by hand and against a naive version."""

from __future__ import annotations

import math
import random

import pytest
import torch

from groupwise.model.ops.logits import doubling_sum, entropy, scaled_logits
from groupwise.records import Sampling
from tests.support.naive_distribution import naive_logprobs

P = [0.5, 0.25, 0.15, 0.1]


def probabilities(sampling: Sampling, probs: list[float] = P, **options) -> list[float]:
    logits = torch.tensor([[math.log(p) for p in probs]])
    return scaled_logits(logits, sampling, **options).softmax(-1)[0].tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, P),
        ({"temperature": 0.5}, [p * p / 0.345 for p in P]),  # squared, sum 0.25 + 0.0625 + 0.0225 + 0.01
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 4}, P),  # all of them
        ({"top_k": 9}, P),  # more than there are
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),  # 0.5 is short of 0.6, 0.75 is not
        ({"top_p": 0.3}, [1, 0, 0, 0]),  # the likeliest stays whatever top_p is
        ({"min_p": 0.29}, [5 / 9, 2.5 / 9, 1.5 / 9, 0]),  # at least 0.145
        ({"min_p": 1.0}, [1, 0, 0, 0]),
        ({"top_p": 0.8}, [5 / 9, 2.5 / 9, 1.5 / 9, 0]),  # 0.75 is short of 0.8
        ({"top_k": 3, "top_p": 0.8}, [2 / 3, 1 / 3, 0, 0]),  # among three, two have 0.833: not short
        ({"top_p": 0.95, "min_p": 0.4}, [2 / 3, 1 / 3, 0, 0]),
        # Temperature first: sqrt makes [0.367, 0.260, 0.201, 0.164] and three are needed for 0.7.
        ({"temperature": 2.0, "top_p": 0.7}, [0.4435, 0.3136, 0.2429, 0]),
    ],
)
def test_each_setting_keeps_what_the_hand_worked_distribution_says(settings, expected):
    assert probabilities(Sampling(**settings)) == pytest.approx(expected, abs=2e-4)


def test_equals_of_the_kth_token_all_stay():
    assert probabilities(Sampling(top_k=2), [0.4, 0.2, 0.2, 0.2]) == pytest.approx([0.4, 0.2, 0.2, 0.2])


def test_equals_at_the_edge_of_top_p_stay_in_order_of_their_ids():
    assert probabilities(Sampling(top_p=0.5), [0.25] * 4) == pytest.approx([0.5, 0.5, 0, 0])


def test_the_drawn_token_stays_possible_when_training():
    kept = torch.tensor([3])
    assert probabilities(Sampling(top_k=1), keep_N=kept) == pytest.approx([5 / 6, 0, 0, 1 / 6])


def test_greedy_is_measured_at_temperature_one_without_truncation():
    assert probabilities(Sampling(temperature=0.0, top_k=1, min_p=0.9)) == pytest.approx(P)


def test_half_precision_logits_become_float32():
    logits = torch.randn(2, 5, dtype=torch.bfloat16)
    assert scaled_logits(logits, Sampling()).dtype == torch.float32


def test_the_input_is_not_changed():
    logits = torch.randn(3, 9)
    before = logits.clone()
    scaled_logits(logits, Sampling(temperature=0.7, top_k=4, top_p=0.8, min_p=0.1))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("seed", range(30))
def test_any_combination_equals_the_naive_distribution(seed):
    rng = random.Random(seed)
    sampling = Sampling(
        temperature=rng.choice([0.3, 1.0, 1.7]),
        top_k=rng.choice([0, 1, 7, 40]),
        top_p=rng.choice([1.0, 0.9, 0.5]),
        min_p=rng.choice([0.0, 0.02, 0.3]),
    )
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(seed)) * 2
    ours = scaled_logits(logits, sampling).log_softmax(-1)
    for row, logits_V in zip(ours, logits, strict=True):
        assert row.tolist() == pytest.approx(naive_logprobs(logits_V, sampling), abs=2e-6)


def test_entropy_counts_impossible_tokens_as_nothing():
    logprobs = torch.tensor([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]]).log()
    assert entropy(logprobs).tolist() == pytest.approx([1.5 * math.log(2), 0.0])


def test_sums_by_doubling_are_the_cumulative_sums():
    assert doubling_sum(torch.tensor([[1.0, 2, 0, 4, 8], [5, 0, 0, 0, 1]])).tolist() == [
        [1, 3, 3, 7, 15],
        [5, 5, 5, 5, 6],
    ]
    for width in (1, 2, 255, 256, 2400):
        x_NK = torch.rand(3, width, dtype=torch.float64)
        torch.testing.assert_close(doubling_sum(x_NK), x_NK.cumsum(-1), rtol=1e-14, atol=0.0)
