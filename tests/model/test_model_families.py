"""Models of many families: each computes what transformers computes, on the fast or the general path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from groupwise.config.schema import EngineConfig, LoraConfig, ModelConfig
from groupwise.engine.engine import Engine
from groupwise.errors import ConfigError
from groupwise.learner.micro_batch import own_logprobs, pack
from groupwise.model.adapters.merge_adapters import merge
from groupwise.model.attention.compatibility import check_attention, unpackable_reason
from groupwise.model.load import load_policy
from groupwise.model.policy import Policy
from groupwise.model.resolve import FAMILIES, UNSUITABLE
from groupwise.records import Completion, Request, Sample, Sampling
from tests.support.small_models import SIZES, policy_of, tiny_tokenizer
from tests.support.tiny_families import ragged_samples, tiny_config, tiny_model

GPT2 = {"vocab_size": 272, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
ENDS = {"bos_token_id": None, "eos_token_id": 268, "pad_token_id": 0}
SHAPE = {**SIZES, **ENDS, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
SLIDING = ["sliding_attention", "full_attention"]
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
        transformers.MistralConfig(**SHAPE, sliding_window=6),
        transformers.Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=6, layer_types=SLIDING),
        transformers.Gemma2Config(**SHAPE, head_dim=8, sliding_window=6, layer_types=SLIDING),
        transformers.GptOssConfig(
            **SHAPE, head_dim=8, sliding_window=6, layer_types=SLIDING, num_local_experts=4
        ),
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


FAST = ("mistral", "gemma2", "gpt_oss", "gemma4_text", "deepseek_v3", "granite", "stablelm", "nanochat")
GENERAL = ("gptj", "bloom", "falcon_h1", "lfm2", "qwen3_next", "mamba2", "nemotron_h", "rwkv", "diffllama")


@pytest.mark.parametrize("family", [*FAST, *GENERAL])
def test_the_gradient_is_that_of_one_plain_pass_for_each_answer(family: str) -> None:
    plain, policy, samples = tiny_model(family), policy_of(tiny_model(family)), ragged_samples()
    assert (policy.general is None) == (family in FAST)
    batch = pack(samples, device=policy.device)
    logprobs_N, _ = own_logprobs(policy, batch, Sampling(temperature=0.8), entropy_gradient=False)
    weights_N = torch.linspace(-1.0, 1.0, len(logprobs_N))
    (weights_N * logprobs_N).sum().backward()
    rows = []
    for sample in samples:
        logits = plain(torch.tensor([sample.tokens]), use_cache=False).logits[0, sample.prefix - 1 : -1]
        targets = torch.tensor(sample.tokens[sample.prefix :])
        rows.append((logits / 0.8).log_softmax(-1).gather(1, targets[:, None])[:, 0])
    expected_N = torch.cat(rows)
    assert torch.allclose(logprobs_N, expected_N, atol=2e-4)
    (weights_N * expected_N).sum().backward()
    for (name, ours), theirs in zip(policy.model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None or not ours.grad.any(), name
        else:
            assert ours.grad is not None, name
            assert (ours.grad - theirs.grad).norm() <= 1e-3 * theirs.grad.norm() + 1e-5, name


@pytest.mark.parametrize("family", [*FAST, *GENERAL])
def test_answers_are_sampled_from_what_the_trainer_computes(family: str) -> None:
    policy = policy_of(tiny_model(family))
    asked = [Request(prompt=tuple(range(20, 34)), seeds=(1, 2, 3)), Request(prompt=(40, 50), seeds=(4,))]
    groups = Engine(policy, EngineConfig(max_sequences=3)).generate(asked, Sampling(max_tokens=12))
    for request, group in zip(asked, groups, strict=True):
        samples = [answered(request.prompt, answer) for answer in group]
        with torch.no_grad():
            batch = pack(samples, device=policy.device)
            logprobs_N, _ = own_logprobs(policy, batch, Sampling(), entropy_gradient=False)
        assert [x for answer in group for x in answer.logprobs] == pytest.approx(
            logprobs_N.tolist(), abs=1e-3
        )


def answered(prompt: tuple[int, ...], answer: Completion) -> Sample:
    zeros, count = (0.0,) * len(prompt), len(answer.tokens)
    return Sample(
        tokens=prompt + answer.tokens,
        trained=(False,) * len(prompt) + (True,) * count,
        logprobs=zeros + answer.logprobs,
        entropies=zeros + answer.entropies,
        advantages=(0.0,) * (len(prompt) + count),
        prefix=len(prompt),
        group=0,
    )


@pytest.mark.parametrize("family", ["lfm2", "rwkv"])
def test_the_general_path_does_not_depend_on_slots_or_preemption(family: str) -> None:
    policy = policy_of(tiny_model(family))
    asked = [Request(prompt=tuple(range(20, 30)), seeds=(1, 2, 3)), Request(prompt=(40, 50), seeds=(4, 5))]
    sampling = Sampling(max_tokens=12)
    free = Engine(policy, EngineConfig()).generate(asked, sampling)
    tight = Engine(policy, EngineConfig(kv_tokens=32, block_size=4))
    assert [[a.tokens for a in group] for group in tight.generate(asked, sampling)] == [
        [a.tokens for a in group] for group in free
    ]
    assert tight.preempted > 0


def test_padding_would_change_a_recurrent_state() -> None:
    """Why rows are not padded: states take up padding that a mask does not hide."""
    model = tiny_model("rwkv")
    tokens = torch.arange(20, 30)[None]
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), tokens], 1)
    mask = (torch.arange(13) >= 3).long()[None]
    with torch.no_grad():
        alone, beside = model(tokens).logits[0, -1], model(padded, attention_mask=mask).logits[0, -1]
    assert (alone - beside).abs().max() > 0.01


def test_a_model_whose_logits_are_not_those_of_its_output_layer_is_refused() -> None:
    model = tiny_model("gptj")
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits.square())
    with pytest.raises(ConfigError, match="its logits are not those of its output layer"):
        check_attention(model, name="odd")


@pytest.mark.parametrize("family", ["deepseek_v4", "minimax_m3_vl_text"])
def test_sparse_attention_is_not_taken_for_dense_on_short_rows(family: str) -> None:
    config = CONFIG_MAPPING[family]().get_text_config()
    assert unpackable_reason(config) is not None


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
        (tiny_config("zamba"), {}),
    ],
    ids=["experts", "beside experts", "gpt2", "gpt2, DoRA", "layers that share weights"],
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


def test_adapters_on_layers_that_share_a_weight_are_refused(tmp_path: Path) -> None:
    folder = saved(tiny_config("zamba"), tmp_path / "model")
    with pytest.raises(ConfigError, match="q_proj, v_proj of this model share weights"):
        policy_in(folder, LoraConfig(r=4, targets=("q_proj", "v_proj")))


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


def test_the_documentation_shows_the_paths_of_all_families_and_why_others_are_refused() -> None:
    text = families.DOCS.read_text()
    tables = families.path_tables(json.loads(FAMILIES.read_text()))
    assert "| Qwen3-Next | `qwen3_next` | general |" in tables
    assert tables in text, "run python benchmarks/families.py llama"
    for family, reason in UNSUITABLE.items():
        assert f"| {reason} | `{family}` |" in text
