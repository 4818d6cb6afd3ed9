"""Looking ahead: the parts of memory by hand-worked numbers, and what doctor prints."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from groupwise import cli
from groupwise.config import Config, read_config
from groupwise.config.schema import ModelConfig
from groupwise.model.device import total_memory
from groupwise.model.load import load_policy
from groupwise.model.resolve import TINY_FOLDER
from groupwise.training.resources.model_shape import LinearShape, ModelShape, shape_of
from groupwise.training.resources.run_estimate import (
    FILLED,
    NF4_BYTES,
    DeviceSpec,
    MemoryEstimate,
    choose_recomputing,
    plan,
    preflight,
)
from tests.support.small_models import SIZES, small_model, tiny_tokenizer

CPU = DeviceSpec(kind="cpu", total=10**10, program=0)
GPU = DeviceSpec(kind="cuda", total=24 * 10**9, program=0)
SHAPE = ModelShape(
    parameters=1000,
    linears=(
        LinearShape(name="a.q_proj", inputs=10, outputs=20),
        LinearShape(name="a.o_proj", inputs=20, outputs=10),
        LinearShape(name="a.down_proj", inputs=30, outputs=10),
    ),
    layers=2,
    width=10,
    inner=30,
    heads=2,
    key_heads=1,
    head_size=5,
    vocabulary=50,
)


def config(*words: str) -> Config:
    fixed = ("rollout.prompts=2", "rollout.group_size=4", "rollout.max_tokens=16", "optim.minibatches=1")
    return read_config(overrides=["model.name=x/y", *fixed, *words]).resolve()


def parts(found: MemoryEstimate) -> dict[str, float]:
    return {part.name: part.bytes for part in found.parts}


def test_full_training_keeps_gradient_and_two_moments_of_every_weight():
    found = parts(preflight(config("lora.r=0"), SHAPE, CPU, prompt_tokens=16))
    assert (found["weights"], found["gradients"], found["optimizer"]) == (4000, 4000, 8000)
    assert "adapters" not in found
    assert found["weight copies"] == 200 * 4  # the query's matrix alone is stacked
    with_reference = preflight(config("lora.r=0", "algo.beta=0.1"), SHAPE, CPU, prompt_tokens=16)
    assert parts(with_reference)["reference"] == 4000


def test_adapters_are_small_and_in_float32():
    several_passes = config("lora.r=2", "optim.micro_batch_tokens=40")
    found = parts(preflight(several_passes, SHAPE, GPU, prompt_tokens=16))
    adapters = 2 * ((10 + 20) + (20 + 10) + (30 + 10))
    assert found["weights"] == 2000
    assert found["adapters"] == found["gradients"] == 4 * adapters
    assert found["optimizer"] == 8 * adapters
    assert found["weight copies"] == 700 * 2
    offloaded = preflight(config("lora.r=2", "optim.offload=true"), SHAPE, GPU, prompt_tokens=16)
    assert "optimizer" not in parts(offloaded)


def test_modules_trained_whole_are_there_twice_with_gradient_and_moments():
    shape = replace(SHAPE, modules={"model.embed_tokens": 500, "lm_head": 500})
    plain, saving = (
        preflight(config("lora.r=2", f"lora.modules_to_save=[{names}]"), shape, CPU, prompt_tokens=16)
        for names in ("", "embed_tokens, lm_head")
    )
    without, found = parts(plain), parts(saving)
    assert "saved modules" not in without
    assert found["weights"] == without["weights"]
    assert found["adapters"] == without["adapters"]
    assert found["saved modules"] == 4000
    assert found["gradients"] - without["gradients"] == 4000
    assert found["optimizer"] - without["optimizer"] == 8000
    assert saving.updating - plain.updating == 16000  # which decides on gradient checkpointing


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("names", ["", "embed_tokens, lm_head", "norm", "mlp"])
def test_what_is_trained_beside_adapters_is_counted_as_peft_trains_it(tmp_path: Path, names, dtype):
    small_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model = (f"model.name={tmp_path}", "model.device=cpu", f"model.dtype={dtype}")
    asked = config(*model, "lora.r=2", f"lora.modules_to_save=[{names}]")
    policy = load_policy(asked.model, asked.lora)
    shape = shape_of(asked.model)
    assert shape.trained_size(asked.lora) == policy.trained_numbers
    trained = sum(p.numel() * p.element_size() for p in policy.trainable().values())
    found = parts(preflight(asked, shape, CPU, prompt_tokens=16))
    assert found["adapters"] + found.get("saved modules", 0) == trained
    assert (found["gradients"], found["optimizer"]) == (trained, 2 * trained)


def test_the_gradient_of_an_output_layer_that_is_trained_takes_memory_on_a_gpu():
    shape = replace(SHAPE, modules={"lm_head": 500}, vocabulary=50_000)
    plain, saving = (
        parts(preflight(config("lora.r=2", *words), shape, GPU, prompt_tokens=16))
        for words in ((), ("lora.modules_to_save=[lm_head]",))
    )
    assert saving["logits"] - plain["logits"] == 50_000 * 10 * (4 + 2)


def test_quantized_weights_leave_embeddings_and_norms_whole():
    found = parts(preflight(config(), replace(SHAPE, quantization="nf4"), GPU, prompt_tokens=16))
    assert found["weights"] == pytest.approx(700 * NF4_BYTES + 300 * 2)
    assert found["weight copies"] == 700 * 2


def test_the_cache_holds_every_answer_and_each_prompt_once():
    found = parts(preflight(config(), SHAPE, GPU, prompt_tokens=20))
    tokens = 8 * 16 + 2 * 32  # prompts of 20 tokens take two blocks of 16
    assert found["KV cache"] == tokens * 2 * 2 * 5 * 2


def test_fp8_halves_the_copies_and_nearly_halves_the_cache():
    words = ("engine.quantization=fp8", "engine.kv_cache_dtype=fp8")
    found = parts(preflight(config(*words), SHAPE, GPU, prompt_tokens=20))
    assert found["weight copies"] == 700
    # Each head of 5 numbers has a scale of four bytes.
    assert found["KV cache"] == pytest.approx((8 * 16 + 2 * 32) * 2 * 2 * (5 + 4))


def test_gradients_come_as_activations_go_in_a_pass_that_is_the_only_one():
    found = parts(preflight(config("lora.r=2"), SHAPE, GPU, prompt_tokens=16))
    assert found["activations"] > 4 * 2 * ((10 + 20) + (20 + 10) + (30 + 10))
    assert "gradients" not in found


def test_a_cpu_and_a_roomy_gpu_hold_the_generator_while_updating_a_full_one_does_not():
    full = DeviceSpec(kind="cuda", total=2 << 30, program=0)
    cpu, roomy, tight = (preflight(config(), SHAPE, place, prompt_tokens=20) for place in (CPU, GPU, full))
    for found in (cpu, roomy):
        both = {part.name for part in found.parts if part.generating and part.updating}
        assert {"KV cache", "weight copies"} <= both
        assert "generating passes" not in both
    assert not {"KV cache", "weight copies"} & {part.name for part in tight.parts if part.updating}


def test_checkpointing_keeps_one_vector_a_layer():
    plain = parts(preflight(config(), SHAPE, GPU, prompt_tokens=16))["activations"]
    less = parts(preflight(config("model.gradient_checkpointing=true"), SHAPE, GPU, prompt_tokens=16))
    assert less["activations"] < plain / 5


def test_attention_with_a_soft_cap_holds_its_scores():
    capped = replace(SHAPE, capped=True)
    found = parts(preflight(config(), capped, GPU, prompt_tokens=32))
    # Two groups of four answers of 16 tokens: 8 × 16 × 32 scores of answers to prompts for each of 2 heads.
    assert found["attention scores"] == 24 * 2 * 8 * 16 * 32
    assert "attention scores" not in parts(preflight(config(), SHAPE, GPU, prompt_tokens=32))
    in_float32 = preflight(config("model.dtype=float32"), SHAPE, GPU, prompt_tokens=32)
    assert parts(in_float32)["attention scores"] == found["attention scores"]
    long = preflight(config("rollout.max_tokens=64"), capped, CPU, prompt_tokens=32)
    assert parts(long)["attention scores"] == 24 * 2 * 8 * 64 * 64


QWEN_7B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}


@pytest.fixture
def seven_billion(tmp_path: Path) -> str:
    """A folder with the shape of Qwen2.5-7B, of which nothing but config.json is read."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    return str(tmp_path)


@pytest.mark.parametrize(
    ("words", "gigabytes", "expected"),
    [
        ([], 80, {}),
        ([], 24, {"model.quantization": "nf4"}),
        (["lora.r=0"], 60, {"optim.offload": True}),
        (["lora.r=0"], 24, {"lora.r": 16, "model.quantization": "nf4"}),
        (["lora.r=0", "model.gradient_checkpointing=false"], 80, {}),
        (["model.gradient_checkpointing=false", "rollout.prompts=2", "rollout.max_tokens=8000"], 60, None),
    ],
)
def test_a_plan_fits_and_needs_everything_that_it_changes(words, gigabytes, expected, seven_billion):
    asked = read_config(overrides=[f"model.name={seven_billion}", *words]).resolve()
    shape, place = shape_of(asked.model), DeviceSpec(kind="cuda", total=gigabytes * 10**9, program=0)
    found = plan(asked, shape, place, prompt_tokens=256)
    changes = {remedy.setting: remedy.value for remedy in found.remedies}
    assert found.estimate.fits
    assert expected is None or changes == expected
    assert all(peak > FILLED * place.total for peak in found.remedies.values())
    if changes:
        again = read_config(
            overrides=[f"model.name={seven_billion}", *words, *(f"{k}={v}" for k, v in changes.items())]
        )
        config, _ = choose_recomputing(
            again.resolve(), shape_of(again.model), place, free=place.total, prompt_tokens=256
        )
        assert preflight(config, shape_of(again.model), place, prompt_tokens=256) == found.estimate


def test_a_plan_generates_as_many_answers_at_once_as_fit(seven_billion):
    asked = read_config(overrides=[f"model.name={seven_billion}", "rollout.max_tokens=4096"]).resolve()
    shape, place = shape_of(asked.model), DeviceSpec(kind="cuda", total=60 * 10**9, program=0)
    found = plan(asked, shape, place, prompt_tokens=256)
    ((limit, _),) = found.remedies.items()
    assert limit.setting == "engine.max_sequences"
    more = replace(found.config, engine=replace(found.config.engine, max_sequences=2 * limit.value))
    assert not preflight(more, shape, place, prompt_tokens=256).fits


def test_what_cannot_fit_is_said_and_no_command_is_printed(seven_billion, capsys):
    words = ["--model", seven_billion, "--on", "cuda", "--memory-gb", "3"]
    assert cli.main(["doctor", *words]) == 1
    out = capsys.readouterr().out
    assert "these settings reduce the peak, but not enough:\n" in out
    assert "choose a smaller model" in out
    assert "run: " not in out


def test_doctor_prints_the_command_of_a_run_that_fits_and_why_each_setting_is_chosen(seven_billion, capsys):
    words = ["--model", seven_billion, "--on", "cuda", "--memory-gb", "24"]
    assert cli.main(["doctor", *words, "lora.r=0", "task.name=gsm8k"]) == 1
    out = capsys.readouterr().out
    changes = "lora.r=16 model.quantization=nf4"
    assert f"run: groupwise train --model {seven_billion} task.name=gsm8k {changes}\n" in out
    assert re.search(r"optim\.learning_rate=5e-05 +with adapters", out)
    assert re.search(
        r"model\.quantization=nf4 +the frozen weights in four bits, slower \(4\d\.\d GB without\)", out
    )
    assert cli.main(["doctor", *words, "--json", "model.quantization=nf4"]) == 0
    ahead = json.loads(capsys.readouterr().out)["preflight"]
    assert (ahead["changes"], ahead["can_fit"]) == ([], True)
    given = {"lora.r", "optim.learning_rate", "optim.micro_batch_tokens", "optim.minibatches", "model.dtype"}
    assert {row["setting"] for row in ahead["chosen"]} == given


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory-gb", "nan"], "--memory-gb must be"),
        (["--memory-gb", "-5"], "--memory-gb must be"),
        (["--on", "tpu"], "--on must be one of cpu, cuda"),
        (["--prompt-tokens", "-3"], "--prompt-tokens must be at least 1"),
        (["--answer-tokens", "0"], "--answer-tokens must be at least 1"),
        (["model.device=cpu", "engine.quantization=fp8"], "FP8 requires Triton and an NVIDIA GPU"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(words, message, capsys):
    assert cli.main(["doctor", "--model", "tiny", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_is_quantized_on_disk_is_known_to_be(tmp_path: Path):
    shutil.copytree(TINY_FOLDER, tmp_path, dirs_exist_ok=True)
    record = json.loads((tmp_path / "config.json").read_text())
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps({**record, "quantization_config": quantized}))
    found = shape_of(read_config(overrides=[f"model.name={tmp_path}"]).model)
    plain = shape_of(read_config(overrides=[f"model.name={TINY_FOLDER}"]).model)
    assert (found.quantization, plain.quantization) == ("nf4", None)
    assert replace(found, quantization=None) == plain
    asked = read_config(overrides=[f"model.name={TINY_FOLDER}", "model.quantization=int8"]).model
    assert shape_of(asked).quantization == "int8"


def test_the_shape_of_the_built_in_model_is_known_without_its_weights():
    shape = shape_of(read_config().model)
    assert (shape.layers, shape.width, shape.inner, shape.key_width) == (3, 192, 576, 96)
    assert len(shape.linears) == 21
    assert 1_300_000 < shape.parameters < 1_500_000


def test_doctor_says_what_is_there_and_what_a_run_takes(capsys):
    assert cli.main(["doctor"]) == 0
    assert "torch" in capsys.readouterr().out
    assert cli.main(["doctor", "--model", "tiny", "--json"]) == 0
    ahead = json.loads(capsys.readouterr().out)["preflight"]
    assert ahead["fits"]
    assert ahead["peak_gb"] == max(ahead["generating_gb"], ahead["updating_gb"])
    assert ahead["seconds"]["step"] > 0
    assert cli.main(["doctor", "--model", "tiny", "--on", "cuda", "--memory-gb", "0.001"]) == 1
    out = capsys.readouterr().out
    assert "does not fit" in out


@pytest.mark.parametrize(
    ("kind", "kept", "tiled"),
    [
        ("llama", 2, True),
        ("olmo2", 2, False),
        ("gemma", 4, False),
        ("phi3", 4, False),
        ("gpt_neox", 2, False),
    ],
)
def test_gates_of_ours_leave_two_vectors_and_others_four(
    kind: str, kept: int, tiled: bool, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, pad_token_id=0))
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    shape = shape_of(ModelConfig(name=str(tmp_path)))
    assert (shape.inner_kept, shape.tiled) == (kept, tiled)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_here_is_named_and_doctor_says_what_it_assumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--max-steps", "1", "model.device=cuda:1"]) == 2
    assert capsys.readouterr().err == (
        "error: model.device=cuda:1 does not exist: torch finds no GPU; choose another device\n"
    )
    assert list(tmp_path.rglob("config.yaml")) == []
    for device in ("cuda", "mps"):
        assert cli.main(["doctor", "--model", "tiny", f"model.device={device}"]) == 0
        assert "no such GPU available: this memory size is assumed" in capsys.readouterr().out


def test_mps_has_the_memory_of_the_machine_and_holds_weights_in_float32(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert cli.main(["doctor", "--model", "tiny", "--json", "model.device=mps"]) == 0
    ahead = json.loads(capsys.readouterr().out)["preflight"]
    assert not ahead["assumed"]
    assert ahead["memory_gb"] == total_memory(torch.device("cpu")) / 1e9
    assert ahead["parts_gb"]["weights"] == pytest.approx(4e-9 * ahead["parameters"])


def test_a_soft_cap_is_read_from_the_config(tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    for cap in (50.0, None):
        AutoConfig.for_model("gemma2", **SIZES, attn_logit_softcapping=cap).save_pretrained(tmp_path)
        assert shape_of(ModelConfig(name=str(tmp_path))).capped == (cap is not None)
