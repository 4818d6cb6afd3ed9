"""Supervised steps are cross entropy on the answers, and they teach."""

from __future__ import annotations

import copy

import pytest
import torch

from groupwise.config import read_config
from groupwise.errors import ConfigError
from groupwise.learner.sft_learner import SFTLearner, supervised_step, worked_sample
from groupwise.model.policy import Policy
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


def sft_learner(policy: Policy) -> SFTLearner:
    # A large eps makes AdamW's step proportional to the gradient, rather than to its sign.
    optim = read_config(overrides=["optim.eps=1.0", "optim.learning_rate=0.1"]).resolve().optim
    return SFTLearner(policy, optim=optim, max_steps=2)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")]
)
def test_memory_that_runs_out_halves_the_passes_and_leaves_the_gradient_as_it_is(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policies = [policy_of(small_model()) for _ in range(2)]
    whole, cramped = map(sft_learner, policies)
    gradient, failures = policies[1].backward, [error, error]

    def backward(loss: torch.Tensor) -> None:
        gradient(loss)  # the gradient is there already when memory runs out
        if failures:
            raise failures.pop()

    monkeypatch.setattr(policies[1], "backward", backward)
    cramped.micro_batch_tokens = 40
    reports = [one.update(SAMPLES) for one in (whole, cramped)]
    assert cramped.micro_batch_tokens == 10
    assert caplog.text.count("(same gradient)") == 2
    assert reports[1] == pytest.approx(reports[0], rel=1e-5)
    for one, other in zip(*(policy.trainable().values() for policy in policies), strict=True):
        torch.testing.assert_close(one, other)


def test_one_example_too_long_for_the_memory_is_the_users_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(self: Policy, loss: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Policy, "backward", backward)
    with pytest.raises(ConfigError, match=r"a single example does not fit in memory; .* sft.max_length"):
        sft_learner(policy_of(small_model())).update(SAMPLES)
