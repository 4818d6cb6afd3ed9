"""The shorter RMSNorm against the modules it stands in for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from groupwise.model.ops.fused_modules import use_fused_rmsnorm


def with_some_weight(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    nn.init.normal_(norm.weight, mean=1.0)  # type: ignore[arg-type]
    return norm


def run(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    norm.zero_grad()
    x = x.clone().requires_grad_()
    y = norm(x)
    y.sin().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad, norm.weight.grad  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("shape", [(5, 8), (1, 4, 8), (2, 3, 4, 8)])
def test_output_and_gradients_are_those_of_the_module(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    norm, x = with_some_weight(kind(8, eps=1e-5)), 3 * torch.randn(shape)
    own = run(norm, x)
    use_fused_rmsnorm(norm)
    assert "forward" in vars(norm)
    for ours, theirs in zip(run(norm, x), own, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_worked_by_hand() -> None:
    norm = LlamaRMSNorm(2, eps=0.0)
    norm.weight.data = torch.tensor([1.0, 2.0])
    use_fused_rmsnorm(norm)
    # x = (3, 4): mean square 12.5, so x / √12.5, and the second one twice.
    torch.testing.assert_close(norm(torch.tensor([[3.0, 4.0]])), torch.tensor([[0.848528, 2.262742]]))


def test_a_frozen_weight_gets_no_gradient() -> None:
    norm = with_some_weight(LlamaRMSNorm(4))
    norm.requires_grad_(False)
    use_fused_rmsnorm(norm)
    _, dx, dweight = run(norm, torch.randn(3, 4))
    assert dweight is None
    assert dx.abs().max() > 0


def test_a_norm_that_adds_one_to_its_weight_is_left_alone() -> None:
    norm = with_some_weight(GemmaRMSNorm(4))
    norm.variance_epsilon = norm.eps  # as if it named it like the others
    x = torch.randn(3, 4)
    own = norm(x)
    use_fused_rmsnorm(norm)
    assert "forward" not in vars(norm)
    torch.testing.assert_close(norm(x), own)
