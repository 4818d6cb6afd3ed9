"""The settings that come with the package, by name."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from groupwise.cli import main
from groupwise.config import read_config
from groupwise.config.loading import presets

ROOT = Path(__file__).parents[2]

QWEN_3B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}


def test_a_preset_is_printed_by_name(capsys):
    assert main(["config", "--preset", "gsm8k-quick"]) == 0
    assert capsys.readouterr().out == (ROOT / "configs" / "gsm8k-quick.yaml").read_text()
    main(["config", "--list"])
    assert "math-test" in capsys.readouterr().out.split()


def test_an_unknown_preset_is_answered_with_the_presets(capsys):
    assert main(["config", "--preset", "gsm9k"]) == 2
    assert "the presets are gsm8k-cpu" in capsys.readouterr().err


def test_a_preset_needs_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_config(Path("gsm8k-quick")).run.max_steps == 10


@pytest.mark.parametrize("name", ["gsm8k-quick", "gsm8k-medium", "gsm8k-full", "gsm8k-debug"])
def test_the_presets_for_small_gpus_fit_eight_gigabytes(name, tmp_path):
    from groupwise.training.resources.model_shape import shape_of
    from groupwise.training.resources.run_estimate import DeviceSpec, choose_recomputing, preflight

    (tmp_path / "config.json").write_text(json.dumps(QWEN_3B))
    for name_of_file in ("model.safetensors", "tokenizer.json"):  # their contents are not read
        (tmp_path / name_of_file).touch()
    config = read_config(presets()[name], overrides=[f"model.name={tmp_path}"]).resolve()
    place = DeviceSpec(kind="cuda", total=8 * 2**30, program=0)
    shape = shape_of(config.model)
    config, _ = choose_recomputing(config, shape, place, free=8 * 2**30)
    assert preflight(config, shape, place, prompt_tokens=256).fits
    whole = replace(config, model=replace(config.model, quantization=None))
    assert not preflight(whole, shape_of(whole.model), place, prompt_tokens=256).fits


def test_the_wheel_carries_configs_and_examples():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"configs": "groupwise/configs", "examples": "groupwise/examples"}
    assert (ROOT / "configs" / "gsm8k-quick.yaml").is_file()
    assert (ROOT / "examples" / "capitals.py").is_file()
