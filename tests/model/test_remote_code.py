"""Code that lies in a model's folder is never run, whatever the user answers."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import groupwise
from groupwise import cli

TINY = Path(str(groupwise.__file__)).parent / "model" / "tiny"
REFUSAL = "groupwise never runs code from a model's folder"

CODE = """
from pathlib import Path

Path({mark!r}).write_text("this code was run")

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def mark_of(folder: Path) -> Path:
    return folder.parent / "mark"


def with_code(folder: Path, *, model: bool, tokenizer: bool) -> Path:
    """A copy of the built-in model whose config or tokenizer names code beside it, which leaves a mark."""
    shutil.copytree(TINY, folder)
    (folder / "own.py").write_text(CODE.format(mark=str(mark_of(folder))))
    if model:
        path = folder / "config.json"
        named = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "own", "auto_map": named}))
    if tokenizer:
        path = folder / "tokenizer_config.json"
        named = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
        changed = {"tokenizer_class": "OwnTokenizer", "auto_map": named}
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return folder


@pytest.fixture(params=["its model", "its tokenizer"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return with_code(
        tmp_path / "named", model=request.param == "its model", tokenizer=request.param == "its tokenizer"
    )


ONCE = ["--model", "FOLDER", "--output-dir", "PLACE", "--no-trackio", "--max-steps", "1"]
COMMANDS = {
    "train": ["train", "countdown", *ONCE],
    "sft": ["sft", "--task", "countdown", *ONCE],
    "evolve": ["evolve", "countdown", *ONCE],
    "eval": ["eval", "FOLDER", "--examples", "1", "model.device=cpu"],
    "chat": ["chat", "FOLDER", "--prompt", "1 + 1", "model.device=cpu"],
    "serve": ["serve", "FOLDER", "--port", "0", "model.device=cpu"],
    "merge": ["merge", "ADAPTER", "--base-model", "FOLDER", "--output-path", "PLACE/merged"],
    "quantize": ["quantize", "--model", "FOLDER", "--output-path", "PLACE/quantized"],
    "convert": ["convert", "PICKLED", "--output-path", "PLACE/converted"],
}


def adapter(folder: Path) -> Path:
    folder.mkdir()
    settings = {"r": 4, "peft_type": "LORA", "base_model_name_or_path": "tiny"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def pickled(folder: Path) -> Path:
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_the_code_in_a_models_folder(
    command: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if command == "quantize":
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    words = COMMANDS[command]
    if "ADAPTER" in words:
        adapter(tmp_path / "adapter")
    if "PICKLED" in words:
        pickled(folder)
    places = {"FOLDER": folder, "PICKLED": folder, "ADAPTER": tmp_path / "adapter", "PLACE": tmp_path / "out"}
    for name, path in places.items():
        words = [word.replace(name, str(path)) for word in words]
    code = cli.main(words)
    said = capsys.readouterr()
    assert not mark_of(folder).exists()
    assert (code, said.err.count("\n")) == (2, 1)
    assert REFUSAL in said.err
    assert "y/N" not in said.out
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("words", [["doctor", "--model"], ["doctor", "--template"]])
def test_looking_at_a_model_does_not_run_its_code(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = with_code(tmp_path / "named", model=True, tokenizer=True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    assert cli.main([*words, str(folder)]) == 2
    assert REFUSAL in capsys.readouterr().err
    assert not mark_of(folder).exists()


def test_a_shell_that_answers_yes_is_not_even_asked(tmp_path: Path) -> None:
    folder = with_code(tmp_path / "named", model=True, tokenizer=True)
    ended = subprocess.run(
        [sys.executable, "-m", "groupwise", "eval", str(folder), "--examples", "1", "model.device=cpu"],
        input="y\n" * 20,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")},
    )
    assert ended.returncode == 2
    assert REFUSAL in ended.stderr
    assert "y/N" not in ended.stdout
    assert not mark_of(folder).exists()


def test_a_known_model_that_also_brings_code_is_loaded_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_code(tmp_path / "named", model=True, tokenizer=False)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "llama"}))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    words = ["rollout.max_tokens=4", "model.device=cpu", "evaluate.samples=1"]
    assert cli.main(["eval", str(folder), "--examples", "1", *words]) == 0
    assert not mark_of(folder).exists()
