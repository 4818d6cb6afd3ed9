"""Rollouts and evaluation with and without drafted tokens, on a real model and real questions.

    python benchmarks/speculation.py --model FOLDER --data gsm8k_train.jsonl
    python benchmarks/speculation.py --quick                # does it run? Built-in model and puzzles

How often a draft is right depends on the text, so random weights say nothing. Each workload runs three times
with drafts and three times without, in turn and with new questions each time, after two calls that capture
most graphs. Both kinds get the same questions and seeds. Rates are the sampled tokens of the calls over their
seconds. `equal` is the share of answers that are the same, token by token: rounding differs between the two.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from machine import machine, markdown

from groupwise.config import read_config
from groupwise.config.schema import EngineConfig
from groupwise.engine.engine import Engine
from groupwise.model.load import load_for_generation
from groupwise.model.policy import Policy
from groupwise.records import Completion, Request, Sampling, derive_seed
from groupwise.tasks import load_task


@dataclass(frozen=True)
class Workload:
    name: str
    questions: int
    group: int
    temperature: float


WARM, MEASURED = 2, 3
"""Calls that are not counted, and calls that are."""
WORKLOADS = (
    Workload("rollouts, 32 groups of 16", 32, 16, 1.0),
    Workload("rollouts, 8 groups of 16", 8, 16, 1.0),
    Workload("evaluation, 400 greedy answers", 400, 1, 0.0),
    Workload("64 greedy answers", 64, 1, 0.0),
    Workload("8 greedy answers", 8, 1, 0.0),
    Workload("one group of 8", 1, 8, 1.0),
)


def requests(policy: Policy, prompts: Sequence[tuple[int, ...]], load: Workload, call: int) -> list[Request]:
    first = call * load.questions
    return [
        Request(
            prompt=prompts[(first + number) % len(prompts)],
            seeds=tuple(derive_seed(call, number, member) for member in range(load.group)),
        )
        for number in range(load.questions)
    ]


def answers(engine: Engine, asked: Sequence[Request], sampling: Sampling) -> tuple[list[Completion], float]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    groups = engine.generate(asked, sampling)
    return [one for group in groups for one in group], time.perf_counter() - started


def compare(
    policy: Policy, prompts: Sequence[tuple[int, ...]], load: Workload, sampling: Sampling
) -> dict[str, float]:
    sampling = replace(sampling, temperature=load.temperature)
    engines = {
        name: Engine(policy, EngineConfig(speculative=name == "drafts")) for name in ("plain", "drafts")
    }
    tokens, seconds = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0.0)
    equal = total = 0
    for call in range(WARM + MEASURED):
        made: dict[str, list[Completion]] = {}
        for name, engine in engines.items():
            made[name], taken = answers(engine, requests(policy, prompts, load, call), sampling)
            if call >= WARM:
                tokens[name] += sum(len(one.tokens) for one in made[name])
                seconds[name] += taken
        if call >= WARM:
            pairs = zip(made["plain"], made["drafts"], strict=True)
            equal += sum(one.tokens == other.tokens for one, other in pairs)
            total += len(made["plain"])
    for engine in engines.values():
        engine.release()
    rates = {name: tokens[name] / seconds[name] for name in engines}
    return {
        **rates,
        "ratio": rates["drafts"] / rates["plain"],
        "equal": equal / total,
        "length": tokens["drafts"] / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", default="tiny", help="a model folder or name")
    parser.add_argument("--data", help="rows of GSM8K; without, the built-in puzzles")
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--output", type=Path, help="folder for speculation.json")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    options = parser.parse_args()
    task_name = "gsm8k" if options.data else "countdown"
    words = [f"model.name={options.model}", f"task.name={task_name}", "task.held_out=8"]
    config = read_config(
        overrides=[*words, *([f"task.data={options.data}"] if options.data else [])]
    ).resolve()
    task = load_task(config.task)
    split = task.split(config.task, 0)
    policy = load_for_generation(config.model, rank=0, trained=None)
    assert task.prompt is not None
    rows = [split.at(place) for place in range(min(split.size or 1200, 1200))]
    prompts = [policy.encode(task.prompt(row)) for row in rows]
    most = 24 if options.quick else options.max_tokens
    loads = [Workload("quick", 2, 2, 1.0)] if options.quick else WORKLOADS
    results = {}
    for load in loads:
        results[load.name] = found = compare(policy, prompts, load, Sampling(max_tokens=most))
        print(load.name, {key: round(value, 3) for key, value in found.items()}, flush=True)
    device = f"{torch.cuda.get_device_name()} · " if torch.cuda.is_available() else ""
    print(f"\n{device}{machine(threads=torch.get_num_threads(), torch=torch.__version__)}\n")
    table = [
        [
            name,
            *(f"{one[key]:,.0f}" for key in ("plain", "drafts", "length")),
            f"{one['ratio']:.2f} ×",
            f"{one['equal']:.0%}",
        ]
        for name, one in results.items()
    ]
    print(
        markdown(("workload", "plain, tok/s", "drafts, tok/s", "tokens an answer", "ratio", "equal"), table)
    )
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "speculation.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
