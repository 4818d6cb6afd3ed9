"""The GPU's log-probabilities, their kernel interpreted, against full logits in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tests.support.triton_interpreter  # noqa: F401  (before any kernel is imported)
from groupwise.model.ops import triton_kernels
from groupwise.model.ops.triton_kernels import FusedTokenLogprobs
from groupwise.records import Sampling
from groupwise.training.resources.run_estimate import GPU_CHUNK_LOGITS
from tests.support.naive_logprobs import VOCABULARY, inputs, naive, relative

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def values_and_gradients(leaves: list[Tensor], tokens_N: Tensor, *, temperature: float) -> list[Tensor]:
    """(logprobs, entropy, and the gradient of every leaf that has one) of the fused computation."""
    hidden, weight, *bias = leaves
    logprobs_N, entropy_N = FusedTokenLogprobs.apply(
        hidden, weight, bias[0] if bias else None, tokens_N, temperature
    )
    (logprobs_N * torch.linspace(-1, 2, len(tokens_N))).sum().backward()
    return [logprobs_N, entropy_N, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen_head", [False, True])
def test_values_and_gradients_equal_those_of_full_logits(
    temperature: float, bias: bool, frozen_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_kernels, "CHUNK_LOGITS", 10 * VOCABULARY)
    leaves, tokens_N = inputs(bias=bias)
    for leaf in leaves[1:]:
        leaf.requires_grad_(not frozen_head)
    got = values_and_gradients(leaves, tokens_N, temperature=temperature)

    exact = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    logprobs_N, entropy_N = naive(exact, tokens_N, Sampling(temperature=temperature))
    (logprobs_N * torch.linspace(-1, 2, len(tokens_N))).sum().backward()
    wanted = [logprobs_N, entropy_N, *(leaf.grad for leaf in exact if leaf.grad is not None)]

    assert len(got) == len(wanted) == (3 if frozen_head else 4 + bias)
    for one, other in zip(got, wanted, strict=True):
        assert relative(one, other) < 1e-5


def test_a_vocabulary_wider_than_a_block_is_read_to_its_end() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 4), torch.randn(9000, 4)
    tokens_N = torch.tensor([0, 8999, 4096])
    logprobs_N, entropy_N = FusedTokenLogprobs.apply(hidden, weight, None, tokens_N, 1.0)
    exact_NV = (hidden.double() @ weight.double().T).log_softmax(-1)
    assert relative(logprobs_N, exact_NV[torch.arange(3), tokens_N]) < 1e-5
    assert relative(entropy_N, -(exact_NV.exp() * exact_NV).sum(-1)) < 1e-5


@pytest.mark.parametrize("frozen_head", [False, True])
def test_a_stretch_without_trained_tokens_has_no_values_and_a_gradient_of_zeros(frozen_head: bool) -> None:
    hidden = torch.randn(0, 4, requires_grad=True)
    weight = torch.randn(7, 4, requires_grad=not frozen_head)
    values = FusedTokenLogprobs.apply(hidden, weight, None, torch.zeros(0, dtype=torch.int64), 1.0)
    assert [tuple(x.shape) for x in values] == [(0,), (0,)]
    values[0].sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, 4)
    assert frozen_head or torch.equal(weight.grad, torch.zeros(7, 4))


def test_a_token_that_the_model_rules_out_adds_nothing_to_the_entropy() -> None:
    hidden, weight = torch.ones(1, 1), torch.tensor([[1.0], [-float("inf")], [2.0]])
    logprobs_N, entropy_N = FusedTokenLogprobs.apply(hidden, weight, None, torch.tensor([2]), 1.0)
    possible = torch.tensor([1.0, 2.0]).log_softmax(0)
    torch.testing.assert_close(logprobs_N, possible[1:])
    torch.testing.assert_close(entropy_N, -(possible.exp() * possible).sum()[None])


def test_the_estimate_of_memory_knows_how_many_logits_are_held():
    assert triton_kernels.CHUNK_LOGITS == GPU_CHUNK_LOGITS
