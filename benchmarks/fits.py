"""Does a whole GRPO step fit: the shape of Qwen2.5-7B in 24 GB, and of 3B in 8 GB, QLoRA, 1024-token answers.

    python benchmarks/fits.py --output results              # on any larger GPU
    python benchmarks/fits.py --quick                       # the same steps, small, on a CPU

Each case is a process of its own that torch lets take no more than the card would have left beside the CUDA
context: past that an allocation fails. Random weights in nf4, made once, never end an answer, so every
answer has its 1024 tokens. Two steps: in the second one the optimizer's state is there from the start.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CONTEXT_GB = 0.6
"""What the CUDA context of a process takes of a card, which torch does not count."""


@dataclass(frozen=True, slots=True)
class Case:
    shape: str
    card_gb: float
    prompts: int
    length: int


CASES = (Case("7b", 24.0, 4, 1024), Case("3b", 8.0, 4, 1024))
QUICK = (Case("quick", 24.0, 2, 16),)


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Train two steps under the limit; to be called in a process of its own."""
    import torch
    from random_qwen import quantized_folder
    from will_it_fit import TASK, prompt_tokens

    from groupwise.commands.doctor import look_ahead
    from groupwise.config import read_config
    from groupwise.training.loop import train

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    limit = int((case.card_gb - CONTEXT_GB) * 1e9)
    if on_gpu:
        card = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / card)
    started = time.perf_counter()
    model = quantized_folder(case.shape, device=device)
    made = time.perf_counter() - started
    if on_gpu:
        torch.cuda.empty_cache()
        made_peak = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
    task = folder / "task.py"
    task.write_text(TASK.replace("WORDS", "12"))
    config = read_config(
        overrides=[
            f"model.name={model}",
            f"task.name={task}",
            f"rollout.prompts={case.prompts}",
            "rollout.group_size=8",
            f"rollout.max_tokens={case.length}",
            "rollout.temperature=1.0",
            "rollout.refill=0",
            "lora.r=16",
            "algo.max_gap=10",  # deep random models blow rounding up
            "run.max_steps=2",
            "run.save_every=100",
            f"run.output_dir={folder}",
            "track.trackers=[]",
            "track.report=false",
            "evaluate.skip=true",
        ]
    )
    ahead = look_ahead(
        config.resolve(),
        prompt_tokens=prompt_tokens(model),
        answer_tokens=None,
        memory_gb=limit / 1e9,
        on="cuda",
    )
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = train(config)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {
        **asdict(case),
        "limit_gb": limit / 1e9,
        "predicted_gb": ahead["peak_gb"],
        "parts_gb": ahead["parts_gb"],
        "peak_gb": rows[-1]["memory/peak_gb"],
        "truncated": rows[-1]["rollout/truncated"],
        "seconds": [row["time/step"] for row in rows],
        "making_s": made,
        "log": [line for line in (run / "training.log").read_text().splitlines() if "step" not in line],
    }
    if on_gpu:
        found |= {"making_gb": made_peak, "reserved_gb": torch.cuda.max_memory_reserved() / 1e9}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="folder for fits.json")
    parser.add_argument("--quick", action="store_true", help="a small shape, on any machine")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    found = QUICK if arguments.quick else CASES
    if arguments.case is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(run_case(found[arguments.case], Path(folder))))
        return
    rows = []
    for number in range(len(found)):
        words = [sys.executable, __file__, "--case", str(number), *(["--quick"] if arguments.quick else [])]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            print(f"{found[number]}: {done.stderr[-3000:]}", file=sys.stderr)
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
        if arguments.output:
            arguments.output.mkdir(parents=True, exist_ok=True)
            (arguments.output / "fits.json").write_text(json.dumps(rows, indent=1))
    print("| shape | card, GB | may take, GB | predicted, GB | peak, GB | reserved, GB | a step, s |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row['shape']} | {row['card_gb']:.0f} | {row['limit_gb']:.1f} | {row['predicted_gb']:.2f} | "
            f"{row['peak_gb']:.2f} | {row.get('reserved_gb', 0):.2f} | {min(row['seconds']):.1f} |"
        )
    if len(rows) < len(found):
        raise SystemExit(f"{len(found) - len(rows)} of {len(found)} did not fit or failed")


if __name__ == "__main__":
    main()
