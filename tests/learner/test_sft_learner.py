"""Supervised steps are cross entropy on the answers, and they teach."""

from __future__ import annotations

import copy

import pytest
import torch

from groupwise.learner.sft_learner import supervised_step, worked_sample
from groupwise.records import Sample
from tests.support.small_models import policy_of, small_model

SAMPLES = [
    worked_sample((5, 6, 7), (8, 9, 2), group=0),
    worked_sample((5, 6, 7), (2,), group=0),
    worked_sample((10,), (11, 12, 13, 14, 2), group=1),
]


def cross_entropy(model: torch.nn.Module) -> torch.Tensor:
    """Of the answers' nine tokens, by plain transformers, one sample at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for sample in SAMPLES:
        tokens = torch.tensor(sample.tokens)
        logits = model(tokens[None]).logits[0, sample.prefix - 1 : -1]
        total = total + torch.nn.functional.cross_entropy(logits, tokens[sample.prefix :], reduction="sum")
    return total / 9


def test_a_worked_sample_trains_the_answer_and_its_end_token_alone() -> None:
    sample = worked_sample((5, 6), (7, 2), group=3)
    assert isinstance(sample, Sample)
    assert sample.tokens == (5, 6, 7, 2)
    assert sample.trained == (False, False, True, True)
    assert (sample.prefix, sample.group) == (2, 3)


@pytest.mark.parametrize("budget", [1, 10_000])
def test_loss_and_gradient_are_those_of_cross_entropy(budget: int) -> None:
    model = small_model()
    plain = copy.deepcopy(model).double()
    policy = policy_of(model)
    optimizer = torch.optim.SGD(policy.trainable().values(), lr=0.0)
    got: dict[str, torch.Tensor] = {}
    optimizer.register_step_pre_hook(
        lambda *_: got.update({name: p.grad.clone() for name, p in policy.trainable().items()})
    )
    loss = supervised_step(policy, optimizer, SAMPLES, rate=0.0, max_grad_norm=1e9, micro_batch_tokens=budget)
    expected = cross_entropy(plain)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in plain.named_parameters():
        assert float((got[name] - parameter.grad).norm() / parameter.grad.norm()) < 1e-5, name


def test_steps_lower_the_loss_at_the_given_rate() -> None:
    policy = policy_of(small_model())
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=1.0)
    losses = [
        supervised_step(policy, optimizer, SAMPLES, rate=1e-2, max_grad_norm=1.0, micro_batch_tokens=100)
        for _ in range(15)
    ]
    assert losses[-1] < 0.2 * losses[0]
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert all(p.grad is None for p in policy.trainable().values())
