"""The sampler: noise that belongs to one token alone, and draws that follow the distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from groupwise.engine.sampler import draw, pick, uniforms
from groupwise.errors import InvariantError
from groupwise.model.ops.logits import scaled_logits
from groupwise.records import Sampling, derive_seed


def noise_of(*parts: int | str, position: int = 0) -> float:
    seeds = np.array([derive_seed(*parts)], dtype=np.uint64)
    return float(uniforms(seeds, np.array([position], dtype=np.uint64))[0])


def noises(count: int) -> torch.Tensor:
    """One number for each of `count` derived seeds."""
    seeds = np.array([derive_seed(0, "test", member) for member in range(count)], dtype=np.uint64)
    return torch.from_numpy(uniforms(seeds, np.zeros(count, dtype=np.uint64)))


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    """Return the statistic over the tokens that are possible; fails if another was drawn."""
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0
    expected = probs.double()[probs > 0] * len(tokens)
    return float(((counts[probs > 0] - expected) ** 2 / expected).sum())


def test_noise_is_the_published_splitmix64_sequence():
    seeds, positions = np.zeros(2, dtype=np.uint64), np.arange(2, dtype=np.uint64)
    first, second = 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4
    assert uniforms(seeds, positions).tolist() == [(first >> 11) / 2**53, (second >> 11) / 2**53]


def test_noise_differs_by_every_one_of_seed_step_example_member_and_position():
    kinds = [
        noise_of(0, 0, "a", 0),
        noise_of(1, 0, "a", 0),
        noise_of(0, 1, "a", 0),
        noise_of(0, 0, "b", 0),
        noise_of(0, 0, "a", 1),
        noise_of(0, 0, "a", 0, position=1),
    ]
    assert len(set(kinds)) == len(kinds)
    assert noise_of(0, 0, "a", 0) == kinds[0]


def test_seeds_tell_apart_parts_that_look_the_same_when_joined():
    seeds = [
        derive_seed(1, 23),
        derive_seed(12, 3),
        derive_seed("1/2", 3),
        derive_seed(1, "2/3"),
        derive_seed("1", 23),
    ]
    assert len(set(seeds)) == len(seeds)


def test_seeds_fit_a_signed_64_bit_integer():
    assert all(0 <= derive_seed(part) < 2**63 for part in range(1000))


def test_noise_lies_in_the_half_open_unit_interval_and_is_even():
    seeds = np.array([0, 2**63 - 1, 2**64 - 1, *(derive_seed(n) for n in range(5000))], dtype=np.uint64)
    noise = np.concatenate([uniforms(seeds, np.full(len(seeds), p, dtype=np.uint64)) for p in (0, 1, 10**6)])
    assert noise.min() >= 0.0
    assert noise.max() < 1.0
    assert len(np.unique(noise)) == len(noise)
    assert noise.mean() == pytest.approx(0.5, abs=0.01)
    assert noise.var() == pytest.approx(1 / 12, abs=0.003)


def test_neighbouring_positions_and_members_are_uncorrelated():
    seeds = np.array([derive_seed(member) for member in range(5000)], dtype=np.uint64)
    now, later = (uniforms(seeds, np.full(5000, p, dtype=np.uint64)) for p in (0, 1))
    assert abs(np.corrcoef(now, later)[0, 1]) < 0.05
    assert abs(np.corrcoef(now[:-1], now[1:])[0, 1]) < 0.05


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(), 8),
        (Sampling(temperature=0.6), 8),
        (Sampling(temperature=1.5, top_k=5), 5),
        (Sampling(top_p=0.75), 4),
        (Sampling(top_k=6, top_p=0.9, min_p=0.4), 4),
    ],
)
def test_frequencies_match_the_distribution(sampling, possible):
    probs = torch.tensor([0.3, 0.02, 0.2, 0.03, 0.15, 0.05, 0.15, 0.1])
    logits_NV = probs.log().expand(20_000, -1)
    tokens, logprobs, _ = draw(logits_NV, sampling, noises(20_000))
    expected = scaled_logits(logits_NV[:1], sampling).softmax(-1)[0]
    assert int((expected > 0).sum()) == possible
    # 24.3 is the 99.9 % point at 7 degrees of freedom, and smaller ones have smaller points.
    assert chi_square(tokens, expected) < 24.3
    assert torch.allclose(logprobs, expected[tokens].log(), atol=1e-6)


def test_frequencies_match_over_many_chunks_of_vocabulary():
    probs = torch.rand(200, generator=torch.Generator().manual_seed(0))
    probs[64:128] = 0.0
    probs /= probs.sum()
    tokens = pick(probs.expand(40_000, -1), noises(40_000))
    assert chi_square(tokens, probs) < 191  # 99.9 % point at 135 degrees of freedom


def test_the_token_is_the_one_whose_share_of_the_unit_interval_holds_the_noise():
    probs = torch.tensor([0.25, 0.0, 0.5, 0.25])
    noise = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert pick(probs.expand(6, -1), noise).tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("seed", range(5))
def test_a_token_of_probability_zero_is_never_drawn_whatever_the_noise(seed):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(150, generator=generator) ** 8
    probs[torch.rand(150, generator=generator) < 0.6] = 0.0
    probs[:3], probs[-9:] = 0.0, 0.0
    edges = (probs.double().cumsum(0) / probs.double().sum()).clamp(max=1 - 2**-53)
    noise = torch.cat([edges, (edges - 1e-16).clamp(min=0.0), torch.tensor([0.0, 1 - 2**-53]).double()])
    assert (probs[pick(probs.expand(len(noise), -1), noise)] > 0).all()


def test_a_tail_too_thin_for_float32_sums_is_still_drawn_from():
    tail = 1e-10  # a thousand of these added to a float32 1 change nothing
    probs = torch.full((1000,), tail)
    probs[0] = 1.0
    from_the_end = torch.arange(900)
    noise = 1 - (from_the_end.double() + 0.5) * tail
    assert pick(probs.expand(900, -1), noise).tolist() == (999 - from_the_end).tolist()


def test_logprobs_are_those_of_the_truncated_distribution_renormalised():
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    tokens, logprobs, entropies = draw(logits, Sampling(top_k=2), torch.tensor([0.9], dtype=torch.float64))
    assert tokens.tolist() == [1]
    assert logprobs.tolist() == pytest.approx([math.log(1 / 3)])
    assert entropies.tolist() == pytest.approx([math.log(3) - 2 / 3 * math.log(2)])


def test_greedy_takes_the_likeliest_and_the_first_among_equals():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    for noise in (0.0, 0.999):
        tokens, _, _ = draw(logits, Sampling(temperature=0.0), torch.tensor([noise], dtype=torch.float64))
        assert tokens.tolist() == [1]


def test_a_row_is_drawn_the_same_alone_and_in_company():
    logits, noise = torch.randn(6, 300, generator=torch.Generator().manual_seed(1)), noises(6)
    sampling = Sampling(temperature=0.9, top_p=0.95)
    together = draw(logits, sampling, noise)[0]
    alone = [draw(logits[n : n + 1], sampling, noise[n : n + 1])[0].item() for n in range(6)]
    assert together.tolist() == alone


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0), Sampling(top_p=0.9)])
@pytest.mark.parametrize("planted", [math.nan, math.inf])
def test_logits_that_are_not_finite_stop_the_run(sampling, planted):
    logits = torch.zeros(2, 5)
    logits[1, 3] = planted
    with pytest.raises(InvariantError, match="the entropy of the policy is nan"):
        draw(logits, sampling, noises(2))
