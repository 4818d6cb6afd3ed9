"""The sampler-trainer correction and the KL penalty: hand-worked numbers and exact expectations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from groupwise.algo.losses import KL_ESTIMATORS, importance_weights, kl_penalty, sum_by_sequence
from groupwise.config import schema


def weights(kind: str, ratios: list[float], sequences: list[int]) -> tuple[list[float], dict[str, Tensor]]:
    old_N = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    found_N, metrics = importance_weights(
        old_N, torch.zeros_like(old_N), torch.tensor(sequences), kind=kind, cap=2.0
    )
    assert not found_N.requires_grad
    return found_N.tolist(), metrics


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", [1, 1, 1, 1, 1]),
        ("token_truncate", [0.4, 1.5, 1.8, 2.0, 0.25]),  # the ratios, 2.5 held at 2
        ("token_mask", [0.0, 1.5, 1.8, 0.0, 0.0]),  # outside [0.5, 2] is dropped
        ("sequence_truncate", [0.6, 0.6, 2.0, 2.0, 0.25]),  # products 0.6, 4.5, 0.25
        ("sequence_mask", [0.6, 0.6, 0.0, 0.0, 0.0]),
    ],
)
def test_each_correction_matches_the_hand_worked_weights(kind, expected):
    assert kind in schema.CORRECTIONS
    found, _ = weights(kind, [0.4, 1.5, 1.8, 2.5, 0.25], [0, 0, 1, 1, 2])
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("kind", [kind for kind in schema.CORRECTIONS if kind != "none"])
def test_every_correction_is_one_where_sampler_and_trainer_agree(kind):
    found, metrics = weights(kind, [1.0, 1.0], [0, 0])
    assert found == [1.0, 1.0]
    assert metrics["policy/correction_cut"] == 0


def test_the_diagnostics_count_what_was_cut():
    _, truncated = weights("token_truncate", [0.4, 1.5, 1.8, 2.5, 0.25], [0, 0, 1, 1, 2])
    _, masked = weights("token_mask", [0.4, 1.5, 1.8, 2.5, 0.25], [0, 0, 1, 1, 2])
    assert truncated["policy/correction"].item() == pytest.approx(5.95)
    assert truncated["policy/correction_min"].item() == pytest.approx(0.25)
    assert (truncated["policy/correction_cut"].item(), masked["policy/correction_cut"].item()) == (1, 3)


@pytest.mark.parametrize(("kind", "expected"), [("sequence_truncate", 2.0), ("sequence_mask", 0.0)])
def test_a_weight_that_overflows_is_still_bounded(kind, expected):
    old_N = torch.full((2,), 500.0)
    found_N, _ = importance_weights(
        old_N, torch.zeros(2), torch.zeros(2, dtype=torch.int64), kind=kind, cap=2.0
    )
    assert found_N.tolist() == [expected, expected]


def test_sums_by_sequence_come_back_to_every_token_whatever_the_order():
    found_N = sum_by_sequence(torch.tensor([1.0, 10.0, 2.0, 20.0]), torch.tensor([1, 0, 1, 0]))
    assert found_N.tolist() == [3, 30, 3, 30]


@pytest.mark.parametrize(
    ("kind", "expected"), [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))]
)
def test_each_kl_estimate_matches_the_hand_worked_value(kind, expected):
    logprob_N, reference_N = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    penalty_N = kl_penalty(logprob_N, reference_N, logprob_N, kind=kind)
    assert penalty_N.item() == pytest.approx(expected)


def test_every_kl_estimate_of_the_settings_exists():
    assert set(KL_ESTIMATORS) == set(schema.KL_ESTIMATORS)


# One token from a vocabulary of three, so that expectations are exact sums: the policy drifted from the old
# policy that drew the token.
LOGITS = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64)
OLD_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
REFERENCE_V = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)


def gradient(loss: Tensor, logits_V: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logits_V)[0]


def expected_gradient(kind: str, *, mended: bool) -> Tensor:
    """The mean gradient over tokens drawn from the old policy, of the penalty or of the bare estimate."""
    logits_V = LOGITS.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(0)
    if mended:
        penalty_V = kl_penalty(logprobs_V, REFERENCE_V.log(), OLD_V.log(), kind=kind)
        return gradient((OLD_V * penalty_V).sum(), logits_V)
    policy_V = logprobs_V.exp().detach()
    return gradient((policy_V * KL_ESTIMATORS[kind](logprobs_V - REFERENCE_V.log())).sum(), logits_V)


def exact_gradient(*, reverse: bool) -> Tensor:
    logits_V = LOGITS.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(0)
    if reverse:
        return gradient((logprobs_V.exp() * (logprobs_V - REFERENCE_V.log())).sum(), logits_V)
    return gradient((REFERENCE_V * (REFERENCE_V.log() - logprobs_V)).sum(), logits_V)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_penalty_has_the_gradient_of_the_kl_off_policy(kind):
    torch.testing.assert_close(expected_gradient(kind, mended=True), exact_gradient(reverse=True))


def test_the_bare_estimates_have_the_gradients_the_documentation_says():
    torch.testing.assert_close(expected_gradient("k1", mended=False), torch.zeros_like(LOGITS))
    torch.testing.assert_close(expected_gradient("k2", mended=False), exact_gradient(reverse=True))
    torch.testing.assert_close(expected_gradient("k3", mended=False), exact_gradient(reverse=False))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_penalty_is_an_unbiased_value_of_the_kl_off_policy(kind):
    logprobs_V = LOGITS.log_softmax(0)
    penalty_V = kl_penalty(logprobs_V, REFERENCE_V.log(), OLD_V.log(), kind=kind)
    exact = (logprobs_V.exp() * (logprobs_V - REFERENCE_V.log())).sum()
    torch.testing.assert_close((OLD_V * penalty_V).sum(), exact)


def test_k2_and_k3_pull_alike_on_every_token():
    def pull(kind: str) -> Tensor:
        logprobs_N = torch.tensor([-0.5, -1.0, -2.0], dtype=torch.float64).requires_grad_()
        old_N = torch.tensor([-0.6, -1.0, -1.5], dtype=torch.float64)
        reference_N = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64)
        return gradient(kl_penalty(logprobs_N, reference_N, old_N, kind=kind).sum(), logprobs_N)

    torch.testing.assert_close(pull("k2"), pull("k3"))
