"""Models of many families: each computes what plain transformers computes, or is refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from groupwise.config.schema import EngineConfig, LoraConfig, ModelConfig
from groupwise.engine.engine import Engine
from groupwise.errors import ConfigError
from groupwise.model.adapters.merge_adapters import merge
from groupwise.model.attention.compatibility import check_attention
from groupwise.model.load import load_policy
from groupwise.model.policy import Policy
from groupwise.records import Request, Sampling
from tests.support.small_models import SIZES, tiny_tokenizer

GPT2 = {"vocab_size": 272, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
ENDS = {"bos_token_id": None, "eos_token_id": 268, "pad_token_id": 0}
SHAPE = {**SIZES, **ENDS, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def saved(config: Any, folder: Path) -> Path:
    model_of(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def policy_in(folder: Path, lora: LoraConfig) -> Policy:
    return load_policy(ModelConfig(name=str(folder), device="cpu", dtype="float32"), lora)


def shaken(policy: Policy) -> Policy:
    """What is trained, moved as if by training."""
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=noise)
    return policy


@pytest.mark.parametrize(
    "config",
    [
        transformers.MixtralConfig(**SHAPE, num_local_experts=4),
        transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS),
        transformers.Glm4MoeConfig(
            **SHAPE, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        ),
        transformers.GraniteConfig(**SHAPE, attention_multiplier=0.3, residual_multiplier=0.4),
        transformers.Olmo2Config(**SHAPE),
        transformers.Phi3Config(**SHAPE),
        transformers.GPTNeoXConfig(**{**SHAPE, "num_key_value_heads": None}),
    ],
    ids=lambda config: config.model_type,
)
def test_answers_have_the_log_probabilities_of_plain_transformers(config: Any, tmp_path: Path) -> None:
    folder = saved(config, tmp_path / "model")
    policy = policy_in(folder, LoraConfig(r=0))
    asked = [Request(prompt=tuple(range(20, 31)), seeds=(1, 2)), Request(prompt=(40, 50, 60), seeds=(3,))]
    groups = Engine(policy, EngineConfig()).generate(asked, Sampling(max_tokens=12))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for request, group in zip(asked, groups, strict=True):
        for answer in group:
            tokens = torch.tensor(request.prompt + answer.tokens)
            with torch.no_grad():
                rows = plain(tokens[None]).logits[0].log_softmax(-1)
            first = len(request.prompt)
            expected = [float(rows[at - 1, tokens[at]]) for at in range(first, len(tokens))]
            assert answer.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            transformers.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
            "its 2 layers call replaceable attention 1 times",
        ),
        (
            transformers.GPTJConfig(**GPT2, rotary_dim=4, **ENDS),
            "its 2 layers call replaceable attention 0 times",
        ),
        (transformers.DiffLlamaConfig(**SHAPE), "its 2 layers call replaceable attention 4 times"),
        (transformers.GPTNeoXConfig(**SHAPE), "keys or values have an unusual shape"),
        (transformers.MambaConfig(**{**SHAPE, "state_size": 4}), "not supported"),
    ],
    ids=[
        "a convolution",
        "attention of its own",
        "attention twice",
        "other key heads than it says",
        "a recurrence",
    ],
)
def test_a_model_that_does_not_attend_once_in_each_layer_is_refused(config: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_attention(model_of(config), name="odd")


def test_a_cap_on_logits_is_refused_though_small_logits_hardly_show_it() -> None:
    config = transformers.Gemma2Config(**SHAPE, head_dim=8, attn_logit_softcapping=None)
    with pytest.raises(ConfigError, match="caps its logits"):
        check_attention(model_of(config).bfloat16(), name="odd")


def test_positions_that_count_otherwise_in_long_rows_bound_the_context(tmp_path: Path) -> None:
    rope = {**LONGROPE, "original_max_position_embeddings": 64}
    config = transformers.Phi3Config(**SHAPE, original_max_position_embeddings=64, rope_parameters=rope)
    assert policy_in(saved(config, tmp_path), LoraConfig(r=0)).context_length == 64


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (transformers.MixtralConfig(**SHAPE, num_local_experts=4), {}),
        (transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS), {"targets": ("q_proj", "v_proj")}),
        (transformers.GPT2Config(**GPT2, **ENDS), {}),
        (transformers.GPT2Config(**GPT2, **ENDS), {"dora": True}),
    ],
    ids=["experts", "beside experts", "gpt2", "gpt2, DoRA"],
)
def test_adapters_generate_as_they_train_and_can_be_merged(
    config: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = saved(config, tmp_path / "model")
    policy = shaken(policy_in(folder, LoraConfig(r=4, **settings)))
    request = Request(prompt=tuple(range(20, 31)), seeds=(1,))
    ((answer,),) = Engine(policy, EngineConfig()).generate([request], Sampling(max_tokens=12))
    policy.save(tmp_path / "adapter")
    done = merge(tmp_path / "adapter", tmp_path / "merged", base=str(folder))
    assert done.difference < 1e-4 < 1e-2 < done.effect
    merged = AutoModelForCausalLM.from_pretrained(done.folder, dtype=torch.float32)
    tokens = torch.tensor(request.prompt + answer.tokens)
    with torch.no_grad():
        rows = merged(tokens[None]).logits[0].log_softmax(-1)
    expected = [float(rows[at - 1, tokens[at]]) for at in range(len(request.prompt), len(tokens))]
    assert answer.logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}),
        ({"pad_token_id": -1, "eos_token_id": [7, 8]}, {"eos_token_id": [7, 8]}),
    ],
    ids=["a temperature without drawing", "a padding token that cannot be"],
)
def test_a_model_whose_settings_transformers_would_not_write_can_be_saved(
    settings: dict[str, Any], written: dict[str, Any], tmp_path: Path
) -> None:
    folder = saved(transformers.LlamaConfig(**SHAPE), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(settings))
    policy_in(folder, LoraConfig(r=0)).save(tmp_path / "again")
    found = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    del found["transformers_version"]
    assert found == written
