"""How fast rollouts are drawn, log-probabilities included, next to transformers `generate` in the same run.

    python benchmarks/generation.py                      # a minute on one GPU
    python benchmarks/generation.py --shapes 1.5b 0.5b 7b
    python benchmarks/generation.py --vllm "/path/to/its/environment/bin/python"    # three minutes more
    python benchmarks/generation.py --scaling            # also by batch size, prompt and answer length
    python benchmarks/generation.py --quick              # does it run? The times mean nothing

Models are random, in the shape of Qwen2.5 (bfloat16): speed does not depend on what the weights are. Every
workload is groups of 8 answers to prompts of 128 tokens.

1. **Start.** From weights in memory to the first tokens: kernels compiled, one graph captured.
2. **Fixed length.** 512 answers of exactly 512 tokens, plain and with a LoRA of rank 16 on all linear layers;
   on GPUs that can, also in FP8. The best of two calls; the first one also captures graphs.
3. **Long tail.** Lengths are geometric, mean 200, cut at 1024: every 200th id of the vocabulary ends an
   answer, and a random model draws nearly evenly. Once with as many answers as slots, where no slot is
   filled again and the last answers run almost alone, and once with eight times as many.
4. **transformers `generate`** on 512 prompts at once, for fewer tokens (its steps only get slower), without
   log-probabilities.
5. **vLLM**, when asked for, in a process and an environment of its own: the same prompts, groups and lengths.
6. **Gap.** Log-probabilities of what was drawn, the engine's against the trainer's forward pass: mean |Δ| and
   the KL divergence between the two, estimated on the drawn tokens (k3).

tok/s counts sampled tokens over the whole call, prompts' computation included.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from machine import machine, markdown
from random_qwen import SHAPES, random_model, shape_config

from groupwise.config.schema import EngineConfig
from groupwise.engine.engine import Engine
from groupwise.model.attention.compatibility import check_attention
from groupwise.model.attention.packed import PackedLayout
from groupwise.model.device import supports_fp8
from groupwise.model.load import keep_quiet, use_fused_ops
from groupwise.model.ops.lora_linear import use_fused_lora
from groupwise.model.policy import Policy
from groupwise.records import Completion, Request, Sampling, derive_seed

GROUP = 8
PLAIN = EngineConfig()
FP8 = {
    "FP8 products": EngineConfig(quantization="fp8"),
    "FP8 products and cache": EngineConfig(quantization="fp8", kv_cache_dtype="fp8"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    sequences: int
    prompt: int
    answer: int
    mean: int
    longest: int
    transformers_tokens: int


FULL = Size(sequences=512, prompt=128, answer=512, mean=200, longest=1024, transformers_tokens=48)
QUICK = Size(sequences=16, prompt=8, answer=6, mean=4, longest=8, transformers_tokens=4)


class NoTokenizer:
    """Tokens come from a random generator here; nothing is encoded."""

    eos_token_id = None


def random_policy(shape: str, *, device: torch.device, lora: int = 0, short: bool = True) -> Policy:
    model: Any = random_model(shape, device=device)
    check_attention(model, name=shape)
    if short:
        use_fused_ops(model)
    if lora:
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear")
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # as after some training: at the start, adapters do nothing
                torch.nn.init.normal_(parameter, std=1e-3)
        use_fused_lora(model)
    policy = Policy(model, NoTokenizer())
    policy.end_tokens = frozenset({-1})
    return policy


def requests(sequences: int, prompt: int, vocabulary: int, *, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(
            prompt=tuple(rng.integers(0, vocabulary, prompt).tolist()),
            seeds=tuple(derive_seed(seed, n, member) for member in range(GROUP)),
        )
        for n in range(sequences // GROUP)
    ]


def wait(policy: Policy) -> None:
    if policy.device.type == "cuda":
        torch.cuda.synchronize()


def timed(policy: Policy, work: Callable[[], Any]) -> tuple[Any, float]:
    wait(policy)
    start = time.perf_counter()
    result = work()
    wait(policy)
    return result, time.perf_counter() - start


class Bench:
    """One shape: the rows of its table, and what else was learnt."""

    def __init__(self, shape: str, size: Size) -> None:
        self.shape, self.size = shape, size
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.rows: list[list[str]] = []
        self.speeds: dict[str, float] = {}
        self.start_seconds = 0.0

    def note(self, name: str, tokens: int, seconds: float, *, occupancy: float | None, gap: str = "") -> None:
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
        self.speeds[name] = tokens / seconds
        shown = "" if occupancy is None else f"{occupancy:.0%}"
        self.rows.append([name, f"{tokens / seconds:,.0f}", f"{seconds:.2f}", shown, f"{peak:.1f}", gap])
        print(
            f"{self.shape} · {name}: {tokens / seconds:,.0f} tok/s in {seconds:.2f} s {shown} {gap}",
            flush=True,
        )

    def rollouts(
        self,
        name: str,
        policy: Policy,
        *,
        sequences: int,
        longest: int,
        measure_gap: bool = False,
        settings: EngineConfig = PLAIN,
    ) -> None:
        """Draw twice on one engine and note the faster call."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        vocabulary = policy.head_weight.shape[0]
        engine, sampling = Engine(policy, settings), Sampling(max_tokens=longest)
        first = requests(GROUP * 8, self.size.prompt, vocabulary, seed=0)
        _, seconds = timed(policy, lambda: engine.generate(first, Sampling(max_tokens=2)))
        self.start_seconds = self.start_seconds or seconds
        asked = requests(sequences, self.size.prompt, vocabulary, seed=1)
        runs = [timed(policy, lambda: engine.generate(asked, sampling)) for _ in range(2)]
        answers, seconds = min(runs, key=lambda run: run[1])
        tokens = sum(len(completion.tokens) for group in answers for completion in group)
        gap = "{:.1e}, {:.1e}".format(*sampler_gap(policy, asked, answers)) if measure_gap else ""
        self.note(name, tokens, seconds, occupancy=engine.occupancy, gap=gap)
        engine.release()

    def transformers_generate(self, policy: Policy) -> None:
        size, model = self.size, policy.model
        asked = requests(size.sequences, size.prompt, policy.head_weight.shape[0], seed=1)
        prompts = torch.tensor([r.prompt for r in asked for _ in r.seeds], device=self.device)
        model.set_attn_implementation("sdpa")
        tokens = size.transformers_tokens
        options: dict[str, Any] = {"do_sample": True, "top_k": 0, "pad_token_id": 0}

        def draw(count: int) -> None:
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=count,
                min_new_tokens=count,
                **options,
            )

        with torch.no_grad():
            draw(2)
            _, seconds = timed(policy, lambda: draw(tokens))
        model.set_attn_implementation("groupwise")
        self.note(f"transformers generate, {tokens} tokens", len(prompts) * tokens, seconds, occupancy=None)

    def vllm(self, command: str) -> None:
        """The fixed-length workload in vLLM, before we take any memory of the GPU."""
        size = self.size
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            config = shape_config(self.shape)
            config.architectures = ["Qwen2ForCausalLM"]
            config.save_pretrained(folder)
            job = {"model": name, "sequences": size.sequences, "group": GROUP, "prompt": size.prompt}
            job |= {"answer": size.answer, "vocabulary": config.vocab_size}
            (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
            script = [str(Path(__file__).parent / "side_vllm.py"), f"{name}/job.json", f"{name}/result.json"]
            if run_apart([*shlex.split(command), *script]):
                print("vLLM failed, and is left out", flush=True)
                return
            result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        tokens = size.sequences * size.answer
        for what, speed in result["speeds"].items():
            self.note(f"vLLM {result['version']}, {what}", tokens, tokens / speed, occupancy=None)
        print(f"vLLM starts in {result['start']:.0f} s", flush=True)

    def scaling(self) -> None:
        """Fixed lengths, one of the three sizes changed at a time."""
        policy = random_policy(self.shape, device=self.device)
        whole = self.size
        sizes = [replace(whole, sequences=whole.sequences * n // 8) for n in (1, 2, 4, 16)]
        sizes += [replace(whole, prompt=whole.prompt * n, answer=whole.answer // 2) for n in (1, 4, 16)]
        sizes += [replace(whole, answer=whole.answer * n // 4) for n in (1, 2, 8)]
        for self.size in sizes:
            name = f"{self.size.sequences} × ({self.size.prompt} → {self.size.answer})"
            self.rollouts(name, policy, sequences=self.size.sequences, longest=self.size.answer)
        self.size = whole

    def run(self, *, baseline: bool) -> None:
        size = self.size
        policy = random_policy(self.shape, device=self.device)
        whole: dict[str, Any] = {"sequences": size.sequences, "longest": size.answer, "measure_gap": True}
        self.rollouts("fixed length", policy, **whole)
        if supports_fp8(self.device):
            for name, settings in FP8.items():
                self.rollouts(name, policy, **whole, settings=settings)
        if baseline:
            policy.end_tokens = frozenset(range(0, policy.head_weight.shape[0], size.mean))
            for factor in (1, 8):
                count = factor * size.sequences
                self.rollouts(f"long tail, {count} answers", policy, sequences=count, longest=size.longest)
            self.transformers_generate(policy)
            del policy
            gc.collect()
            policy = random_policy(self.shape, device=self.device, lora=16)
            self.rollouts("LoRA r16", policy, **whole)
        del policy
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def sampler_gap(policy: Policy, asked: list[Request], answers: list[list[Completion]]) -> tuple[float, float]:
    """Mean |Δ| and KL (k3) between the engine's log-probabilities and the trainer's, of a few answers."""
    differences = []
    for request, group in list(zip(asked, answers, strict=True))[:4]:
        for completion in group[:2]:
            tokens = torch.tensor(request.prompt + completion.tokens, device=policy.device)
            layout = PackedLayout.build([(len(tokens), ())], device=policy.device)
            hidden = policy.hidden(tokens, torch.arange(len(tokens), device=policy.device), layout)
            logprobs = policy.logits(hidden[len(request.prompt) - 1 : -1]).float().log_softmax(-1)
            chosen = logprobs.gather(1, tokens[len(request.prompt) :, None])[:, 0].cpu().double().numpy()
            differences.append(chosen - np.array(completion.logprobs))
    difference = np.concatenate(differences)
    return float(np.abs(difference).mean()), float((np.exp(difference) - 1 - difference).mean())


def run_apart(command: list[str]) -> int:
    """Run a command and end all that it leaves behind, which would take time from what follows."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["1.5b"])
    parser.add_argument("--vllm", help="the Python that has vLLM, to measure it in the same run")
    parser.add_argument("--scaling", action="store_true", help="also other sizes, of the first shape")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    options = parser.parse_args()
    keep_quiet()
    about = machine(threads=torch.get_num_threads(), torch=torch.__version__)
    if torch.cuda.is_available():
        about = (
            f"{torch.cuda.get_device_name()} · Python {platform.python_version()} · torch {torch.__version__}"
        )
    print(f"{about} · transformers {transformers.__version__}", flush=True)
    shapes, size = (["quick"], QUICK) if options.quick else (options.shapes, FULL)
    header = ["Workload", "tok/s", "s", "slots drawing", "peak GiB", "gap: mean abs Δ, KL"]
    result: dict[str, Any] = {"machine": about}
    for number, shape in enumerate(shapes):
        bench = Bench(shape, size)
        if options.vllm and number == 0:
            bench.vllm(options.vllm)
        bench.run(baseline=number == 0)
        if options.scaling and number == 0:
            bench.scaling()
        result[shape] = {"tok/s": bench.speeds, "start": bench.start_seconds}
        print(f"\nQwen2.5-{shape} shape, start to the first tokens {bench.start_seconds:.1f} s\n")
        print(markdown(header, bench.rows) + "\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
