"""Predicted against measured: the memory and the time of one GRPO step, over a grid of models and settings.

    python benchmarks/will_it_fit.py --output results
    python benchmarks/will_it_fit.py --grid gpu --output results

Each case is a process of its own that trains two steps on answers of full length (random weights do not know
how to end one) after `groupwise doctor` has said what a step will take. Memory is what the metrics report:
the most that the process held on a CPU, that torch had allocated on a GPU. On a GPU several cases run at
once, which changes no memory but makes their times worthless. `--quick`: a few small cases, on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

TASK = """
import zlib
import groupwise as gw

def luck(rollout: gw.Rollout, example: gw.Example) -> float:
    return float(zlib.crc32(repr(rollout.tokens).encode()) % 2)  # most random tokens have no text

task = gw.Task(
    name="luck",
    examples=[{"n": n} for n in range(64)],
    prompt=lambda example: f"{example['n']} " + "plus one, " * WORDS,
    rewards={"luck": luck},
)
"""

SIZES = {
    "8m": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8},
    "45m": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 16},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
}
"""Llamas in the manner of SmolLM2 for a CPU; on a GPU, the shapes of Qwen2.5 in `random_qwen`."""

KINDS = {
    "lora": ("lora.r=16",),
    "qlora": ("lora.r=16", "model.quantization=nf4"),
    "full": ("lora.r=0",),
}


@dataclass(frozen=True, slots=True)
class Case:
    size: str
    kind: str
    length: int
    prompts: int
    group: int

    @property
    def name(self) -> str:
        return f"{self.size} {self.kind} {self.length}"


def cases(grid: str, *, quick: bool) -> list[Case]:
    if grid == "gpu":
        sizes, lengths, prompts = ("135m", "0.5b", "1.5b"), (256, 1024), 4
        if quick:
            sizes, lengths, prompts = ("quick",), (8, 16), 2
        # Sizes change fastest, so that large ones are not all under way at once.
        return [Case(s, k, n, prompts, 8) for n, k, s in product(lengths, KINDS, sizes)]
    found = [Case(s, k, n, 2, 8) for s, k, n in product(SIZES, KINDS, (48, 128))]
    return found[:1] + found[4:5] if quick else found


def llama_folder(size: str, folder: Path) -> Path:
    """A random model with the tokenizer of the built-in one."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from groupwise.model.resolve import TINY_FOLDER

    tokenizer = AutoTokenizer.from_pretrained(TINY_FOLDER)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        num_attention_heads=SIZES[size]["hidden_size"] // 64,
        num_key_value_heads=max(1, SIZES[size]["hidden_size"] // 192),
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **SIZES[size],
    )
    path = folder / size
    if not path.is_dir():
        LlamaForCausalLM(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


def make_models(found: list[Case], grid: str, folder: Path) -> dict[str, Path]:
    """The folder of every size, made in a process of its own: what it takes must not be in the way."""
    sizes = sorted({case.size for case in found})
    words = [sys.executable, __file__, "--grid", grid, "--make", *sizes, "--output", str(folder)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return dict(zip(sizes, map(Path, done.stdout.split()[-len(sizes) :]), strict=True))


def made(size: str, grid: str, folder: Path) -> Path:
    if grid == "cpu":
        return llama_folder(size, folder)
    import torch
    from random_qwen import random_folder

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Path(random_folder(size, device=device))


def settings(case: Case, model: Path, folder: Path) -> list[str]:
    return [
        f"model.name={model}",
        f"rollout.prompts={case.prompts}",
        f"rollout.group_size={case.group}",
        f"rollout.max_tokens={case.length}",
        "rollout.temperature=1.0",
        "rollout.refill=0",
        "algo.max_gap=10",  # deep random models blow rounding up
        "optim.minibatches=1",
        "run.max_steps=2",
        "track.report=false",
        "run.save_every=100",
        f"run.output_dir={folder}",
        "track.trackers=[]",
        "evaluate.skip=true",
        *KINDS[case.kind],
    ]


def command(*words: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "groupwise", *words], env=environment, capture_output=True, text=True
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(words)}: {done.stderr[-2000:]}")
    return done.stdout


def measured(case: Case, model: Path, folder: Path, *, prompt: int) -> dict[str, Any]:
    task = folder / "task.py"
    words = settings(case, model, folder)
    ahead = json.loads(command("doctor", "--json", "--prompt-tokens", str(prompt), *words))["preflight"]
    name = f"run-{case.name.replace(' ', '-')}"
    command("train", str(task), f"run.name={name}", *words)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return {
        "case": case.name,
        "predicted_gb": ahead["peak_gb"],
        "measured_gb": rows[-1]["memory/peak_gb"],
        "predicted_s": ahead["seconds"]["step"],
        "measured_s": min(row["time/step"] for row in rows),
        "truncated": rows[-1]["rollout/truncated"],
        "out_of_memory": float("out of memory" in (folder / name / "training.log").read_text()),
        "parts_gb": ahead["parts_gb"],
    }


def prompt_tokens(model: Path) -> int:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "10 " + "plus one, " * 12
    if tokenizer.chat_template is None:
        return len(tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| case | predicted, GB | measured, GB | error | predicted, s | measured, s |"
    yield "|---|---:|---:|---:|---:|---:|"
    for row in rows:
        error = float(row["predicted_gb"]) / float(row["measured_gb"]) - 1
        yield (
            f"| {row['case']} | {row['predicted_gb']:.2f} | {row['measured_gb']:.2f} | {error:+.0%} | "
            f"{row['predicted_s']:.1f} | {row['measured_s']:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--grid", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--only", help="cases whose name holds this")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for will_it_fit_GRID.json")
    parser.add_argument("--at-once", type=int, help="cases side by side; 4 on a GPU, else 1")
    parser.add_argument("--make", nargs="+", metavar="SIZE", help="only make models, under --output")
    arguments = parser.parse_args()
    grid = arguments.grid
    if arguments.make:
        print("\n".join(str(made(size, grid, arguments.output)) for size in arguments.make))
        return
    found = [
        case
        for case in cases(grid, quick=arguments.quick)
        if not arguments.only or arguments.only in case.name
    ]
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(arguments.at_once or (4 if grid == "gpu" else 1)) as pool,
    ):
        folder = Path(scratch)
        (folder / "task.py").write_text(TASK.replace("WORDS", "12"))
        models = make_models(found, grid, folder)
        prompts = {size: prompt_tokens(model) for size, model in models.items()}
        for row in pool.map(
            lambda case: measured(case, models[case.size], folder, prompt=prompts[case.size]), found
        ):
            rows.append(row)
            print(row, flush=True)
            if arguments.output:
                arguments.output.mkdir(parents=True, exist_ok=True)
                (arguments.output / f"will_it_fit_{grid}.json").write_text(json.dumps(rows, indent=1))
    print("\n".join(lines(rows)))


if __name__ == "__main__":
    main()
