"""The shorter rotary attention against the modules it stands in for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from groupwise.model.attention import hf_interface
from groupwise.model.attention.packed import PackedLayout
from groupwise.model.ops.rotary import rotate, sine_halves, use_fused_rotary

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
}
TOKENS_T = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5])
POSITIONS_T = torch.tensor([0, 1, 2, 3, 4, 4, 5, 4, 5])
GROUPS = [(4, (1, 2, 2))]


def small_model(config: type) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SIZES))
    hf_interface.register()
    model.set_attn_implementation(hf_interface.NAME)
    return model


def output_and_gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    layout = PackedLayout.build(GROUPS, device=torch.device("cpu"))
    output = model(
        input_ids=TOKENS_T[None], position_ids=POSITIONS_T[None], use_cache=False, layout=layout
    ).logits
    output.sin().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output.detach(), gradients


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, MistralConfig])
def test_output_and_gradients_are_those_of_the_module(config: type) -> None:
    model = small_model(config)
    own, own_gradients = output_and_gradients(model)
    use_fused_rotary(model)
    attentions = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    assert len(attentions) == 2
    assert all("forward" in vars(module) for module in attentions)
    short, gradients = output_and_gradients(model)
    torch.testing.assert_close(short, own)
    assert gradients.keys() == own_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, own_gradients[name], msg=name)


def test_attention_that_norms_its_queries_is_left_alone() -> None:
    model = small_model(Qwen3Config)
    use_fused_rotary(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_turn_worked_by_hand() -> None:
    """A head (1, 2 | 3, 4) turned by 90° in its first pair (1, 3) and by 0° in its second (2, 4)."""
    x_TND = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    cos_T1D = torch.tensor([[[0.0, 1.0, 0.0, 1.0]]])
    sin_T1D = torch.tensor([[[1.0, 0.0, 1.0, 0.0]]])
    turned = rotate(x_TND, cos_T1D, *sine_halves(sin_T1D))
    torch.testing.assert_close(turned, torch.tensor([[[-3.0, 2.0, 1.0, 4.0]]]))


def test_without_a_layout_the_module_answers_as_transformers_wrote_it() -> None:
    model = small_model(LlamaConfig)
    model.set_attn_implementation("sdpa")
    own = model.generate(TOKENS_T[None], max_new_tokens=5, do_sample=False)
    model.set_attn_implementation(hf_interface.NAME)
    use_fused_rotary(model)
    model.set_attn_implementation("sdpa")
    assert torch.equal(model.generate(TOKENS_T[None], max_new_tokens=5, do_sample=False), own)
