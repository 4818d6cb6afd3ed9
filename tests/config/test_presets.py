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

QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768}
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
SHAPES = {
    "Qwen/Qwen2.5-1.5B-Instruct": ((1536, 8960, 28, 12, 2), 151936),
    "Qwen/Qwen2.5-3B-Instruct": ((2048, 11008, 36, 16, 2), 151936),
    "Qwen/Qwen2.5-7B-Instruct": ((3584, 18944, 28, 28, 4), 152064),
}


def preset_peak(name: str, folder: Path, *, gigabytes: float, **model: object) -> tuple[bool, float]:
    """Return whether a preset fits a GPU, and its predicted peak in GB. Only its model's shape is read."""
    from groupwise.training.resources.model_shape import shape_of
    from groupwise.training.resources.run_estimate import DeviceSpec, choose_recomputing, preflight

    sizes, vocabulary = SHAPES[read_config(presets()[name]).model.name]
    described = QWEN | dict(zip(SIZES, sizes, strict=True)) | {"vocab_size": vocabulary}
    described["tie_word_embeddings"] = sizes[0] < 3000
    (folder / "config.json").write_text(json.dumps(described))
    for name_of_file in ("model.safetensors", "tokenizer.json"):  # their contents are not read
        (folder / name_of_file).touch()
    config = read_config(presets()[name], overrides=[f"model.name={folder}"]).resolve()
    config = replace(config, model=replace(config.model, **model))
    place = DeviceSpec(kind="cuda", total=int(gigabytes * 1e9), program=0)
    shape = shape_of(config.model)
    config, _ = choose_recomputing(config, shape, place, free=place.total)
    estimate = preflight(config, shape, place, prompt_tokens=256)
    return estimate.fits, estimate.peak / 1e9


def test_a_preset_is_printed_by_name(capsys):
    assert main(["config", "--preset", "gsm8k-quick"]) == 0
    assert capsys.readouterr().out == (ROOT / "configs" / "gsm8k-quick.yaml").read_text()
    main(["config", "--list"])
    assert "math-test" in capsys.readouterr().out.split()


def test_an_unknown_preset_is_answered_with_the_presets(capsys):
    assert main(["config", "--preset", "gsm9k"]) == 2
    assert "the presets are gpu-24gb, gpu-80gb" in capsys.readouterr().err


def test_a_preset_needs_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_config(Path("gsm8k-quick")).run.max_steps == 10


@pytest.mark.parametrize("name", ["gsm8k-quick", "gsm8k-medium", "gsm8k-full", "gsm8k-debug"])
def test_the_presets_for_small_gpus_fit_eight_gigabytes(name, tmp_path):
    assert preset_peak(name, tmp_path, gigabytes=8.59)[0]
    assert not preset_peak(name, tmp_path, gigabytes=8.59, quantization=None)[0]


@pytest.mark.parametrize(("name", "gigabytes"), [("gpu-24gb", 24), ("gpu-80gb", 80), ("gpus-8", 80)])
def test_the_presets_of_a_gpu_fit_it_and_use_more_than_half_of_it(name, gigabytes, tmp_path):
    fits, peak = preset_peak(name, tmp_path, gigabytes=gigabytes)
    assert fits
    assert peak > gigabytes / 2


def test_the_wheel_carries_configs_and_examples():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"configs": "groupwise/configs", "examples": "groupwise/examples"}
    assert (ROOT / "configs" / "gsm8k-quick.yaml").is_file()
    assert (ROOT / "examples" / "capitals.py").is_file()
