"""The central promise: the packed, chunked, micro-batched update is the naive one, for every loss."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from groupwise.config.schema import LOSSES, AlgoConfig
from groupwise.records import Sample
from tests.support.naive_update import Gradients
from tests.support.update_parity import (
    OPTIM,
    assert_same_gradients,
    naive_gradients,
    our_gradients,
    policy_and_plain,
    settings,
    some_samples,
)

GRID = [
    pytest.param(settings(loss, **changes), lora, id=f"{loss}-{'lora' if lora else 'full'}-{name}")
    for loss in LOSSES
    for name, lora, changes in [
        ("plain", False, {"correction": "none"}),
        ("kl frozen copy", False, {"beta": 0.04, "kl": "k1", "correction": "sequence_truncate"}),
        ("kl adapters off", True, {"beta": 0.04, "kl": "k3", "correction": "token_mask"}),
        ("entropy", True, {"entropy_bonus": 0.01, "correction": "sequence_mask", "correction_cap": 2.0}),
        ("everything", False, {"beta": 0.04, "kl": "k2", "entropy_bonus": 0.01, "clip_two_sided": 2.0}),
        ("off-policy mask", False, {"off_policy_mask": 0.02, "divergence_limit": 0.03}),
    ]
]


@pytest.mark.parametrize(("algo", "lora"), GRID)
def test_the_gradient_equals_the_naive_one(algo: AlgoConfig, lora: bool) -> None:
    policy, plain, reference = policy_and_plain(lora=lora)
    samples = some_samples(plain)
    (wanted,) = naive_gradients(plain, reference, samples, algo, OPTIM)
    (got,) = our_gradients(policy, samples, algo, OPTIM)
    assert_same_gradients(got, wanted)


@pytest.mark.parametrize("loss", LOSSES)
def test_several_epochs_and_minibatches_equal_a_naive_loop_with_old_log_probs(loss: str) -> None:
    policy, plain, reference = policy_and_plain(lora=False)
    samples = some_samples(plain, groups=5)
    algo = settings(loss, beta=0.04, entropy_bonus=0.01, clip_two_sided=1.5)
    optim = replace(OPTIM, epochs=2, minibatches=2)
    wanted = naive_gradients(plain, reference, samples, algo, optim)
    got = our_gradients(policy, samples, algo, optim)
    assert len(got) == len(wanted) == 4
    for ours, naive in zip(got, wanted, strict=True):
        assert_same_gradients(ours, naive, within=5e-5)  # rounding adds up over the steps
    for parameter, exact in zip(policy.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, exact.float(), rtol=1e-4, atol=1e-5)


ALL = settings("gspo", beta=0.04, entropy_bonus=0.01, correction="sequence_truncate")
"""Everything that could depend on how a batch is cut."""


@pytest.fixture(scope="module", params=[False, True], ids=["full", "lora"])
def usual(request: pytest.FixtureRequest) -> tuple[bool, list[Sample], Gradients]:
    """Samples and their gradient in the usual way, which the naive test has proven."""
    policy, plain, _ = policy_and_plain(lora=request.param)
    samples = some_samples(plain)
    (gradient,) = our_gradients(policy, samples, ALL, OPTIM)
    return request.param, samples, gradient


Usual = tuple[bool, list[Sample], Gradients]


@pytest.mark.parametrize("budget", [1, 20, 45, 100, 100_000])
def test_the_gradient_does_not_depend_on_the_micro_batch_size(usual: Usual, budget: int) -> None:
    lora, samples, wanted = usual
    policy, _, _ = policy_and_plain(lora=lora)
    (got,) = our_gradients(policy, samples, ALL, replace(OPTIM, micro_batch_tokens=budget))
    assert_same_gradients(got, wanted)


def test_the_gradient_does_not_depend_on_sharing_the_prompt(usual: Usual) -> None:
    lora, samples, wanted = usual
    policy, _, _ = policy_and_plain(lora=lora)
    apart = [replace(sample, group=number) for number, sample in enumerate(samples)]
    (got,) = our_gradients(policy, apart, ALL, OPTIM)
    assert_same_gradients(got, wanted)


def divided(sample: Sample) -> list[Sample]:
    """The sample as an agent leaves it that changes its prompt between two turns: in two parts."""
    last = len(sample.trained) - 1
    between = [n for n in range(sample.prefix, last) if not sample.trained[n]]
    if not between:
        return [sample]
    first, after = between[0], between[-1] + 1
    names = ("tokens", "trained", "logprobs", "entropies", "advantages")
    start = {name: getattr(sample, name)[:first] for name in names}
    mask = (False,) * after + sample.trained[after:]
    rest = tuple(value * flag for value, flag in zip(sample.advantages, mask, strict=True))
    whole = sample.length
    return [
        replace(sample, **start, rollout_length=whole),
        replace(sample, trained=mask, advantages=rest, prefix=after, prompt=1, part=1, rollout_length=whole),
    ]


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dapo", "dr_grpo", "cispo"])
def test_a_rollout_in_several_sequences_has_the_gradient_of_one(loss: str) -> None:
    algo = settings(loss, beta=0.04, entropy_bonus=0.01, correction="token_truncate")
    policy, plain, reference = policy_and_plain(lora=False)
    samples = some_samples(plain)
    (wanted,) = naive_gradients(plain, reference, samples, algo, OPTIM)
    parts = [part for sample in samples for part in divided(sample)]
    assert len(parts) == len(samples) + 3
    (got,) = our_gradients(policy, parts, algo, OPTIM, rollouts=len(samples))
    assert_same_gradients(got, wanted)


def test_the_gradient_does_not_depend_on_the_order_of_samples(usual: Usual) -> None:
    lora, samples, wanted = usual
    policy, _, _ = policy_and_plain(lora=lora)
    (got,) = our_gradients(policy, random.Random(5).sample(samples, len(samples)), ALL, OPTIM)
    assert_same_gradients(got, wanted)


def test_the_gradient_does_not_depend_on_gradient_checkpointing(usual: Usual) -> None:
    lora, samples, wanted = usual
    policy, _, _ = policy_and_plain(lora=lora, checkpointing=True)
    assert policy.model.is_gradient_checkpointing
    (got,) = our_gradients(policy, samples, ALL, OPTIM)
    assert_same_gradients(got, wanted)
