"""What repeats bit for bit on one GPU, by default and with `run.deterministic`, and what that costs.

    python benchmarks/repeatability.py            # about three minutes on one GPU
    python benchmarks/repeatability.py --quick    # does it run? The times mean nothing

1. **Update.** Three updates from the same weights on the same samples, twice: are all trained weights equal?
   Random models in the shape of Qwen2.5: LoRA of rank 16 on 1.5B, and all weights of 0.5B. The cost is the
   ratio of the fastest updates in this run.
2. **Rollout.** The same requests twice, then with half of the slots (other sequences share each step).
3. **Micro-batches.** One update in passes of another size: the relative difference of what it changed.
4. **Run.** `groupwise train` with the built-in model: twice with the same seed, and once killed with SIGKILL
   after a checkpoint and resumed. Equal means: the same bits in all weights, the optimizer and all rollouts.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from generation import random_policy
from machine import machine, markdown
from shared_prefix import batch, new_learner

from groupwise.config.schema import EngineConfig
from groupwise.engine.engine import Engine
from groupwise.model.device import deterministic_kernels
from groupwise.model.policy import Policy
from groupwise.records import Completion, Request, Sampling, derive_seed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def weights(policy: Policy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in policy.trainable().values()]


def equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def updates(
    shape: str, lora: int, *, answer: int, count: int, size: int | None = None
) -> tuple[list[torch.Tensor], float]:
    """Return the trained weights after some updates, and the seconds of the fastest."""
    policy = random_policy(shape, device=DEVICE, lora=lora)
    learner = new_learner(policy)
    if size is not None:
        learner.micro_batch_tokens = size
    samples = batch(
        groups=16, prompt=128 if answer > 64 else 8, answer=answer, vocabulary=len(policy.head_weight)
    )
    tokens = sum(sample.length for sample in samples)
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        learner.update(samples, sequences=len(samples), tokens=tokens)
        settle()
        seconds.append(time.perf_counter() - started)
    return weights(policy), min(seconds)


def settle() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def update_rows(quick: bool) -> None:
    rows = []
    cases = [("quick", 16), ("quick", 0)] if quick else [("1.5b", 16), ("0.5b", 0)]
    for shape, lora in cases:
        times = {}
        for deterministic in (False, True):
            with deterministic_kernels(DEVICE, on=deterministic):
                one, seconds = updates(shape, lora, answer=8 if quick else 512, count=4)
                other, _ = updates(shape, lora, answer=8 if quick else 512, count=4)
            times[deterministic] = seconds, equal(one, other)
        same_default, same = times[False][1], times[True][1]
        rows.append(
            [
                f"{shape}, {'LoRA r16' if lora else 'all weights'}",
                yes(same_default),
                yes(same),
                f"{times[False][0]:.3f}",
                f"{times[True][0]:.3f}",
                f"{times[True][0] / times[False][0]:.3f}",
            ]
        )
    header = ("update", "equal by default", "equal, deterministic", "s", "s, deterministic", "ratio")
    print(markdown(header, rows), flush=True)


def yes(same: bool) -> str:
    return "yes" if same else "no"


def tokens_of(groups: list[list[Completion]]) -> list[tuple[int, ...]]:
    return [completion.tokens for group in groups for completion in group]


def logprobs_of(groups: list[list[Completion]]) -> list[tuple[float, ...]]:
    return [completion.logprobs for group in groups for completion in group]


def rollout_rows(quick: bool) -> None:
    policy = random_policy("quick" if quick else "0.5b", device=DEVICE, lora=0)
    vocabulary = len(policy.head_weight)
    sequences, prompt, answer = (8, 8, 6) if quick else (512, 128, 256)
    requests = [
        Request(
            prompt=tuple((7 * n + 13 * t * t) % vocabulary for t in range(prompt)),
            seeds=tuple(derive_seed(0, n, member) for member in range(8)),
        )
        for n in range(sequences // 8)
    ]
    sampling = Sampling(max_tokens=answer)
    engine = Engine(policy, EngineConfig(max_sequences=sequences))
    first, again = engine.generate(requests, sampling), engine.generate(requests, sampling)
    fewer = Engine(policy, EngineConfig(max_sequences=sequences // 2)).generate(requests, sampling)
    rows = []
    for name, other in (("the same call again", again), ("half of the slots", fewer)):
        same = [one == two for one, two in zip(tokens_of(first), tokens_of(other), strict=True)]
        bits = logprobs_of(first) == logprobs_of(other)
        rows.append([name, yes(bits), f"{100 * sum(same) / len(same):.1f} %"])
    print(markdown(("rollout", "log-probabilities equal", "completions with equal tokens"), rows), flush=True)


def micro_batch_row(quick: bool) -> None:
    shape, answer = ("quick", 8) if quick else ("1.5b", 512)
    start = weights(random_policy(shape, device=DEVICE, lora=16))
    one, _ = updates(shape, 16, answer=answer, count=1, size=8192)
    other, _ = updates(shape, 16, answer=answer, count=1, size=3000)
    moved = torch.cat([(a - s).flatten() for a, s in zip(one, start, strict=True)])
    moved_other = torch.cat([(a - s).flatten() for a, s in zip(other, start, strict=True)])
    cosine = torch.nn.functional.cosine_similarity(moved, moved_other, dim=0)
    print(f"passes of 8,192 and of 3,000 tokens: cosine of the changes {cosine:.5f}\n", flush=True)


def digest(run: Path) -> str:
    """Return a digest of all weights, optimizer states and rollouts of a run."""
    total = hashlib.sha256()
    for path in sorted(run.rglob("*")):
        if path.suffix == ".safetensors" or path.parent.name == "rollouts":
            total.update(path.relative_to(run).as_posix().encode() + path.read_bytes())
    return total.hexdigest()


def run_rows(quick: bool) -> None:
    cases = [(lora, deterministic) for lora in (0, 8) for deterministic in (False, True)]
    # The device has room for all of them at once, and the start of a process takes longer than its run.
    with ThreadPoolExecutor(max_workers=12) as pool:
        rows = list(pool.map(lambda case: run_row(*case, steps=4 if quick else 12, pool=pool), cases))
    print(markdown(("run", "same seed again", "killed and resumed"), rows), flush=True)


def run_row(lora: int, deterministic: bool, *, steps: int, pool: ThreadPoolExecutor) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        common = [
            *(f"run.output_dir={folder}", f"run.max_steps={steps}", "run.save_every=3"),
            *(f"lora.r={lora}", "track.trackers=[]", "track.report=false", "evaluate.skip=true"),
            *(f"run.deterministic={str(deterministic).lower()}", f"model.device={DEVICE.type}"),
        ]
        one, two, killed = (Path(folder) / name for name in ("one", "two", "killed"))
        others = [pool.submit(train, *common, f"run.name={run.name}") for run in (one, two)]
        kill_after(killed, 5 if steps > 5 else 3, *common, "run.name=killed")
        train("--resume", str(killed))
        for other in others:
            other.result()
        expected = digest(one)
        name = f"{'LoRA' if lora else 'all weights'}, deterministic: {yes(deterministic)}"
        return [name, yes(digest(two) == expected), yes(digest(killed) == expected)]


def train(*words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "groupwise", "train", *words], check=True, stdout=subprocess.DEVNULL
    )


def kill_after(run: Path, lines: int, *words: str) -> None:
    """Start a run, and kill it once its metrics have so many lines."""
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen([sys.executable, "-m", "groupwise", "train", *words], stdout=subprocess.DEVNULL)
        )
        metrics = run / "metrics.jsonl"
        while process.poll() is None:
            if metrics.is_file() and metrics.read_text().count("\n") >= lines:
                os.kill(process.pid, signal.SIGKILL)
                break
            time.sleep(0.01)
        code = process.wait()
    assert code == -signal.SIGKILL, f"the run ended by itself (exit code {code})"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, by the first matrix product
    print(machine(threads=torch.get_num_threads(), torch=torch.__version__))
    if DEVICE.type == "cuda":
        print(torch.cuda.get_device_name())
    update_rows(options.quick)
    rollout_rows(options.quick)
    micro_batch_row(options.quick)
    run_rows(options.quick)


if __name__ == "__main__":
    main()
