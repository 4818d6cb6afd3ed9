"""DeepSpeed on one GPU, in one process: the same update as without it, its time, and its memory.

    python benchmarks/scale_deepspeed.py --output out            # on one GPU
    python benchmarks/scale_deepspeed.py --output out --quick    # does it run? The times mean nothing

With one process nothing is divided and a run would not use DeepSpeed; but its whole way is gone on the GPU:
weights gathered for each layer (ZeRO-3), the float32 copies, the optimizer in main memory, generation with
gathered weights between updates. A random model of Qwen2.5's shape, all weights and adapters. "gap": the
mean difference, in nats, between the log-probabilities of generator and trainer for the same tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from generation import random_policy
from machine import held, markdown, settle
from shared_prefix import batch

from groupwise.config.schema import AlgoConfig, EngineConfig, OptimConfig
from groupwise.engine.engine import Engine
from groupwise.learner.learner import Learner
from groupwise.model import sharding
from groupwise.parallel.processes import divide
from groupwise.records import Request, Sample, Sampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WAYS = ("ddp", "zero1", "zero2", "zero3", "zero2 offload", "zero3 offload")


def measured(shape: str, way: str, *, lora: int, groups: int, length: int) -> dict[str, Any]:
    """Three updates with a generation after each, and what they left."""
    layout, _, offload = way.partition(" ")
    before = torch.cuda.memory_allocated() / 1e9 if DEVICE.type == "cuda" else 0.0  # DeepSpeed keeps some
    policy = random_policy(shape, device=DEVICE, lora=lora)
    if layout != "ddp":
        divide(policy, layout)
    sampling = Sampling(max_tokens=length)
    learner = Learner(
        policy,
        algo=AlgoConfig(correction="none", max_gap=float("inf")),
        optim=OptimConfig(learning_rate=1e-5, offload=bool(offload)),
        sampling=sampling,
        max_steps=3,
    )
    engine = Engine(policy, EngineConfig())
    samples = batch(groups=groups, prompt=64, answer=length, vocabulary=policy.vocabulary)
    norms, seconds = [], []
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        settle(DEVICE.type)
        started = time.perf_counter()
        report = learner.update(samples, sequences=len(samples), tokens=sum(s.length for s in samples))
        settle(DEVICE.type)
        seconds.append(time.perf_counter() - started)
        norms.append(report["policy/grad_norm"])
        peak = held(DEVICE.type) - before
        with engine.ready():
            drawn = engine.generate([Request(prompt=tuple(range(5, 25)), seeds=tuple(range(8)))], sampling)
        engine.release()
    answers = [
        as_sample(tuple(range(5, 25)), completion, member) for member, completion in enumerate(drawn[0])
    ]
    gap = learner.update(answers, sequences=8, tokens=8 * length)["policy/gap"]
    return {"norms": norms, "seconds": min(seconds), "peak": peak, "gap": gap}


def as_sample(prompt: tuple[int, ...], completion: Any, member: int) -> Sample:
    nothing, trained = (0.0,) * len(prompt), len(completion.tokens)
    return Sample(
        tokens=(*prompt, *completion.tokens),
        trained=(False,) * len(prompt) + (True,) * trained,
        logprobs=(*nothing, *completion.logprobs),
        entropies=(*nothing, *completion.entropies),
        advantages=(*nothing, *((1.0 if member % 2 else -1.0,) * trained)),
        prefix=len(prompt),
        group=0,
        member=member,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out"))
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo")
    shape, groups, length = ("quick", 2, 16) if given.quick else ("1.5b", 8, 256)
    if given.quick:
        sharding.KEPT_WHOLE = 0
    found: dict[str, dict[str, Any]] = {}
    for name, lora in (("all weights", 0), ("adapters", 16)):
        rows = []
        for way in WAYS:
            try:
                each = measured(shape, way, lora=lora, groups=groups, length=length)
            except Exception as error:  # one way that fails should not hide the others
                each = {"failed": f"{type(error).__name__}: {error}"}
                rows.append([way, "failed: " + each["failed"].splitlines()[0][:80], "", "", ""])
            else:
                norms = " ".join(f"{norm:.4g}" for norm in each["norms"])
                rows.append(
                    [way, norms, f"{each['seconds']:.2f}", f"{each['peak']:.1f}", f"{each['gap']:.1e}"]
                )
            found[f"{name}, {way}"] = each
            gc.collect()
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
        header = (name, "gradient norms of three updates", "s an update", "GB at most", "gap")
        print(markdown(header, rows), flush=True)
    (given.output / "deepspeed.json").write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
