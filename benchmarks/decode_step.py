"""Where the time of a decoding step goes on a GPU: its kernels, and what the chip could do at best.

    python benchmarks/decode_step.py                         # half a minute on one GPU
    python benchmarks/decode_step.py --rows 64 --shape 0.5b
    python benchmarks/decode_step.py --fp8

Groups of 8 answers to prompts of 128 tokens by a random model, as in `generation`. A few steps around the one
at which every answer has `--own` tokens are profiled while the engine runs as it always does; what is left
of their wall time when all kernels are added up is idle (or kernels that ran beside others, if negative).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from generation import GROUP, random_policy, requests
from machine import markdown
from random_qwen import SHAPES
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from groupwise.config.schema import EngineConfig
from groupwise.engine.cuda.graph_runner import GraphRunner
from groupwise.engine.engine import Engine
from groupwise.model.policy import Policy
from groupwise.records import Sampling

PROMPT = 128
STEPS = 10
BYTES_A_SECOND, PRODUCTS_A_SECOND = 4.8e12, 989e12
"""What an H200 can read, and multiply and add in bfloat16, as its maker says."""
KINDS = {
    "attention": ("attend_", "join_shares"),
    "between products": (
        "add_norm",
        "rotate_and_store",
        "silu_and_multiply",
        "quantize_rows",
        "store_keys",
        "open_step",
    ),
    "drawing": ("sum_chunks", "close_step"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas"),
}


class Watched:
    """Steps of a runner, some of them profiled."""

    def __init__(self, *, begin: int) -> None:
        self.begin, self.count = begin, 0
        self.seconds = 0.0
        self.profile = profile(activities=[ProfilerActivity.CUDA])

    def __enter__(self) -> Watched:
        self._step: Any = GraphRunner.step

        def step(*args: Any, **kwargs: Any) -> None:
            if self.count == self.begin:
                torch.cuda.synchronize()
                self.profile.start()
                self._started = time.perf_counter()
            if self.count == self.begin + STEPS:
                torch.cuda.synchronize()
                self.seconds = time.perf_counter() - self._started
                self.profile.stop()
            self.count += 1
            self._step(*args, **kwargs)

        GraphRunner.step = step  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        GraphRunner.step = self._step  # type: ignore[method-assign]

    def kernels(self) -> list[tuple[str, float, float]]:
        """Of each: its name, how often it runs in a step, and its microseconds each time."""
        events = [event for event in self.profile.key_averages() if event.device_type == DeviceType.CUDA]
        found = [(event.key, event.count / STEPS, event.device_time_total / event.count) for event in events]
        return sorted(found, key=lambda kernel: -kernel[1] * kernel[2])


def kind_of(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(p in name.lower() for p in parts)), "other")


def floor(policy: Policy, rows: int, own: int, *, fp8: bool) -> dict[str, float]:
    """Milliseconds that reading and multiplying alone would take. The output layer stays in bfloat16."""
    every = sum(p.numel() for name, p in policy.model.named_parameters() if p.dim() == 2)
    head = policy.head_weight.numel()
    matrices = head + (every - head) * (0.5 if fp8 else 1.0)
    tokens = rows * own + rows // GROUP * PROMPT
    cached = (2 if fp8 else 4) * tokens * policy.layers * policy.key_heads * policy.head_size
    return {
        "reading weights": 1e3 * 2 * matrices / BYTES_A_SECOND,
        "reading keys and values": 1e3 * cached / BYTES_A_SECOND,
        "products": 1e3 * 2 * rows * matrices / PRODUCTS_A_SECOND,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1.5b")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--own", type=int, default=256, help="tokens that every answer has then")
    parser.add_argument("--fp8", action="store_true", help="products and cache in FP8")
    parser.add_argument("--shown", type=int, default=24, help="kernels")
    parser.add_argument("--json", type=Path, help="also write all of them to this file")
    options = parser.parse_args()
    policy = random_policy(options.shape, device=torch.device("cuda"))
    asked = requests(options.rows, PROMPT, policy.head_weight.shape[0], seed=1)
    fp8 = "fp8" if options.fp8 else None
    settings = EngineConfig(max_sequences=options.rows, quantization=fp8, kv_cache_dtype=fp8)
    engine = Engine(policy, settings)
    sampling = Sampling(max_tokens=options.own + STEPS + 4)
    engine.generate(asked, sampling)  # compiles kernels, captures graphs
    with Watched(begin=options.own - STEPS // 2) as watched:
        engine.generate(asked, sampling)
    kernels = watched.kernels()
    step = 1e3 * watched.seconds / STEPS
    print(
        f"{torch.cuda.get_device_name()}, {options.shape}, {options.rows} rows, {options.own} own tokens: ",
        end="",
    )
    print(f"{step:.2f} ms a step, {1e3 * options.rows / step:,.0f} tok/s\n")
    spent: Counter[str] = Counter()
    for name, times, each in kernels:
        spent[kind_of(name)] += times * each / 1e3
    spent["idle"] = step - spent.total()
    rows = [[kind, f"{ms:.3f}", f"{ms / step:.1%}"] for kind, ms in spent.most_common()]
    print(markdown(("what", "ms a step", "share"), rows), "\n")
    rows = [
        [kind_of(name), name[:70], f"{times:g}", f"{each:.1f}", f"{times * each / 1e3:.3f}"]
        for name, times, each in kernels[: options.shown]
    ]
    print(markdown(("what", "kernel", "times", "µs", "ms a step"), rows), "\n")
    print(
        ", ".join(
            f"{what} {ms:.2f} ms"
            for what, ms in floor(policy, options.rows, options.own, fp8=options.fp8).items()
        )
    )
    if options.json:
        found = {"step_ms": step, "kinds": dict(spent), "kernels": kernels}
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
