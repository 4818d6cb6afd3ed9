"""Adapters of every kind: they train, generate, save and load as PEFT says they should."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from groupwise import cli
from groupwise.config import read_config
from groupwise.config.schema import LORA_PRESETS, EngineConfig, LoraConfig, ModelConfig
from groupwise.engine.engine import Engine
from groupwise.errors import ConfigError
from groupwise.learner.micro_batch import pack
from groupwise.learner.sft_learner import SFTLearner, worked_sample
from groupwise.model.adapters import lora
from groupwise.model.load import load_policy
from groupwise.model.ops.checkpointing import recompute_layers
from groupwise.model.policy import Policy
from groupwise.model.resolve import TINY_FOLDER
from groupwise.records import Request, Sampling
from tests.support.adapted_models import KINDS, adapted, logprobs

PROMPT = tuple(range(40, 60))


@pytest.mark.parametrize("kind", KINDS)
def test_what_generates_is_what_is_trained(kind):
    policy = adapted(**KINDS[kind])
    ((completion,),) = Engine(policy, EngineConfig()).generate(
        [Request(prompt=PROMPT, seeds=(3,))], Sampling(max_tokens=24)
    )
    expected = logprobs(policy, PROMPT, completion.tokens)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_adapter_of_any_kind_loads_with_peft_alone(tmp_path, kind):
    policy = adapted(**KINDS[kind])
    answer = tuple(range(60, 70))
    ours = logprobs(policy, PROMPT, answer)
    policy.save(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(TINY_FOLDER, dtype=torch.float32)
    with torch.no_grad():
        plain = base(torch.tensor([PROMPT + answer])).logits[0]
        loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
        theirs = loaded(torch.tensor([PROMPT + answer])).logits[0]
    assert (theirs - plain).abs().max() > 1e-2
    rows = theirs[len(PROMPT) - 1 : -1].log_softmax(-1)
    torch.testing.assert_close(
        ours, rows.gather(1, torch.tensor(answer)[:, None])[:, 0], rtol=1e-4, atol=1e-4
    )
    again = adapted(tmp_path, **KINDS[kind])
    assert torch.equal(logprobs(again, PROMPT, answer), ours)
    assert again.trainable().keys() == policy.trainable().keys()
    with policy.reference() as reference:
        plain_rows = (
            plain[len(PROMPT) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        )
        torch.testing.assert_close(logprobs(reference, PROMPT, answer), plain_rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("target_modules", r"([a-z_.0-9]+)+!", "takes longer than"),
        ("rank_pattern", {r"([a-z_.0-9]+)+!": 4}, "takes longer than"),
        ("target_modules", r"(q_proj", "is invalid: re.error"),
    ],
)
def test_an_adapter_whose_patterns_never_end_is_refused(tmp_path, monkeypatch, setting, value, message):
    adapted().save(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {setting: value}))
    monkeypatch.setattr(lora, "PATTERN_SECONDS", 2.0)
    with pytest.raises(ConfigError, match=message):
        adapted(tmp_path)


def test_an_adapter_that_names_its_modules_by_a_pattern_loads(tmp_path):
    policy = adapted(targets=("q_proj",))
    policy.save(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": r".*\.(q_proj|absent)"}))
    again = adapted(tmp_path)
    answer = tuple(range(60, 70))
    assert torch.equal(logprobs(again, PROMPT, answer), logprobs(policy, PROMPT, answer))


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 10**7},
        {"text_config": {"num_hidden_layers": 10**7}},
        {"num_local_experts": 10**7},
    ],
)
def test_a_config_of_millions_of_layers_is_refused_at_once(tmp_path, sizes):
    folder = tmp_path / "model"
    shutil.copytree(TINY_FOLDER, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    with pytest.raises(ConfigError, match="the limits are 1000 layers"):
        load_policy(ModelConfig(name=str(folder), device="cpu"), LoraConfig(r=0))
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"config.json is damaged"):
        load_policy(ModelConfig(name=str(folder), device="cpu"), LoraConfig(r=0))


@pytest.mark.parametrize("kind", KINDS)
def test_every_trained_part_of_an_adapter_moves(kind):
    policy = adapted(**KINDS[kind])
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    optim = read_config(overrides=["optim.learning_rate=0.01"]).resolve().optim
    SFTLearner(policy, optim=optim, max_steps=1).update([worked_sample(PROMPT, (60, 61, 62), group=0)])
    assert [name for name, p in policy.trainable().items() if torch.equal(p, before[name])] == []
    wanted = {"dora": "magnitude", "saved": "modules_to_save"}.get(kind, "lora_A")
    assert any(wanted in name for name in before)


def test_rslora_scales_by_the_root_of_the_rank():
    scales = {
        layer.scaling["default"]
        for kind in ("plain", "rslora")
        for layer in adapted(**KINDS[kind]).model.modules()
        if hasattr(layer, "get_delta_weight")
    }
    assert scales == {32 / 4, 32 / 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modules_to_save": ("head",)}, "has no module named head"),
        ({"modules_to_save": ("embed_tokens",)}, "ties its embeddings and output layer"),
        ({"targets": ("lm_head",)}, "may not include the embeddings or the output layer"),
        ({"targets": ("nothing",)}, "lora.targets"),
    ],
)
def test_adapters_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        adapted(**settings)


def test_a_preset_fills_what_is_not_given():
    lora = read_config(overrides=["lora.preset=countdown", "lora.alpha=8"]).lora
    assert (lora.r, lora.alpha, lora.dropout) == (16, 8, 0.05)
    assert lora.targets == LORA_PRESETS["countdown"]["targets"]
    with pytest.raises(ConfigError, match=r"lora\.preset must be one of"):
        read_config(overrides=["lora.preset=huge"])


# Quantized


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.filterwarnings("ignore")  # bitsandbytes' own, while it quantizes
def test_a_quantized_model_trains_and_generates_the_same_distribution(kind, tmp_path):
    pytest.importorskip("bitsandbytes")
    policy = adapted(quantization=kind)
    (notice,) = policy.notices()
    assert "uses a dequantized copy" in notice
    engine = Engine(policy, EngineConfig())
    ((completion,),) = engine.generate([Request(prompt=PROMPT, seeds=(3,))], Sampling(max_tokens=24))
    expected = logprobs(policy, PROMPT, completion.tokens)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=1e-4, atol=1e-4)
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    optim = read_config(overrides=["optim.learning_rate=0.01"]).resolve().optim
    SFTLearner(policy, optim=optim, max_steps=1).update([worked_sample(PROMPT, (60, 61, 62), group=0)])
    assert not any(torch.equal(p, before[name]) for name, p in policy.trainable().items())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.filterwarnings("ignore")
def test_the_gradient_through_quantized_weights_is_that_of_their_values(kind):
    pytest.importorskip("bitsandbytes")
    from groupwise.model.adapters.quantization import is_quantized, plain_weight

    policy = adapted(quantization=kind)
    linear: Any = next(
        m for m in policy.model.modules() if isinstance(m, torch.nn.Linear) and is_quantized(m)
    )
    x = torch.randn(5, linear.in_features, requires_grad=True)
    linear(x).sin().sum().backward()
    y = x.detach().clone().requires_grad_()
    torch.nn.functional.linear(y, plain_weight(linear)).sin().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "down_proj")], ids=["all", "some"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.filterwarnings("ignore")
def test_adapters_on_quantized_weights_get_the_gradients_of_those_on_their_values(kind, targets):
    pytest.importorskip("bitsandbytes")
    from groupwise.model.adapters.quantization import is_quantized, plain_weight

    def gradients(policy: Policy) -> dict[str, Tensor]:
        policy.model.train().zero_grad()
        batch = pack([worked_sample(PROMPT, (60, 61, 62), group=0)], device=policy.device)
        policy.hidden(batch.tokens_T, batch.positions_T, batch.layout).sin().sum().backward()
        return {name: p.grad.clone() for name, p in policy.trainable().items()}

    quantized, plain = adapted(quantization=kind, targets=targets), adapted(targets=targets)
    values = dict(plain.model.named_modules())
    for name, module in quantized.model.named_modules():
        if isinstance(module, torch.nn.Linear) and is_quantized(module):
            values[name].weight.data.copy_(plain_weight(module))
    for name, parameter in plain.trainable().items():
        parameter.data.copy_(quantized.trainable()[name])
    expected = gradients(plain)
    assert len(expected) == 2 * (len(targets) if len(targets) > 1 else 7) * len(plain.decoder.layers)
    for again in (False, True):
        if again:
            recompute_layers(quantized)
        for name, gradient in gradients(quantized).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.filterwarnings("ignore")
def test_the_layers_of_a_quantized_model_keep_as_little_as_any_others(kind):
    pytest.importorskip("bitsandbytes")
    from groupwise.model.ops import fused_modules, rotary

    layer = adapted(quantization=kind).decoder.layers[0]
    assert layer.mlp.forward.__module__ == fused_modules.__name__
    assert layer.self_attn.forward.__module__ == rotary.__name__


@pytest.mark.parametrize(("asked", "refused"), [("nf4", False), ("int8", True)])
@pytest.mark.filterwarnings("ignore")
def test_weights_of_one_quantization_are_not_asked_for_in_another(asked, refused, tmp_path):
    pytest.importorskip("bitsandbytes")
    assert cli.main(["quantize", "--model", "tiny", "--output-path", str(tmp_path / "nf4")]) == 0
    model = ModelConfig(name=str(tmp_path / "nf4"), device="cpu", quantization=asked)
    sentence = r"are already quantized to nf4; remove model\.quantization=int8"
    with pytest.raises(ConfigError, match=sentence) if refused else nullcontext():
        load_policy(model, LoraConfig(r=4))


def test_quantized_weights_cannot_be_trained_themselves():
    with pytest.raises(ConfigError, match=r"set lora\.r above 0"):
        read_config(overrides=["model.quantization=nf4", "lora.r=0"])
