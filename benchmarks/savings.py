"""What each option that saves memory saves in an update, and what it costs in time.

    python benchmarks/savings.py --output results        # a minute on a GPU: the shape of Qwen2.5-1.5B
    python benchmarks/savings.py --shape 135m --groups 1 --prompt 32 --answer 32        # on a CPU

Every weight of a random model is trained. Each option is a process of its own: two updates, the second one
timed. Memory is the most that torch had allocated on a GPU, that the process held on a CPU. Passes are of
one size: left to choose, checkpointing would spend on larger passes what it saves.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "gradient checkpointing": {"recompute": True},
    "adamw8bit": {"kind": "adamw8bit"},
    "offload": {"offload": True},
    "checkpointing + adamw8bit": {"recompute": True, "kind": "adamw8bit"},
}


def run_option(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Two updates in this process."""
    import torch
    from generation import random_policy
    from machine import held, settle
    from shared_prefix import batch

    from groupwise.config.schema import AlgoConfig, OptimConfig
    from groupwise.learner.learner import Learner
    from groupwise.model.ops.checkpointing import recompute_layers
    from groupwise.records import Sampling

    chosen = dict(OPTIONS[name])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = random_policy(arguments.shape, device=device)
    if chosen.pop("recompute", False):
        recompute_layers(policy)
    samples = batch(
        groups=arguments.groups,
        prompt=arguments.prompt,
        answer=arguments.answer,
        vocabulary=len(policy.head_weight),
    )
    learner = Learner(
        policy,
        algo=AlgoConfig(correction="none", max_gap=math.inf),
        optim=OptimConfig(learning_rate=1e-9, micro_batch_tokens=arguments.tokens, **chosen),
        sampling=Sampling(max_tokens=4096),
        max_steps=10,
    )
    tokens = sum(sample.length for sample in samples)
    start = held(device.type)
    for _ in range(2):
        settle(device.type)
        started = time.perf_counter()
        norm = learner.update(samples, sequences=len(samples), tokens=tokens)["policy/grad_norm"]
        settle(device.type)
        seconds = time.perf_counter() - started
    return {
        "option": name,
        "seconds": seconds,
        "start_gb": start,
        "peak_gb": held(device.type),
        "grad_norm": norm,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--shape", default="1.5b")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--answer", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192, help="of a pass")
    parser.add_argument("--output", type=Path, help="folder for savings.json")
    parser.add_argument("--option", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.option:
        print(json.dumps(run_option(arguments.option, arguments)))
        return
    rows = []
    for name in OPTIONS:
        done = subprocess.run(
            [sys.executable, *sys.argv, "--option", name], capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(f"{name}: {done.stderr[-1500:]}", file=sys.stderr)
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        if arguments.output:
            arguments.output.mkdir(parents=True, exist_ok=True)
            (arguments.output / "savings.json").write_text(json.dumps(rows, indent=1))
    print("| option | peak, GB | against none | an update, s | against none |")
    print("|---|---:|---:|---:|---:|")
    for row in rows:
        memory, pace = (row[key] / rows[0][key] - 1 for key in ("peak_gb", "seconds"))
        print(
            f"| {row['option']} | {row['peak_gb']:.2f} | {memory:+.0%} | {row['seconds']:.2f} | {pace:+.0%} |"
        )


if __name__ == "__main__":
    main()
