"""Chunked log-probabilities and entropies are those of full logits, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groupwise.model.ops import logprobs
from groupwise.model.ops.logprobs import token_logprobs
from groupwise.records import Sampling
from tests.support.naive_logprobs import TOKENS, VOCABULARY, inputs, naive, relative

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(temperature=0.0),
    Sampling(temperature=1.3, top_k=7),
    Sampling(top_p=0.7),
    Sampling(temperature=0.8, top_p=0.9, top_k=20, min_p=0.02),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_values_and_all_gradients_equal_those_of_full_logits(
    sampling: Sampling, bias: bool, entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 10 * VOCABULARY)
    leaves, tokens_N = inputs(bias=bias)
    coefficients_N, entropy_coefficients_N = torch.randn(TOKENS), torch.randn(TOKENS)

    def loss(results: tuple[Tensor, Tensor]) -> Tensor:
        total = (results[0] * coefficients_N).sum()
        return total + (results[1] * entropy_coefficients_N).sum() if entropy_gradient else total

    ours = token_logprobs(
        leaves[0],
        leaves[1],
        leaves[2] if bias else None,
        tokens_N,
        sampling,
        entropy_gradient=entropy_gradient,
    )
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = naive(exact_leaves, tokens_N, sampling)
    for got, wanted in zip(ours, exact, strict=True):
        assert relative(got, wanted) < 1e-5
    loss(ours).backward()
    loss(exact).backward()
    for leaf, exact_leaf in zip(leaves, exact_leaves, strict=True):
        assert relative(leaf.grad, exact_leaf.grad) < 1e-5


@pytest.mark.parametrize("chunk", [1, 3, TOKENS - 1, TOKENS, 1000])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_chunk_size_changes_nothing(chunk: int, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def gradient() -> Tensor:
        (hidden, weight), tokens_N = inputs()
        chosen_N, _ = token_logprobs(
            hidden, weight.requires_grad_(not frozen), None, tokens_N, Sampling(), entropy_gradient=False
        )
        (chosen_N * torch.linspace(-1, 1, TOKENS)).sum().backward()
        return hidden.grad

    whole = gradient()
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", chunk * VOCABULARY)
    assert relative(gradient(), whole) < 1e-6


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_a_frozen_output_layer_passes_on_the_same_gradient(
    sampling: Sampling, entropy_gradient: bool
) -> None:
    gradients = []
    for frozen in (False, True):
        (hidden, weight), tokens_N = inputs()
        chosen_N, entropy_N = token_logprobs(
            hidden,
            weight.requires_grad_(not frozen),
            None,
            tokens_N,
            sampling,
            entropy_gradient=entropy_gradient,
        )
        (chosen_N.sum() + (entropy_N.square().sum() if entropy_gradient else 0.0)).backward()
        gradients.append(hidden.grad)
        assert (weight.grad is None) == frozen
    assert relative(gradients[1], gradients[0]) < 1e-5


def test_entropy_carries_gradient_only_when_asked_to() -> None:
    (hidden, weight), tokens_N = inputs()
    for wanted in (False, True):
        _, entropy_N = token_logprobs(hidden, weight, None, tokens_N, Sampling(), entropy_gradient=wanted)
        assert entropy_N.requires_grad == wanted


@pytest.fixture
def _portable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some virtual machines announce matrix instructions for bfloat16 that they do not have."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@pytest.mark.usefixtures("_portable_kernels")
@pytest.mark.parametrize("frozen", [False, True])
def test_half_precision_weights_lose_no_more_than_their_rounding(frozen: bool) -> None:
    (hidden, weight), tokens_N = inputs(dtype=torch.bfloat16)
    chosen_N, entropy_N = token_logprobs(
        hidden, weight.requires_grad_(not frozen), None, tokens_N, Sampling(), entropy_gradient=False
    )
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    exact_N, exact_entropy_N = naive(exact_leaves, tokens_N, Sampling())
    assert chosen_N.dtype == entropy_N.dtype == torch.float32
    assert relative(chosen_N, exact_N) < 1e-2
    assert relative(entropy_N, exact_entropy_N) < 1e-2
    chosen_N.sum().backward()
    exact_N.sum().backward()
    for leaf, exact in zip((hidden,) if frozen else (hidden, weight), exact_leaves, strict=False):
        assert leaf.grad.dtype == torch.bfloat16
        assert relative(leaf.grad, exact.grad) < 2e-2


class Largest(TorchDispatchMode):
    """Remembers the most elements that any tensor had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_p=0.9)])
def test_logits_of_all_tokens_never_exist_at_once(
    frozen: bool, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, vocabulary, width, chunk = 400, 300, 4, 12
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", chunk * vocabulary)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=not frozen)
    chosen = torch.randint(vocabulary, (tokens,))
    with Largest() as largest:
        logprobs_N, _ = token_logprobs(hidden, weight, None, chosen, sampling, entropy_gradient=False)
        logprobs_N.sum().backward()
    assert hidden.grad is not None
    assert largest.elements == chunk * vocabulary
