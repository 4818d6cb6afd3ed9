"""Modules that look like those we know and compute something else keep their own passes, in any precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, GemmaConfig, LlamaConfig, OlmoConfig, Qwen2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.seed_oss.configuration_seed_oss import SeedOssConfig
from transformers.models.seed_oss.modeling_seed_oss import SeedOssMLP

from groupwise.model.attention import hf_interface
from groupwise.model.load import use_fused_ops
from groupwise.model.ops.equivalence import random_states, random_states_kept
from groupwise.model.ops.fused_modules import use_fused_swiglu

WIDE = {"hidden_size": 2048, "intermediate_size": 4096}
SMALL = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "pad_token_id": 0,
}


def drawn(module: Any, *, std: float = 0.02, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module.to(dtype).eval()


def is_short(module: Any) -> bool:
    return "forward" in vars(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gate_is_told_from_another_in_any_precision(dtype: torch.dtype) -> None:
    """In bfloat16 a wide block with GELU differs from one with SiLU by less than rounding may."""
    ours, other = LlamaMLP(LlamaConfig(**WIDE)), Gemma2MLP(Gemma2Config(**WIDE))
    for module in (ours, other):
        use_fused_swiglu(drawn(module, dtype=dtype))
        assert next(module.parameters()).dtype == dtype
    assert is_short(ours)
    assert not is_short(other)


def test_noise_that_comes_in_training_alone_is_kept() -> None:
    config = SeedOssConfig(hidden_size=16, intermediate_size=32, residual_dropout=0.5)
    block, x = drawn(SeedOssMLP(config), std=0.5), torch.randn(4, 16)
    state = torch.get_rng_state()
    use_fused_swiglu(block)
    assert torch.equal(torch.get_rng_state(), state)
    assert not block.training
    block.train()
    assert not torch.equal(block(x), block(x))


def test_a_block_of_zeros_tells_nothing_and_is_left_alone() -> None:
    block = drawn(Gemma2MLP(Gemma2Config(hidden_size=16, intermediate_size=10)))
    nn.init.zeros_(block.down_proj.weight)
    use_fused_swiglu(block)
    assert not is_short(block)


def model_of(config: Any, *, std: float = 0.5) -> Any:
    hf_interface.register()
    model = drawn(AutoModelForCausalLM.from_config(config), std=std)
    model.set_attn_implementation(hf_interface.NAME)
    return model


@pytest.mark.parametrize("clip", [None, 8.0])
def test_queries_that_are_clamped_keep_their_clamp(clip: float | None) -> None:
    model = model_of(OlmoConfig(**SMALL, clip_qkv=clip))
    use_fused_ops(model)
    assert [is_short(layer.self_attn) for layer in model.model.layers] == [clip is None] * 2


def test_every_part_of_a_plain_layer_is_shortened_and_another_gate_is_not() -> None:
    for config, expected in ((Qwen2Config(**SMALL), True), (GemmaConfig(**SMALL, head_dim=8), False)):
        model = model_of(config, std=0.2)
        use_fused_ops(model)
        for layer in model.model.layers:
            assert is_short(layer.self_attn)
            assert is_short(layer.mlp) == expected
            assert is_short(layer.input_layernorm) == expected  # Gemma's adds 1 to the weight


def test_the_random_state_of_mps_is_read_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the generator of a device that this machine may not have."""
    held = [torch.zeros(2, dtype=torch.uint8)]
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda device: held[0].clone())
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state, device: held.__setitem__(0, state))
    device = torch.device("mps")
    with random_states_kept(device):
        held[0] += 1
        assert random_states(device)[1].tolist() == [1, 1]
    assert held[0].tolist() == [0, 0]
