"""Rollouts of all members in one batch: each member's own group size, temperature, weights of rewards."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from groupwise.config.schema import Config
from groupwise.engine.multi_lora import MultiLoRAEngine
from groupwise.errors import ConfigError
from groupwise.evaluate.held_out import Evaluation, compare, evaluate, read_evaluation, write_evaluation
from groupwise.evolution.population import SharedBase
from groupwise.invariants import check_disjoint
from groupwise.model.policy import Policy
from groupwise.records import Completion, Example, Group, Request, Sampling
from groupwise.rewards.runner import score_group
from groupwise.rewards.time_limit import TimeLimits
from groupwise.rollout.collect import groups_from_completions, prompts_and_requests
from groupwise.tasks import Split, Task
from groupwise.tracking.run_folder import RunFolder
from groupwise.training.collector import Batch, Collector, has_signal


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPrompt:
    """What one member is asked, and how it samples."""

    place: int
    task: Task
    examples: Sequence[Example]
    count: int
    """Answers to each."""
    temperature: float


@dataclass(frozen=True, slots=True)
class CollectedBatches:
    """What a step gives to learn from."""

    batches: Mapping[int, Batch]
    """By place; of sound members only."""
    cursor: int
    broken: Mapping[int, str]


class MemberRollouts:
    """Asks all members at once."""

    def __init__(self, config: Config, *, split: Split, policy: Policy, engine: MultiLoRAEngine) -> None:
        if config.rollout.curriculum > 1:
            raise ConfigError("rollout.curriculum goes with groupwise train: members are asked the same")
        self.config, self.split, self.policy, self.engine = config, split, policy, engine

    def ask(
        self, asking: Sequence[MemberPrompt], sampling: Sampling, *, noise: tuple[int | str, ...]
    ) -> tuple[dict[int, list[Group]], dict[int, str]]:
        """Return the answers of each member, by place, and why some are broken.

        The noise is the same for all, so that members are told apart by what they are.
        """
        parts = []
        for each in asking:
            prompts, requests = prompts_and_requests(
                each.examples,
                ask=each.task.ask,
                codec=self.policy,
                group_size=each.count,
                seed_parts=(self.config.run.seed, *noise),
            )
            temperature = None if sampling.greedy else each.temperature
            parts.append(
                (each, prompts, [replace(r, adapter=each.place, temperature=temperature) for r in requests])
            )
        flat = [request for _, _, requests in parts for request in requests]
        completions, broken = self.engine.contained(flat, sampling)
        groups: dict[int, list[Group]] = {}
        start = 0
        for each, prompts, requests in parts:
            own = completions[start : start + len(requests)]
            start += len(requests)
            if each.place not in broken:
                groups[each.place] = groups_from_completions(
                    each.examples, prompts, requests, own, codec=self.policy
                )
        return groups, broken

    def collect(self, step: int, collectors: Mapping[int, Collector], *, cursor: int) -> CollectedBatches:
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
                MemberPrompt(
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
                    for each in found:
                        group = collector.compare_group(collector.reward_group(each, limit))
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
        return CollectedBatches(batches, cursor, broken)

    def measure(
        self, tasks: Mapping[int, Task], examples: Sequence[Example], *, samples: int
    ) -> tuple[dict[int, tuple[float, ...]], dict[int, str], int]:
        """Accuracy of each member on each example, sampled at the run's temperature; and tokens drawn."""
        temperature = self.config.rollout.temperature
        asking = [
            MemberPrompt(place=place, task=task, examples=examples, count=samples, temperature=temperature)
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


BEFORE, AFTER = "before", "after"


class MemberEvaluator:
    """Knows which prompts are for what."""

    def __init__(
        self, config: Config, *, task: Task, split: Split, base: SharedBase, folder: RunFolder
    ) -> None:
        self.config, self.task, self.base, self.folder = config, task, base, folder
        held_out = () if config.evaluate.skip else split.held_out
        alone = config.evolve.population == 1
        self.choosing = () if alone else held_out[: config.evaluate.during]
        """What selection looks at."""
        self.judging = held_out if alone else held_out[config.evaluate.during :]
        """What nobody looks at before the end."""

    def notices(self) -> Iterator[str]:
        if self.choosing and not self.judging:
            yield (
                f"all {len(self.choosing)} held-out examples are used to select: the best is not judged on "
                "others; raise task.held_out"
            )

    def judge(self, when: str, *, place: int, step: int) -> Evaluation | None:
        """Measure one member on the prompts that played no part, and keep the result."""
        if not self.judging:
            return None
        result = evaluate(
            self.task,
            self.judging,
            codec=self.base.policy,
            engine=SingleMemberEngine(self.base, place),
            sampling=self.config.rollout.sampling,
            samples=self.config.evaluate.samples,
            seed=self.config.run.seed,
            seconds=self.config.task.reward_seconds,
        )
        about: dict[str, object] = {"step": step, "seed": self.config.run.seed}
        if when == AFTER and (before := self.recall(BEFORE)) is not None:
            about["change"] = {name: asdict(change) for name, change in compare(before, result).items()}
        write_evaluation(self.folder.evaluations, when, result, about=about)
        return result

    def recall(self, when: str) -> Evaluation | None:
        return read_evaluation(self.folder, when)


class SingleMemberEngine:
    """The engine, answering as one member."""

    def __init__(self, base: SharedBase, place: int) -> None:
        self.base, self.place = base, place

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return self.base.engine.alone(self.place, requests, sampling)
