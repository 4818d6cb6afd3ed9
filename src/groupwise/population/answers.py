"""Rollouts of all members in one batch: each member's own group size, temperature, weights of rewards."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from groupwise.config.sections import Config
from groupwise.engine.together import TogetherEngine
from groupwise.errors import ConfigError
from groupwise.invariants import check_disjoint
from groupwise.model.policy import Policy
from groupwise.records import Example, Group, Sampling
from groupwise.rewards.score import score_group
from groupwise.rewards.time_limit import TimeLimits
from groupwise.rollout.collect import answered, asked
from groupwise.tasks import Split, Task
from groupwise.training.batch import Batch, Collector, has_signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What one member is asked, and how it samples."""

    place: int
    task: Task
    examples: Sequence[Example]
    count: int
    """Answers to each."""
    temperature: float


@dataclass(frozen=True, slots=True)
class Collected:
    """What a step gives to learn from."""

    batches: Mapping[int, Batch]
    """By place; of sound members only."""
    cursor: int
    broken: Mapping[int, str]


class Answers:
    """Asks all members at once."""

    def __init__(self, config: Config, *, split: Split, policy: Policy, engine: TogetherEngine) -> None:
        if config.rollout.curriculum > 1:
            raise ConfigError("rollout.curriculum goes with groupwise train: members are asked the same")
        self.config, self.split, self.policy, self.engine = config, split, policy, engine

    def ask(
        self, asking: Sequence[Asking], sampling: Sampling, *, noise: tuple[int | str, ...]
    ) -> tuple[dict[int, list[Group]], dict[int, str]]:
        """Return the answers of each member, by place, and why some are broken.

        The noise is the same for all, so that members are told apart by what they are.
        """
        parts = []
        for each in asking:
            prompts, requests = asked(
                each.examples,
                ask=each.task.ask,
                codec=self.policy,
                group_size=each.count,
                seed_parts=(self.config.run.seed, *noise),
            )
            heat = None if sampling.greedy else each.temperature
            parts.append(
                (each, prompts, [replace(r, adapter=each.place, temperature=heat) for r in requests])
            )
        flat = [request for _, _, requests in parts for request in requests]
        completions, broken = self.engine.contained(flat, sampling)
        groups: dict[int, list[Group]] = {}
        start = 0
        for each, prompts, requests in parts:
            own = completions[start : start + len(requests)]
            start += len(requests)
            if each.place not in broken:
                groups[each.place] = answered(each.examples, prompts, requests, own, codec=self.policy)
        return groups, broken

    def collect(self, step: int, collectors: Mapping[int, Collector], *, cursor: int) -> Collected:
        """Draw the same prompts for everyone until enough of each one's groups have signal, as in a run."""
        kept: dict[int, list[Group]] = {place: [] for place in collectors}
        silent: dict[int, list[Group]] = {place: [] for place in collectors}
        broken: dict[int, str] = {}
        prompts, refill = self.config.rollout.prompts, self.config.rollout.refill
        rollout_seconds = reward_seconds = 0.0
        for turn in range(1 + refill):
            missing = {place: prompts - len(kept[place]) for place in collectors if place not in broken}
            if not any(missing.values()):
                break
            examples, cursor = self.split.take(cursor, max(missing.values()))
            asking = [
                Asking(
                    place=place,
                    task=collectors[place].task,
                    examples=examples[:count],
                    count=collectors[place].config.rollout.group_size,
                    temperature=collectors[place].config.rollout.temperature,
                )
                for place, count in missing.items()
                if count
            ]
            task = asking[0].task
            check_disjoint((task.asks(e) for e in examples), collectors[asking[0].place].held_out)
            started = time.perf_counter()
            groups, failed = self.ask(asking, self.config.rollout.sampling, noise=("train", step, turn))
            broken |= failed
            rollout_seconds += time.perf_counter() - started
            started = time.perf_counter()
            for place, found in groups.items():
                collector = collectors[place]
                with TimeLimits(collector.config.task.reward_seconds) as limit:
                    for group in (collector.score(each, limit) for each in found):
                        (kept if has_signal(group) else silent)[place].append(group)
            reward_seconds += time.perf_counter() - started
        share = 1 / len(collectors)
        batches = {
            place: made(
                kept[place],
                silent[place],
                cursor,
                prompts,
                refill,
                share * rollout_seconds,
                share * reward_seconds,
            )
            for place in collectors
            if place not in broken
        }
        return Collected(batches, cursor, broken)

    def measure(
        self, tasks: Mapping[int, Task], examples: Sequence[Example], *, samples: int
    ) -> tuple[dict[int, tuple[float, ...]], dict[int, str], int]:
        """Accuracy of each member on each example, sampled at the run's temperature; and tokens drawn."""
        heat = self.config.rollout.temperature
        asking = [
            Asking(place=place, task=task, examples=examples, count=samples, temperature=heat)
            for place, task in tasks.items()
        ]
        groups, broken = self.ask(asking, self.config.rollout.sampling, noise=("measure",))
        scores: dict[int, tuple[float, ...]] = {}
        for place, found in groups.items():
            task = tasks[place]
            seconds = self.config.task.reward_seconds
            scored = [
                score_group(group, rewards=task.rewards, weights=task.weights, seconds=seconds)
                for group in found
            ]
            scores[place] = tuple(sum(map(task.is_right, group.rollouts)) / samples for group in scored)
        return scores, broken, sum(map(tokens_of, groups.values()))


def made(
    kept: list[Group],
    silent: list[Group],
    cursor: int,
    prompts: int,
    refill: int,
    rollout_seconds: float,
    reward_seconds: float,
) -> Batch:
    """One member's share of a step as `train` has it."""
    replaced = len(kept) + len(silent) - prompts
    if not refill:  # nothing is dropped: silent groups stay and count in the loss's mean
        kept, silent = kept + silent, []
    return Batch(
        groups=tuple(kept),
        dropped=tuple(silent),
        replaced=replaced,
        cursor=cursor,
        rates={},
        passed_over=0,
        rollout_seconds=rollout_seconds,
        reward_seconds=reward_seconds,
    )


def tokens_of(groups: Sequence[Group]) -> int:
    """Tokens that were sampled."""
    return sum(rollout.length for group in groups for rollout in group.rollouts)
