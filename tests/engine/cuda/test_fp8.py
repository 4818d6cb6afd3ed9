"""Generation in FP8, its kernels interpreted, against float64 arithmetic on the same rounded numbers."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import MethodType
from typing import Any

import peft
import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  (before any kernel is imported)
from groupwise.cli import main
from groupwise.config.schema import EngineConfig
from groupwise.engine import engine as engine_module
from groupwise.engine.cuda import fused_layers, graph_weights
from groupwise.engine.cuda.graph_weights import FP8, FP8Cache, FP8Rows, FP8Weight, in_fp8, layer_of
from groupwise.engine.cuda.speculation import Pace
from groupwise.engine.engine import Engine
from groupwise.errors import ConfigError
from groupwise.model.policy import Policy
from groupwise.records import Completion, Request, Sampling
from tests.support.generation import EmulatedGPUEngine, assert_same, converse, requests
from tests.support.small_models import policy_of, small_model
from tests.support.tiny_families import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def a_cpu_that_multiplies_in_fp8(monkeypatch):
    monkeypatch.setattr(engine_module, "supports_fp8", lambda _device: True)


def values(rows: FP8Rows) -> torch.Tensor:
    return rows.values_TI.double() * rows.scale_T1


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm().detach() / other.double().norm().detach())


def in_half(model: Any) -> Policy:
    return policy_of(copy.deepcopy(model).to(torch.bfloat16))


def test_a_row_is_scaled_to_the_largest_number_of_fp8():
    x = torch.tensor([[1.0, -2.0, 0.5, 0.26], [0.0, 0.0, 0.0, 0.0]])
    rows = in_fp8(x)
    # 2 becomes 448; 0.26 becomes 58.24, between 56 and 60, and 60 is nearer.
    assert rows.values_TI.tolist() == [[224.0, -448.0, 112.0, 60.0], [0.0] * 4]
    assert rows.scale_T1.tolist() == [[pytest.approx(2 / 448)], [pytest.approx(1e-12 / 448)]]


@pytest.mark.parametrize("size", [16, 48, 5000])
def test_every_element_is_within_a_sixteenth(size):
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    rows = in_fp8(x)
    assert rows.values_TI.dtype == FP8
    normal = x.abs() > x.abs().amax(1, keepdim=True) / 448 * 2**-6
    error = (values(rows) - x.double()).abs() / x.double().abs()
    assert error[normal].max() <= 1 / 16


@pytest.mark.parametrize("added", [False, True])
def test_a_norm_stores_what_rows_in_fp8_hold(added):
    torch.manual_seed(0)
    x, delta = torch.randn(2, 3, 48).to(torch.bfloat16)
    norm = fused_layers.Norm(torch.randn(48).to(torch.bfloat16), 1e-6)
    both = x.clone(), x.clone()
    plain = fused_layers._add_norm(both[0], delta if added else None, norm)
    rows = fused_layers._add_norm(both[1], delta if added else None, norm, fp8=True)
    assert torch.equal(*both), "the residual stream keeps its dtype"
    assert isinstance(plain, torch.Tensor)
    assert isinstance(rows, FP8Rows)
    assert torch.allclose(values(rows).float(), plain.float(), rtol=0.07, atol=0.01)


@pytest.mark.parametrize("size", [48, 5000])
def test_a_gate_stores_what_rows_in_fp8_hold(size):
    gate_up = torch.randn(3, 2 * size, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    plain = fused_layers._silu_and_multiply(gate_up)
    rows = fused_layers._silu_and_multiply(gate_up, fp8=True)
    assert isinstance(rows, FP8Rows)
    assert torch.allclose(values(rows).float(), plain.float(), rtol=0.07, atol=0.02)


def test_a_product_is_that_of_the_rounded_matrices():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, outputs, dtype=torch.bfloat16) for outputs in (16, 48)]
    weight = FP8Weight(*layers, like=layers[0].weight)
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    expected = []
    for layer in layers:
        scale = layer.weight.double().abs().amax(1, keepdim=True) / 448
        rounded = (layer.weight.double() / scale).to(FP8).double() * scale
        expected.append(values(in_fp8(x)) @ rounded.T + layer.bias.double())
    assert torch.allclose(weight(x).double(), torch.cat(expected, 1), rtol=1e-2, atol=1e-2)


def test_a_product_follows_the_adapter_and_its_updates():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"x": torch.nn.Linear(32, 16, bias=False, dtype=torch.bfloat16)})
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(r=4, target_modules=["x"], init_lora_weights=False),
        autocast_adapter_dtype=False,
    )
    layer = adapted.base_model.model["x"]
    weight = FP8Weight(layer, like=layer.base_layer.weight)
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    assert distance(weight(x), layer(x)) < 0.06
    with torch.no_grad():
        layer.lora_B["default"].weight.mul_(-3)
    assert distance(weight(x), layer(x)) > 0.5
    weight.refresh()
    assert distance(weight(x), layer(x)) < 0.06


def test_layers_of_odd_sizes_are_refused():
    with pytest.raises(AssertionError, match="multiples of 16"):
        FP8Weight(torch.nn.Linear(24, 16), like=torch.zeros(1))


def test_a_cache_in_fp8_returns_and_copies_scaled_rows():
    like = torch.zeros(1, dtype=torch.bfloat16)
    cache = FP8Cache(layers=2, blocks=3, block_size=2, heads=2, size=4, like=like)
    keys, _, key_scale, value_scale = layer_of(cache, 1)
    keys.view(-1, 2, 4)[3] = torch.tensor([[1.0, 2.0, -4.0, 448.0], [16.0, 0.0, 8.0, -2.0]]).to(FP8)
    key_scale.view(-1, 2)[3] = torch.tensor([0.5, 2.0])
    value_scale.view(-1, 2)[3] = 1.0
    expected = [[0.5, 1.0, -2.0, 224.0], [32.0, 0.0, 16.0, -4.0]]
    assert cache.rows(1, torch.tensor([3]))[0].tolist() == [expected]
    cache.copy(torch.tensor([3]), torch.tensor([5]))
    k, v = cache.rows(1, torch.tensor([5, 0]))
    assert k.tolist() == [expected, [[0.0] * 4] * 2]
    assert k.dtype == v.dtype == torch.bfloat16


def gap(model: Any, asked: list[Request], groups: list[list[Completion]]) -> float:
    """Return the mean distance between the log-probabilities of the sampler and of the model in float32."""
    gaps = []
    for request, group in zip(asked, groups, strict=True):
        for completion in group:
            tokens = torch.tensor(request.prompt + completion.tokens)
            logits = model(tokens[None]).logits[0, len(request.prompt) - 1 : -1]
            own = logits.log_softmax(-1).gather(1, tokens[len(request.prompt) :, None]).squeeze(1)
            gaps.append((own - torch.tensor(completion.logprobs)).abs())
    return float(torch.cat(gaps).mean())


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Round the rows of a matrix to FP8, each with its scale."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    return (x / scale).to(FP8).float() * scale


def round_products(model: Any) -> Any:
    """Make every layer but the last round its weight and its input."""

    def forward(linear: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rounded(x), rounded(linear.weight), linear.bias)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.forward = MethodType(forward, module)
    return model


def generated(model: Any, **settings: Any) -> tuple[EmulatedGPUEngine, list[Request], list[list[Completion]]]:
    engine = EmulatedGPUEngine(policy_of(copy.deepcopy(model)), EngineConfig(**settings))
    asked = requests((1, 17, 9), (2, 1, 3))
    return engine, asked, engine.generate(asked, Sampling(max_tokens=6))


@pytest.fixture
def any_dtype(monkeypatch):
    """The interpreter cannot multiply matrices in bfloat16."""
    monkeypatch.setattr(EngineConfig, "check_fp8", lambda *_, **__: None)


@pytest.mark.usefixtures("any_dtype")
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@torch.no_grad()
def test_products_in_fp8_sample_from_the_model_with_rounded_matrices(kind):
    model = small_model(kind, key_heads=2)
    engine, asked, groups = generated(model, quantization="fp8")
    assert engine.graph_runner is not None
    assert engine.graph_runner.fused
    assert gap(round_products(copy.deepcopy(model)), asked, groups) < 0.005
    assert gap(model, asked, groups) > 0.02


@pytest.mark.usefixtures("any_dtype")
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@torch.no_grad()
def test_a_cache_in_fp8_samples_nearly_from_the_model(kind):
    model = small_model(kind, key_heads=2)
    engine, asked, groups = generated(model, kv_cache_dtype="fp8")
    assert engine.graph_runner is not None
    assert engine.graph_runner.cache.keys.dtype == FP8
    assert 0.001 < gap(model, asked, groups) < 0.06


BOTH = EngineConfig(quantization="fp8", kv_cache_dtype="fp8")


@pytest.mark.usefixtures("any_dtype")
@torch.no_grad()
def test_a_turn_that_continues_a_conversation_reads_its_history_from_the_cache():
    asked = requests((3, 17), (2, 1))
    cached, again = (
        converse(EmulatedGPUEngine(policy_of(small_model()), BOTH), asked, turns=2, reuse_cache=reuse).answers
        for reuse in (True, False)
    )
    first = [whose for whose in cached if whose[2] == 0]
    assert [cached[whose] for whose in first] == [again[whose] for whose in first]
    # The history is rounded only where it is cached, and the tokens may part then.
    gaps = [
        abs(cached[whose].logprobs[0] - again[whose].logprobs[0])
        for whose in cached.keys() - set(first)
        if cached[whose].tokens[0] == again[whose].tokens[0]
    ]
    assert gaps
    assert 0 < max(gaps) < 0.3


@pytest.mark.usefixtures("any_dtype")
@pytest.mark.parametrize(
    "settings", [{"max_sequences": 2}, {"kv_tokens": 36, "block_size": 4, "max_sequences": 4}], ids=str
)
def test_sequences_that_wait_or_are_preempted_get_the_same_tokens(settings):
    policy = policy_of(small_model("qwen2", key_heads=2))
    asked, sampling = requests((5, 9, 3), (2, 3, 2)), Sampling(max_tokens=9)
    whole = EmulatedGPUEngine(policy, replace(BOTH, speculative=False)).generate(asked, sampling)
    assert_same(EmulatedGPUEngine(policy, replace(BOTH, **settings)).generate(asked, sampling), whole)


@pytest.mark.usefixtures("any_dtype")
def test_drafts_are_verified_by_the_same_numbers(monkeypatch):
    policy = policy_of(small_model("qwen2", key_heads=2))
    asked, sampling = requests((5, 9), (2, 3)), Sampling(max_tokens=9, temperature=0.2)
    plain = EmulatedGPUEngine(policy, replace(BOTH, speculative=False)).generate(asked, sampling)
    monkeypatch.setattr(Pace, "width", lambda self, sequences: 4)
    assert_same(EmulatedGPUEngine(policy, BOTH).generate(asked, sampling), plain, within=1e-4)


def test_a_model_whose_layers_cannot_be_fused_is_refused_with_the_reason():
    policy = in_half(small_model("llama", key_heads=2))
    policy.model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    with pytest.raises(ConfigError, match=r"cannot be fused, which FP8 requires \(only SiLU activations"):
        Engine(policy, EngineConfig(quantization="fp8"))


def test_a_model_on_the_general_path_is_refused():
    policy = in_half(tiny_model("mamba2"))
    assert policy.general is not None
    with pytest.raises(ConfigError, match="computes attention in its own way"):
        Engine(policy, EngineConfig(kv_cache_dtype="fp8"))


def test_a_model_in_float32_is_refused_in_fp8():
    policy = policy_of(small_model("llama", key_heads=2))
    with pytest.raises(
        ConfigError, match=r"model\.dtype=bfloat16; set it, or leave out engine\.kv_cache_dtype=fp8"
    ):
        Engine(policy, EngineConfig(kv_cache_dtype="fp8"))


def test_a_device_without_fp8_is_refused(monkeypatch):
    monkeypatch.undo()
    policy = in_half(small_model("llama", key_heads=2))
    with pytest.raises(ConfigError, match="FP8 requires Triton and an NVIDIA GPU"):
        Engine(policy, EngineConfig(quantization="fp8"))


def test_a_run_on_a_cpu_is_refused_in_a_sentence_and_leaves_no_folder(monkeypatch, tmp_path, capsys):
    monkeypatch.undo()
    assert main(["train", f"run.output_dir={tmp_path}", "model.device=cpu", "engine.kv_cache_dtype=fp8"]) == 2
    assert "in a new run, leave out engine.kv_cache_dtype=fp8" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_largest_number_is_that_of_the_type():
    assert torch.finfo(FP8).max == graph_weights.LARGEST.value
