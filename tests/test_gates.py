"""The gated SiLU that keeps less, against the modules it stands in for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, LlamaConfig, Qwen2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from groupwise.model.gates import shorten_gates

SIZES = {"hidden_size": 6, "intermediate_size": 10, "num_attention_heads": 2, "num_key_value_heads": 2}


def run(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and the gradients of the input and of every weight."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x)
    y.sin().sum().backward()
    gradients = [x.grad, *(p.grad for p in module.parameters())]
    assert len(gradients) == 4
    return [y.detach(), *gradients]  # type: ignore[list-item]


@pytest.mark.parametrize("module", [LlamaMLP(LlamaConfig(**SIZES)), Qwen2MLP(Qwen2Config(**SIZES))])
def test_output_and_gradients_are_those_of_the_module(module: nn.Module) -> None:
    torch.manual_seed(0)
    x = 3 * torch.randn(1, 5, 6)
    own = run(module, x)
    shorten_gates(module)
    assert "forward" in vars(module)
    for ours, theirs in zip(run(module, x), own, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_gate_of_another_function_is_left_alone() -> None:
    module = Gemma2MLP(Gemma2Config(**SIZES))
    shorten_gates(module)
    assert "forward" not in vars(module)
