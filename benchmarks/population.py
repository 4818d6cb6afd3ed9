"""What a population on one base costs: the speed of mixed rollouts, and memory.

    python benchmarks/population.py                      # two minutes on one GPU
    python benchmarks/population.py --members 2 4 8 16
    python benchmarks/population.py --output results     # also writes population.json there
    python benchmarks/population.py --quick              # does it run? The times mean nothing

A random model in the shape of Qwen2.5 (bfloat16 on a GPU) with LoRA of rank 16 on all linear layers.

1. **Rollouts.** 512 answers of exactly 512 tokens to prompts of 128, in groups of 8, the best of two calls:
   first all by one adapter, folded into the weights as in `groupwise train`; then by N members, each with
   the same share of the prompts, in one batch.
2. **Exactness.** A few of the members' answers again, each member alone and folded: mean |Δ| of the
   log-probability of the first token, which has the same context in both. Rounding to bfloat16 is all of it.
3. **Memory.** What is held with N members whose optimizers have made a step, the generator at rest: against
   base + N × (adapter + optimizer); and with the generator's copies of the adapters beside it, without the
   KV cache, whose size is a choice.
"""

from __future__ import annotations

import argparse
import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from generation import FULL, GROUP, QUICK, Size, random_policy, requests, timed
from machine import machine, markdown
from random_qwen import SHAPES

from groupwise.config.schema import EngineConfig, OptimConfig
from groupwise.engine.engine import Engine
from groupwise.engine.multi_lora import LoRABank, MultiLoRAEngine
from groupwise.learner.learner import clipped_step
from groupwise.learner.optimizer import make_optimizer
from groupwise.model.load import keep_quiet
from groupwise.model.policy import Policy
from groupwise.records import Completion, Request, Sampling

RANK = 16


def population(policy: Policy, count: int) -> LoRABank:
    """Members that differ, as after some training."""
    members = LoRABank(policy)
    generator = torch.Generator(policy.device).manual_seed(0)
    for _ in range(count - 1):
        members.add(
            {
                name: tensor + 1e-3 * torch.randn(tensor.shape, generator=generator, device=tensor.device)
                for name, tensor in members.of(0).items()
            }
        )
    return members


def asked(policy: Policy, size: Size, members: int) -> list[Request]:
    """The prompts dealt out to the members, each member's together."""
    whole = requests(size.sequences, size.prompt, policy.head_weight.shape[0], seed=1)
    return [replace(request, adapter=number * members // len(whole)) for number, request in enumerate(whole)]


def speed(policy: Policy, engine: Any, size: Size, members: int) -> tuple[float, list[list[Completion]]]:
    """tok/s of the better of two calls, after one that compiles."""
    engine.generate(asked(policy, size, members)[: GROUP * 8], Sampling(max_tokens=2))
    runs = [
        timed(
            policy,
            lambda: engine.generate(asked(policy, size, members), Sampling(max_tokens=size.answer)),
        )
        for _ in range(2)
    ]
    answers, seconds = min(runs, key=lambda run: run[1])
    tokens = sum(len(completion.tokens) for group in answers for completion in group)
    return tokens / seconds, answers


def first_token_gap(members: LoRABank, size: Size, answers: list[list[Completion]]) -> float:
    """Mean |Δ log-probability| of first tokens, mixed against each member alone, where both drew the same."""
    wanted = asked(members.policy, size, len(members))
    differences: list[float] = []
    for number in range(len(members)):
        own = [index for index, request in enumerate(wanted) if request.adapter == number][:2]
        members.put_in_place(number)
        engine = Engine(members.policy, EngineConfig())
        alone = engine.generate([wanted[index] for index in own], Sampling(max_tokens=1))
        engine.release()
        for index, group in zip(own, alone, strict=True):
            for mixed, single in zip(answers[index], group, strict=True):
                if mixed.tokens[0] == single.tokens[0]:
                    differences.append(abs(mixed.logprobs[0] - single.logprobs[0]))
    return sum(differences) / max(1, len(differences))


def held(device: torch.device) -> float:
    """Bytes of tensors that are alive."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return float(torch.cuda.memory_allocated())
    return 0.0


def trained(policy: Policy, members: LoRABank) -> list[torch.optim.Optimizer]:
    """An optimizer for each member, its state made by a step of no size."""
    optimizers = []
    for number in range(len(members)):
        members.put_in_place(number)
        optimizer = make_optimizer(policy, OptimConfig(learning_rate=1e-9))
        for parameter in policy.trainable().values():
            parameter.grad = torch.zeros_like(parameter)
        clipped_step(policy, optimizer, rate=1e-9, max_grad_norm=1.0)
        optimizers.append(optimizer)
    return optimizers


def memory(shape: str, count: int, device: torch.device) -> dict[str, float]:
    """Bytes, predicted and held."""
    empty = held(device)
    policy = random_policy(shape, device=device, lora=RANK)
    adapter = sum(p.numel() * p.element_size() for p in policy.trainable().values())
    base = sum(p.numel() * p.element_size() for p in policy.model.parameters()) - adapter
    members = population(policy, count)
    optimizers = trained(policy, members)
    at_rest = held(device) - empty
    expected = base + count * 3 * adapter  # AdamW keeps two numbers beside each
    from groupwise.engine.cpu_runner import fused_cpu_forward
    from groupwise.engine.cuda.fused_layers import fused_forward

    copies = fused_forward(policy, members) if device.type == "cuda" else fused_cpu_forward(policy, members)
    assert copies is not None
    generating = held(device) - empty
    del optimizers, copies
    return {
        "base": base,
        "adapter": adapter,
        "expected": expected,
        "at_rest": at_rest,
        "generating": generating,
        "over_at_rest": at_rest / expected - 1,
        "over_generating": generating / expected - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1.5b")
    parser.add_argument("--members", nargs="+", type=int, default=[2, 8, 16])
    parser.add_argument("--output", type=Path, help="a folder for population.json")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    options = parser.parse_args()
    keep_quiet()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, size = ("quick", replace(QUICK, sequences=64)) if options.quick else (options.shape, FULL)
    about = torch.cuda.get_device_name() if device.type == "cuda" else ""
    about = about or machine(threads=torch.get_num_threads(), torch=torch.__version__)
    print(
        f"{about} · torch {torch.__version__} · {size.sequences} × ({size.prompt} → {size.answer})",
        flush=True,
    )

    result: dict[str, Any] = {"machine": about, "shape": shape, "rank": RANK, "tok/s": {}, "gap": {}}
    policy = random_policy(shape, device=device, lora=RANK)
    engine = Engine(policy, EngineConfig())
    single, _ = speed(policy, engine, size, 1)
    engine.release()
    rows = [["1, folded", f"{single:,.0f}", "100 %", ""]]
    result["tok/s"]["folded"] = single
    for count in options.members:
        members = population(policy, count)
        together = MultiLoRAEngine(members, EngineConfig())
        assert together.batched, "the layers are not of the fused kind"
        rate, answers = speed(policy, together, size, count)
        together.release()
        gap = first_token_gap(members, size, answers)
        members.put_in_place(0)
        result["tok/s"][str(count)], result["gap"][str(count)] = rate, gap
        rows.append([str(count), f"{rate:,.0f}", f"{rate / single:.0%}", f"{gap:.1e}"])
        print(f"{count} members: {rate:,.0f} tok/s, {rate / single:.1%} of one", flush=True)
        del members, together
    del policy, engine
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    print("\n" + markdown(["Members", "tok/s", "of one", "first token, mean abs Δ"], rows) + "\n", flush=True)
    if device.type == "cuda":
        rows = []
        result["memory"] = {}
        for count in options.members:
            found = memory(shape, count, device)
            gc.collect()
            torch.cuda.empty_cache()
            result["memory"][str(count)] = found
            parts = [found[name] / 1e9 for name in ("base", "adapter", "expected", "at_rest", "generating")]
            shares = [found["over_at_rest"], found["over_generating"]]
            rows.append([str(count), *(f"{x:.2f}" for x in parts), *(f"{share:+.1%}" for share in shares)])
        header = [
            "Members",
            "base GB",
            "adapter",
            "expected",
            "at rest",
            "generating",
            "over",
            "over, generating",
        ]
        print(markdown(header, rows) + "\n", flush=True)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "population.json").write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
