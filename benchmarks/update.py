"""What an update costs on one GPU: tokens a second, memory, and what a shared prompt saves.

    python benchmarks/update.py            # a minute on one GPU
    python benchmarks/update.py --quick    # does it run? The times mean nothing

The model is random, in the shape of Qwen2.5-1.5B, bfloat16, with a LoRA of rank 16 on all linear layers. An
update is `Learner.update`: packing, forward, backward, clipping, AdamW.

1. **Parity.** The gradients of a small float32 model against those of the same update in bfloat16, whose
   attention goes another way on a GPU.
2. **Size of a pass.** 128 answers of 512 tokens to 16 prompts of 128, in micro-batches of several sizes.
3. **Shared prompt.** Groups of 8, prompts of 2,048 tokens, answers of 256. "Repeated" gives each answer a
   group of its own, so that its prompt is computed with it. Memory is what the update adds to what was held
   before it, with a group in one pass.
4. **torch.compile**, when asked for: every layer compiled but for its attention, from the plain modules, as
   torch 2.11 loses gradients of functions that change their result in place; the first update compiles.
5. **Where the time goes**, when asked for: the longest kernels of one update.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from generation import random_policy
from machine import markdown
from shared_prefix import batch, new_learner, repeated

from groupwise.learner.learner import Learner
from groupwise.model.attention.packed import PackedLayout
from groupwise.model.policy import Policy
from groupwise.records import Sample

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measured(learner: Learner, samples: Sequence[Sample], *, repeats: int) -> tuple[float, float, float]:
    """(seconds of the fastest update, GiB that it adds at most, gradient norm), after one not counted."""
    trained = sum(sample.length for sample in samples)
    seconds, added, norm = [], 0.0, 0.0
    for _ in range(repeats + 1):
        before = 0
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        norm = learner.update(samples, sequences=len(samples), tokens=trained)["policy/grad_norm"]
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
            added = (torch.cuda.max_memory_allocated() - before) / 2**30
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:]), added, norm


def parity() -> None:
    """Gradients of one update in float32 and in bfloat16, adapters' by adapters'."""
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        policy = random_policy("quick", device=DEVICE, lora=16)
        for parameter in policy.model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        learner = new_learner(policy)
        kept: dict[str, torch.Tensor] = {}
        learner.optimizer.register_step_pre_hook(
            lambda *_, kept=kept, policy=policy: kept.update(
                {name: p.grad.float().clone() for name, p in policy.trainable().items()}
            )
        )
        samples = batch(groups=3, prompt=40, answer=30, vocabulary=len(policy.head_weight))
        learner.update(samples, sequences=len(samples), tokens=sum(s.length for s in samples))
        gradients.append(torch.cat([g.flatten() for g in kept.values()]))
    exact, half = gradients
    cosine = torch.nn.functional.cosine_similarity(exact, half, dim=0)
    print(f"bfloat16 against float32: gradients' cosine {cosine:.5f}, norms {half.norm() / exact.norm():.4f}")


def sizes_of_a_pass(policy: Policy, samples: Sequence[Sample], sizes: Sequence[int], *, repeats: int) -> None:
    rows = []
    for size in sizes:
        learner = new_learner(policy)
        learner.micro_batch_tokens = size
        seconds, added, norm = measured(learner, samples, repeats=repeats)
        trained = sum(sample.length for sample in samples)
        rows.append(
            [f"{size:,}", f"{seconds:.2f}", f"{trained / seconds:,.0f}", f"{added:.1f}", f"{norm:.4f}"]
        )
    print(markdown(("tokens a pass", "s", "trained tok/s", "GiB added", "gradient norm"), rows), flush=True)


def shared_prompt(policy: Policy, *, prompt: int, answer: int, repeats: int) -> None:
    """Times in passes of the size that the learner chooses; memory with a group in one pass."""
    samples = batch(groups=4, prompt=prompt, answer=answer, vocabulary=len(policy.head_weight))
    rows, results = [], []
    for name, work, group in (
        ("shared", samples, prompt + 8 * answer),
        ("repeated", repeated(samples), 8 * (prompt + answer)),
    ):
        seconds, _, norm = measured(new_learner(policy), work, repeats=repeats)
        in_one_pass = new_learner(policy)
        in_one_pass.micro_batch_tokens = group
        _, added, _ = measured(in_one_pass, work, repeats=1)
        results.append((seconds, max(added, 1e-9), norm))
        rows.append([name, f"{seconds:.3f}", f"{added:.2f}", f"{norm:.4f}"])
    ratios = [apart / shared for shared, apart in zip(*results, strict=True)]
    rows.append(["ratio", f"{ratios[0]:.2f} ×", f"{ratios[1]:.2f} ×", f"{ratios[2]:.4f}"])
    header = (f"prompt {prompt:,}, answer {answer}", "s", "GiB added", "gradient norm")
    print(markdown(header, rows), flush=True)


def compiled(shape: str, samples: Sequence[Sample], sizes: Sequence[int], *, repeats: int) -> None:
    """The same update by layers as they are and by layers that torch compiles."""
    torch._dynamo.config.recompile_limit = 64  # a model's layers share their code, not their numbers
    attend = PackedLayout.attend
    rows = []
    for name, short in (("our passes", True), ("plain modules, compiled", False)):
        policy = random_policy(shape, device=DEVICE, lora=16, short=short)
        if not short:
            PackedLayout.attend = torch.compiler.disable(attend)  # type: ignore[method-assign]
            for layer in policy.model.get_base_model().model.layers:
                layer.compile(dynamic=True)
        for size in sizes:
            learner = new_learner(policy)
            learner.micro_batch_tokens = size
            started = time.perf_counter()
            learner.update(samples, sequences=len(samples), tokens=sum(s.length for s in samples))
            first = time.perf_counter() - started
            seconds, added, norm = measured(learner, samples, repeats=repeats)
            rows.append([name, f"{size:,}", f"{first:.1f}", f"{seconds:.2f}", f"{added:.1f}", f"{norm:.4f}"])
            print(*rows[-1], sep=", ", flush=True)
        PackedLayout.attend = attend  # type: ignore[method-assign]
        torch._dynamo.reset()
        del policy, learner
    header = ("layers", "tokens a pass", "first, s", "s", "GiB added", "gradient norm")
    print(markdown(header, rows), flush=True)


def longest_kernels(policy: Policy, samples: Sequence[Sample], *, size: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    learner = new_learner(policy)
    learner.micro_batch_tokens = size
    measured(learner, samples, repeats=1)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        measured(learner, samples, repeats=1)
    events: Any = recorded.key_averages()
    print(events.table(sort_by="self_cuda_time_total", row_limit=28, max_name_column_width=90))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--compiled", action="store_true", help="also with layers that torch compiles")
    parser.add_argument("--kernels", action="store_true", help="also list the longest kernels")
    options = parser.parse_args()
    shape, answer, prompt, sizes = "1.5b", 512, 2048, (2048, 4096, 8192, 16384)
    if options.quick:
        shape, answer, prompt, sizes = "quick", 8, 32, (64, 128)
    if DEVICE.type == "cuda":
        parity()
    policy = random_policy(shape, device=DEVICE, lora=16)
    samples = batch(groups=16, prompt=prompt // 16, answer=answer, vocabulary=len(policy.head_weight))
    sizes_of_a_pass(policy, samples, sizes, repeats=2)
    shared_prompt(policy, prompt=prompt, answer=answer // 2, repeats=2)
    if options.compiled:
        compiled(shape, samples, sizes[1::2], repeats=2)
    if options.kernels:
        longest_kernels(policy, samples, size=sizes[1])


if __name__ == "__main__":
    main()
