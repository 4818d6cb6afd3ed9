r"""How right, how strict, how hard to hang and how fast the verifiers are.

    python benchmarks/verifier.py --math math_train.jsonl.gz math500.jsonl.gz --gsm8k gsm8k_train.jsonl.gz
    python benchmarks/verifier.py --quick             # does it run? The figures mean nothing

Golds come from JSON lines with a column `answer`; without any, from the tasks' own generated problems. A
gold must accept itself and other ways to write it (`rewritings.py`) and refuse near misses
(`near_misses.py`). Fuzzed completions (`fuzzing.py`) must neither raise nor take long. Times are of one
core: each call alone, the worker that runs `math-verify` already started, nothing cached from an earlier
call. `--failures N` shows the first N wrong verdicts of each kind.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from fuzzing import fuzzed
from machine import machine, markdown
from near_misses import near_misses
from rewritings import rewritings

from groupwise.config.schema import TaskConfig
from groupwise.records import Example, Group, Rollout
from groupwise.rewards.extraction import stated_number
from groupwise.rewards.runner import score_group
from groupwise.rewards.verify.latex import equal
from groupwise.rewards.verify.math_answer import verify_boxed
from groupwise.rewards.verify.math_verify_process import comparer
from groupwise.tasks import load_examples
from groupwise.tasks.builtin.boxed_math import math
from groupwise.tasks.builtin.gsm8k import gold_number, gsm8k
from groupwise.tasks.builtin.gsm8k import read as read_worked

SCORED_COMPLETIONS = 512
GSM8K_CHECKS = 10_000
GROUP = 16


@dataclass(slots=True)
class Tally:
    """Verdicts of one kind, counted, and the wrong ones kept."""

    total: int = 0
    wrong: int = 0
    undecided: int = 0
    by_rule: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, rule: str, other: str, gold: str, *, wanted: bool) -> None:
        verdict = verify_boxed(rf"\boxed{{{other}}}", gold)
        self.total += 1
        self.undecided += verdict.error is not None
        if verdict.correct is not wanted:
            self.wrong += 1
            self.by_rule[rule] = self.by_rule.get(rule, 0) + 1
            self.failures.append(f"{rule}: {other!r} for {gold!r}")

    @property
    def share(self) -> float:
        return 1 - self.wrong / self.total if self.total else 1.0


def judge(
    golds: Sequence[str], variants: Callable[[str], Iterator[tuple[str, str]]], *, wanted: bool
) -> Tally:
    tally = Tally()
    for gold in dict.fromkeys(golds):
        for rule, other in variants(gold):
            tally.add(rule, other, gold, wanted=wanted)
    return tally


def itself(gold: str) -> Iterator[tuple[str, str]]:
    yield "itself", gold


@dataclass(frozen=True, slots=True)
class Times:
    """Of many calls, in seconds."""

    count: int
    total: float
    median: float
    worst: float
    slowest: str = ""
    """The input of the worst call."""


def timed(calls: Sequence[str], work: Callable[[str], object]) -> Times:
    """Time each call alone, with nothing remembered from before."""
    verify_boxed.cache_clear()
    equal.read.cache_clear()
    stated_number.cache_clear()
    read_worked.cache_clear()
    gold_number.cache_clear()
    took = []
    for call in calls:
        started = time.perf_counter()
        work(call)
        took.append(time.perf_counter() - started)
    worst = max(range(len(took)), key=took.__getitem__)
    return Times(len(took), sum(took), statistics.median(took), took[worst], calls[worst][:60])


def rollout(text: str) -> Rollout:
    return Rollout(
        prompt="", text=text, tokens=(0,), trained=(True,), logprobs=(0.0,), entropies=(0.0,),
        prompt_length=0, finish="end",
    )  # fmt: skip


def gsm8k_times(rows: Sequence[Example]) -> Times:
    """All rewards of the task on gold completions."""
    task = gsm8k()
    assert task.gold is not None
    pairs = {str(n): (rollout(task.gold(row)), row) for n, row in enumerate(rows)}

    def score(key: str) -> None:
        text, row = pairs[key]
        for reward in task.rewards.values():
            reward(text, row)

    return timed(list(pairs), score)


def gsm8k_scored(rows: Sequence[Example]) -> Times:
    """The same as a run does it: groups of answers, each call under its time limit."""
    task = gsm8k()
    assert task.gold is not None
    groups = {
        str(n): Group(example=row, rollouts=(rollout(task.gold(row)),) * GROUP) for n, row in enumerate(rows)
    }

    def score(key: str) -> None:
        score_group(groups[key], rewards=task.rewards, weights=task.weights, seconds=5.0)

    return timed(list(groups), score)


def gsm8k_perfect(rows: Sequence[Example]) -> int:
    """Return how many golds, written as the prompt asks, get every reward in full."""
    task = gsm8k()
    assert task.gold is not None
    totals = [
        sum(
            task.weights.get(name, 1.0) * reward(rollout(task.gold(row)), row)
            for name, reward in task.rewards.items()
        )
        for row in rows
    ]
    return sum(total == task.perfect for total in totals)


def math_times(golds: Sequence[str]) -> Times:
    """All rewards of the task on other ways to write gold answers, behind 2,000 characters of reasoning."""
    task = math()
    reasoning = "We try the next value and find that it does not fit. " * 40
    others = [next((o for _, o in rewritings(gold)), gold) for gold in golds]
    pairs = {
        f"{n} {gold}": (rollout(rf"{reasoning}\boxed{{{other}}}"), Example({"question": "", "answer": gold}))
        for n, (gold, other) in enumerate(zip(golds, others, strict=True))
    }

    def score(key: str) -> None:
        text, row = pairs[key]
        for reward in task.rewards.values():
            reward(text, row)

    return timed(list(pairs), score)


def answers(paths: Sequence[Path]) -> list[str]:
    return [str(row["answer"]) for path in paths for row in load_examples(path)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--math", type=Path, nargs="+", default=[], help="files with LaTeX golds")
    parser.add_argument("--gsm8k", type=Path, nargs="+", default=[], help="files with number golds")
    parser.add_argument("--fuzz", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failures", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--quick", action="store_true", help="a smoke run on a few golds")
    options = parser.parse_args()
    about = machine(threads=1, torch=version("torch"))
    print(about, flush=True)

    config = TaskConfig(held_out=1000)
    golds = answers(options.math) or [str(e["answer"]) for e in math().split(config, seed=0).held_out]
    rows = [row for path in options.gsm8k for row in load_examples(path)]
    rows = rows or list(gsm8k().split(config, seed=0).held_out)
    if options.quick:
        golds, rows, options.fuzz = golds[::40], rows[:100], 300
    comparer.equal("1", "1")  # started, so that no call waits for it

    verdicts = {
        "accepts itself": judge(golds, itself, wanted=True),
        "accepts another way to write it": judge(golds, rewritings, wanted=True),
        "refuses a near miss": judge(golds, near_misses, wanted=False),
    }
    print()
    print(
        markdown(
            ("a gold answer", "pairs", "right verdicts", "wrong", "undecided"),
            [
                [name, f"{t.total:,}", f"{100 * t.share:.3f} %", f"{t.wrong:,}", str(t.undecided)]
                for name, t in verdicts.items()
            ],
        )
    )
    for name, tally in verdicts.items():
        for failure in tally.failures[: options.failures]:
            print(f"  not: {name}: {failure}")
        if tally.by_rule:
            print(f"  by rule: {tally.by_rule}")

    print(f"  gsm8k: {gsm8k_perfect(rows):,} of {len(rows):,} golds get every reward in full")

    integers = [gold for gold in golds if gold.lstrip("-").isdigit()]
    repeated = (rows * (GSM8K_CHECKS // len(rows) + 1))[: 100 if options.quick else GSM8K_CHECKS]
    step = (golds * SCORED_COMPLETIONS)[:SCORED_COMPLETIONS]
    times = {
        "math: fuzzed completions": timed(
            list(fuzzed(golds, options.fuzz, seed=options.seed)), lambda text: verify_boxed(text, golds[0])
        ),
        "math: a gold integer, boxed": timed(
            [f"{n} {gold}" for n, gold in enumerate(integers)],
            lambda key: verify_boxed(rf"It is \boxed{{{key.split()[1]}}}, {key}.", key.split()[1]),
        ),
        f"math: all rewards on {SCORED_COMPLETIONS} completions": math_times(step),
        "gsm8k: all rewards": gsm8k_times(repeated),
        f"gsm8k: as a run scores, groups of {GROUP}": gsm8k_scored(repeated[: len(repeated) // GROUP]),
    }
    print()
    print(
        markdown(
            ("calls", "count", "total, s", "median, µs", "worst, ms"),
            [
                [name, f"{t.count:,}", f"{t.total:.2f}", f"{1e6 * t.median:.1f}", f"{1e3 * t.worst:.1f}"]
                for name, t in times.items()
            ],
        )
    )
    for name, found in times.items():
        print(f"  slowest: {name}: {found.slowest!r}")
    if options.json:
        result = {
            "machine": about,
            "verdicts": {name: asdict(tally) for name, tally in verdicts.items()},
            "times": {name: asdict(found) for name, found in times.items()},
        }
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
