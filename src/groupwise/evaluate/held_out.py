"""Held-out accuracy: greedy, and of several sampled answers to each prompt, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from groupwise.evaluate.statistics import (
    Difference,
    Interval,
    mean_interval,
    paired_difference,
    pass_at_k,
    wilson,
)
from groupwise.records import Example, Group, Sampling
from groupwise.rewards.score import score_group
from groupwise.rollout.collect import Codec, Generate, collect
from groupwise.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What the policy can do on prompts it never trained on."""

    greedy_right: tuple[bool, ...]
    """For each prompt, whether the greedy answer is right."""
    sampled_right: tuple[tuple[bool, ...], ...]
    """For each prompt, whether each of its sampled answers is right."""
    greedy_groups: tuple[Group, ...]
    sampled_groups: tuple[Group, ...]

    @property
    def samples(self) -> int:
        return len(self.sampled_right[0])

    @property
    def averages(self) -> list[float]:
        """Share of right samples, by prompt."""
        return [sum(right) / len(right) for right in self.sampled_right]

    @property
    def greedy(self) -> Interval:
        return wilson(sum(self.greedy_right), len(self.greedy_right))

    @property
    def average(self) -> Interval:
        """avg@k."""
        return mean_interval(self.averages)

    @property
    def passing(self) -> Interval:
        """pass@k: at least one of k samples is right."""
        return mean_interval([pass_at_k(len(r), sum(r), len(r)) for r in self.sampled_right])

    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, interval in self.intervals().items():
            values[f"eval/{name}"] = interval.mean
            values[f"eval/{name}_low"] = interval.low
            values[f"eval/{name}_high"] = interval.high
        failed = sum(r.error is not None for g in self.sampled_groups for r in g.rollouts)
        lengths = [r.length for g in self.sampled_groups for r in g.rollouts]
        return {**values, "eval/failed": float(failed), "eval/length": sum(lengths) / len(lengths)}

    def intervals(self) -> dict[str, Interval]:
        return {
            "greedy": self.greedy,
            f"avg@{self.samples}": self.average,
            f"pass@{self.samples}": self.passing,
        }

    def summary(self) -> str:
        return " · ".join(f"{name} {interval}" for name, interval in self.intervals().items())

    def to_json(self) -> dict[str, Any]:
        """Everything but the transcripts; `greedy_right` and `averages` allow paired comparison later."""
        return {
            "prompts": len(self.greedy_right),
            **self.metrics(),
            "greedy_right": [int(right) for right in self.greedy_right],
            "averages": self.averages,
        }


def evaluate(
    task: Task,
    examples: Sequence[Example],
    *,
    codec: Codec,
    engine: Generate,
    sampling: Sampling,
    samples: int,
    seed: int,
    seconds: float,
) -> Evaluation:
    """Answer every example once greedily and `samples` times as in training, and score the answers.

    The same seed gives the same noise whenever it is called, so two evaluations can be paired.
    """

    def answers(how: Sampling, count: int) -> tuple[Group, ...]:
        groups = collect(
            examples,
            ask=task.ask,
            codec=codec,
            engine=engine,
            sampling=how,
            group_size=count,
            seed_parts=(seed, "evaluate"),
        )
        return tuple(
            score_group(group, rewards=task.rewards, weights=task.weights, seconds=seconds) for group in groups
        )

    greedy = answers(replace(sampling, temperature=0.0), 1)
    sampled = answers(sampling, samples)
    return Evaluation(
        greedy_right=tuple(task.is_right(group.rollouts[0]) for group in greedy),
        sampled_right=tuple(tuple(task.is_right(r) for r in group.rollouts) for group in sampled),
        greedy_groups=greedy,
        sampled_groups=sampled,
    )


def compare(before: Evaluation, after: Evaluation) -> dict[str, Difference]:
    """The change on the same prompts, greedy and sampled."""
    return {
        "greedy": paired_difference([float(r) for r in before.greedy_right], [float(r) for r in after.greedy_right]),
        f"avg@{after.samples}": paired_difference(before.averages, after.averages),
    }


def transcripts(result: Evaluation, *, count: int) -> str:
    """The first greedy answers with their prompts and rewards, to read."""
    blocks = []
    for group, right in list(zip(result.greedy_groups, result.greedy_right, strict=True))[:count]:
        (rollout,) = group.rollouts
        asked = rollout.prompt if isinstance(rollout.prompt, str) else rollout.prompt[-1]["content"]
        if not isinstance(rollout.prompt, str):
            asked = "\n".join(f"[{message['role']}] {message['content']}" for message in rollout.prompt)
        rewards = ", ".join(f"{name} {value:g}" for name, value in rollout.rewards.items())
        verdict = "right" if right else f"wrong ({rollout.error})" if rollout.error else "wrong"
        blocks.append(f"{asked}\n--- answer\n{rollout.text}\n--- {verdict}; {rewards}; ended by {rollout.finish}\n")
    return ("=" * 78 + "\n").join(blocks)
