"""Held-out accuracy: greedy, and of several sampled answers to each prompt, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from groupwise.evaluate.statistics import (
    Difference,
    Interval,
    mean_interval,
    paired_difference,
    pass_at_k,
    wilson,
)
from groupwise.records import Example, Group, Rollout, Sampling
from groupwise.rewards.score import score_group
from groupwise.tasks.task import Task

if TYPE_CHECKING:
    from groupwise.rollout.collect import Codec, Generate


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What the policy can do on prompts it never trained on."""

    examples: tuple[str, ...]
    """Fingerprints of the examples: what pairs two evaluations."""
    greedy_right: tuple[bool, ...]
    """For each example, whether the greedy answer is right."""
    sampled_right: tuple[int, ...]
    """For each example, how many of its sampled answers are right."""
    samples: int
    """Sampled answers to each example."""
    failed: int
    """Answers that could not be scored; they count as wrong."""
    length: float
    """Mean tokens of a sampled answer."""
    answers: tuple[Group, ...] = ()
    """The greedy answers, to read; not kept in JSON."""

    @property
    def averages(self) -> list[float]:
        """Share of right samples, by example."""
        return [right / self.samples for right in self.sampled_right]

    def intervals(self) -> dict[str, Interval]:
        passing = [pass_at_k(self.samples, right, self.samples) for right in self.sampled_right]
        return {
            "greedy": wilson(sum(self.greedy_right), len(self.greedy_right)),
            f"avg@{self.samples}": mean_interval(self.averages),
            f"pass@{self.samples}": mean_interval(passing),
        }

    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, interval in self.intervals().items():
            values[f"eval/{name}"] = interval.mean
            values[f"eval/{name}_low"] = interval.low
            values[f"eval/{name}_high"] = interval.high
        return {**values, "eval/failed": float(self.failed), "eval/length": self.length}

    def summary(self) -> str:
        return " · ".join(f"{name} {interval}" for name, interval in self.intervals().items())

    def to_json(self) -> dict[str, Any]:
        """Return everything but the answers; `from_json` reads it back."""
        return {
            **self.metrics(),
            "samples": self.samples,
            "examples": list(self.examples),
            "greedy_right": [int(right) for right in self.greedy_right],
            "sampled_right": list(self.sampled_right),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Evaluation:
        return cls(
            examples=tuple(record["examples"]),
            greedy_right=tuple(bool(right) for right in record["greedy_right"]),
            sampled_right=tuple(record["sampled_right"]),
            samples=record["samples"],
            failed=int(record["eval/failed"]),
            length=record["eval/length"],
        )


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
    # Not above: who only reads evaluations need not wait for torch.
    from groupwise.rollout.collect import collect

    def answers(how: Sampling, count: int) -> list[Group]:
        groups = collect(
            examples,
            ask=task.ask,
            codec=codec,
            engine=engine,
            sampling=how,
            group_size=count,
            seed_parts=(seed, "evaluate"),
        )
        return [
            score_group(group, rewards=task.rewards, weights=task.weights, seconds=seconds)
            for group in groups
        ]

    greedy = answers(replace(sampling, temperature=0.0), 1)
    sampled = answers(sampling, samples)
    drawn = [rollout for group in sampled for rollout in group.rollouts]
    return Evaluation(
        examples=tuple(example.fingerprint for example in examples),
        greedy_right=tuple(task.is_right(group.rollouts[0]) for group in greedy),
        sampled_right=tuple(sum(map(task.is_right, group.rollouts)) for group in sampled),
        samples=samples,
        failed=sum(r.error is not None for group in (*greedy, *sampled) for r in group.rollouts),
        length=sum(rollout.length for rollout in drawn) / len(drawn),
        answers=tuple(greedy),
    )


def compare(before: Evaluation, after: Evaluation) -> dict[str, Difference]:
    """Return the change on the examples that both have, greedy and, with equally many samples, sampled.

    Empty when there are too few such examples to say anything.
    """

    def change(earlier: Sequence[float], later: Sequence[float]) -> Difference:
        old = dict(zip(before.examples, earlier, strict=True))
        new = dict(zip(after.examples, later, strict=True))
        shared = [example for example in new if example in old]
        return paired_difference([old[e] for e in shared], [new[e] for e in shared])

    if len(set(before.examples) & set(after.examples)) < 2:
        return {}
    changes = {"greedy": change(before.greedy_right, after.greedy_right)}
    if before.samples == after.samples:
        changes[f"avg@{after.samples}"] = change(before.averages, after.averages)
    return changes


def transcripts(result: Evaluation, *, count: int) -> str:
    """Return the first greedy answers with their prompts and rewards, to read."""
    assert result.answers, "an evaluation read from JSON has no answers"
    pairs = list(zip(result.answers, result.greedy_right, strict=True))[:count]
    return ("=" * 78 + "\n").join(transcript(group.rollouts[0], right=right) for group, right in pairs)


def transcript(rollout: Rollout, *, right: bool) -> str:
    rewards = ", ".join(f"{name} {value:g}" for name, value in rollout.rewards.items())
    verdict = "right" if right else f"wrong ({rollout.error})" if rollout.error else "wrong"
    return (
        f"{as_text(rollout)}\n--- answer\n{rollout.text}\n"
        f"--- {verdict}; {rewards or 'no reward'}; ended by {rollout.finish}\n"
    )


def as_text(rollout: Rollout) -> str:
    """Return the prompt as one text, with the role before each message of a chat."""
    if isinstance(rollout.prompt, str):
        return rollout.prompt
    return "\n".join(f"[{message['role']}] {message['content']}" for message in rollout.prompt)
