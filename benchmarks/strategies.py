"""Accuracy against tokens spent at test time: one answer, majority, best of n, longer thinking, TPO.

    python benchmarks/strategies.py --plot docs/strategies.svg
    python benchmarks/strategies.py --quick                      # does it run? The figures mean nothing

The strategies of `groupwise.evaluate.strategies` on Countdown's held-out puzzles, all by the same policy.
Tokens are all that the policy wrote for a question, comparisons and advice included. Best of n and TPO choose
by the task's own rewards, which need no gold answer here: the puzzle itself tells whether an equation solves
it. Budget forcing writes a line break where thinking would end, which the built-in model reads as another way
to try; `Wait` is no word of its.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from machine import machine, markdown
from svg import Point, draw

from groupwise.config.schema import EngineConfig, LoraConfig, ModelConfig
from groupwise.engine.engine import Engine
from groupwise.evaluate.strategies import Sampler, Strategy, TokenCost, budget_forcing, spend, strategy_named
from groupwise.model.load import load_policy
from groupwise.records import Sampling
from groupwise.tasks import ExampleStream
from groupwise.tasks.builtin.countdown import countdown

COUNTS = (2, 4, 8, 16)
WAITS = (1, 2, 4, 8)
ROUNDS = (1, 2)


def strategies() -> dict[str, dict[int, Strategy]]:
    """Every strategy at every size."""
    single = strategy_named("single")
    return {
        "one greedy answer": {1: single},
        "self-consistency": {n: strategy_named(f"self-consistency:{n}") for n in COUNTS},
        "best of n": {n: strategy_named(f"best-of:{n}") for n in COUNTS},
        "budget forcing": {n: budget_forcing(n, wait="\n") for n in WAITS},
        "TPO, rounds of 4": {n: strategy_named(f"tpo:{n}") for n in ROUNDS},
    }


Curves = Mapping[str, Mapping[int, TokenCost]]


def rows(curves: Curves) -> list[Sequence[str]]:
    return [
        [name, str(size), str(one.accuracy), f"{one.tokens:.0f}"]
        for name, curve in curves.items()
        for size, one in curve.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="a name or a folder")
    parser.add_argument("--examples", type=int, default=128)
    parser.add_argument("--numbers", type=int, default=3)
    parser.add_argument("--largest", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--max-tokens", type=int, default=112)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="also draw the curves into this SVG file")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    options = parser.parse_args()
    if options.quick:
        options.examples, options.max_tokens = 2, 24
    about = machine(threads=torch.get_num_threads(), torch=torch.__version__)
    print(about, flush=True)
    task = countdown(numbers=options.numbers, largest=options.largest)
    assert isinstance(task.examples, ExampleStream)
    examples = task.examples.held_out(options.examples)
    policy = load_policy(ModelConfig(name=options.model), LoraConfig(r=0))
    draws = Sampler(
        codec=policy,
        engine=Engine(policy, EngineConfig()),
        sampling=Sampling(temperature=options.temperature, max_tokens=options.max_tokens),
        seed=options.seed,
    )
    curves: dict[str, dict[int, TokenCost]] = {}
    for name, sizes in strategies().items():
        for size, strategy in sizes.items():
            started = time.monotonic()
            found = spend(strategy, task, examples, draws=draws, seconds=5.0)
            curves.setdefault(name, {})[size] = found
            took = time.monotonic() - started
            print(f"{name} {size}: {found.accuracy}, {found.tokens:.0f} tokens, {took:.0f} s", flush=True)
    print()
    print(markdown(("strategy", "n", "accuracy", "tokens a question"), rows(curves)))
    if options.plot:
        points = {
            name: [Point(one.tokens, one.accuracy) for one in curve.values()]
            for name, curve in curves.items()
        }
        options.plot.write_text(draw(points, axis="tokens a question"), encoding="utf-8")
    if options.json:
        record = {name: {n: asdict(one) for n, one in curve.items()} for name, curve in curves.items()}
        options.json.write_text(json.dumps({"machine": about, "curves": record}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
