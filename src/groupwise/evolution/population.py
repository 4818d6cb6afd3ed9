"""The shared base model and engine, and the members on it: how they train, are copied, saved and loaded.

The end of the module makes the rollouts and measures the held-out accuracy of all members in one batch. Each
member has its own group size, temperature and reward weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from groupwise.config.schema import Config
from groupwise.engine.multi_lora import LoRABank, MultiLoRAEngine, Weights
from groupwise.errors import ConfigError, InvariantError
from groupwise.evaluate.held_out import Evaluation, compare, evaluate, read_evaluation, write_evaluation
from groupwise.evolution.search_space import Values, applied
from groupwise.invariants import check_disjoint
from groupwise.isolation.time_limit import TimeLimits
from groupwise.learner.checkpoint import (
    load_optimizer,
    optimizer_tensors,
    read_optimizer,
    write_optimizer,
)
from groupwise.learner.learner import Learner
from groupwise.model.load import load_policy
from groupwise.model.policy import Policy
from groupwise.records import Completion, Example, Group, Request, Sampling
from groupwise.rewards.runner import score_group
from groupwise.rollout.collect import groups_from_completions, prompts_and_requests
from groupwise.seeds import derive_seed
from groupwise.tasks import Split, Task
from groupwise.tracking.run_folder import RunFolder
from groupwise.training.collector import Batch, Collector, check_failures, has_signal

REFERENCE = "training/reference.safetensors"
OLD_REFERENCE = "reference.safetensors"
"""Where earlier versions put it."""


class SharedBase:
    """A base model that is loaded once, and the weights of its members."""

    def __init__(self, config: Config) -> None:
        torch.manual_seed(derive_seed(config.run.seed, "adapters"))
        self.policy = load_policy(config.model, config.lora)
        self.members = LoRABank(self.policy)
        self.engine = MultiLoRAEngine(self.members, config.engine)
        self.fresh = {name: tensor.clone() for name, tensor in self.members.of(0).items()}
        """Initial weights of every member."""
        self.members.drop(0)


class Member:
    """One trained variant of the base model: its weights, optimizer and KL reference."""

    def __init__(
        self, base: SharedBase, config: Config, *, weights: Mapping[str, Tensor], number: int | None = None
    ) -> None:
        self.base = base
        self.number = base.members.add(weights, number=number)
        self.reference: Weights | None = None
        """Weights of the KL reference; None: the base model without adapters."""
        if config.algo.beta > 0 and not base.policy.has_adapter:
            self.reference = {name: tensor.clone() for name, tensor in base.fresh.items()}
        self.learner = self._learner(config)

    @property
    def weights(self) -> Weights:
        return self.base.members.of(self.number)

    def put_in_place(self) -> None:
        """Load this member's weights and reference into the policy."""
        self.base.members.put_in_place(self.number)
        self.base.policy.anchor = self.reference

    def configure(self, config: Config) -> None:
        """Change the settings; keep the weights and the optimizer state."""
        learner = self._learner(config)
        learner.optimizer.load_state_dict(self.learner.optimizer.state_dict())
        learner.updates = self.learner.updates
        self.learner = learner

    def become(self, other: Member) -> None:
        """Copy another member's weights, optimizer state and reference."""
        for name, tensor in self.weights.items():
            tensor.copy_(other.weights[name])
        state = other.learner.optimizer.state_dict()
        state["state"] = {
            key: {k: copied(v) for k, v in parameter_state.items()}
            for key, parameter_state in state["state"].items()
        }
        self.learner.optimizer.load_state_dict(state)
        self.learner.updates = other.learner.updates
        self.reference = None if other.reference is None else dict(other.reference)

    def save(self, folder: Path, *, tokenizer: bool = True) -> None:
        """Save the adapter or model for Hugging Face tools, and the state that training resumes from."""
        folder.mkdir(parents=True, exist_ok=True)
        self.put_in_place()
        self.base.policy.save(folder, tokenizer=tokenizer)
        tensors, settings = optimizer_tensors(self.learner.optimizer, self.base.policy.trainable())
        write_optimizer(folder, tensors, {**settings, "updates": self.learner.updates})
        for earlier in (REFERENCE, OLD_REFERENCE):
            (folder / earlier).unlink(missing_ok=True)
        if self.reference is not None:
            save_file(self.reference, folder / REFERENCE)

    def load(self, folder: Path) -> None:
        """Restore exactly what `save` wrote."""
        device = str(self.base.policy.device)
        for name, tensor in stored_weights(folder, self.base).items():
            self.weights[name].copy_(tensor)
        tensors, settings = read_optimizer(folder, device=device)
        load_optimizer(
            self.learner.optimizer, self.base.policy.trainable(), tensors=tensors, settings=settings
        )
        self.learner.updates = settings["updates"]
        reference = folder / REFERENCE
        if not reference.is_file():
            reference = folder / OLD_REFERENCE
        self.reference = dict(load_file(reference, device=device)) if reference.is_file() else None

    def drop(self) -> None:
        """Free the member's memory."""
        self.base.members.drop(self.number)
        self.learner.optimizer.state.clear()

    def _learner(self, config: Config) -> Learner:
        return Learner(
            self.base.policy,
            algo=config.algo,
            optim=config.optim,
            sampling=config.rollout.sampling,
            max_steps=config.run.max_steps,
        )


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def stored_weights(folder: Path, base: SharedBase) -> Weights:
    """Read the trainable weights of a saved adapter or model, by the policy's parameter names."""
    names = base.policy.trainable()
    if not base.policy.has_adapter:
        stored = load_file(folder / "model.safetensors", device=str(base.policy.device))
        return {name: stored[name] for name in names}
    stored = load_file(folder / "adapter_model.safetensors", device=str(base.policy.device))
    # PEFT omits the adapter's name in its files.
    return {name: stored[name.replace(".default", "")] for name in names}


class Population:
    """Members by slot. A member's number in the shared base is its slot."""

    def __init__(self, config: Config, *, task: Task, split: Split, base: SharedBase) -> None:
        self.config, self.task, self.split, self.base = config, task, split, base
        self.members: dict[int, Member] = {}
        self.collectors: dict[int, Collector] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self.members)

    @property
    def tasks(self) -> Mapping[int, Task]:
        return {slot: collector.task for slot, collector in self.collectors.items()}

    def put(self, slot: int, values: Values, *, parent: int | None = None) -> None:
        """Create a member in a slot: as a copy of its parent, or fresh."""
        config, _ = applied(values, self.config, self.task)
        parent_member = self.members.get(parent) if parent is not None else None
        if slot in self.members and parent != slot:
            self.members[slot].drop()
            del self.members[slot]
        if slot not in self.members:
            weights = self.base.fresh if parent_member is None else parent_member.weights
            self.members[slot] = Member(self.base, config, weights=weights, number=slot)
            if parent_member is not None:
                self.members[slot].become(parent_member)
        self.set_values(slot, values)

    def set_values(self, slot: int, values: Values) -> None:
        """Change a member's values."""
        config, task = applied(values, self.config, self.task)
        self.members[slot].configure(config)
        self.collectors[slot] = Collector(
            config, task=task, split=self.split, codec=self.base.policy, engine=self.base.engine
        )

    def drop(self, slot: int) -> None:
        """Remove the member in a slot and free its memory."""
        self.members.pop(slot).drop()
        del self.collectors[slot]

    def learn(self, slot: int, batch: Batch, *, step: int) -> dict[str, float]:
        """Update one member. Raises `InvariantError` if it diverges; other members are not affected."""
        member = self.members[slot]
        check_failures(batch, limit=self.config.task.max_failed)
        torch.manual_seed(derive_seed(self.config.run.seed, "update", step))
        member.put_in_place()
        try:
            report = member.learner.train_on(batch.groups)
        finally:
            member.learner.optimizer.zero_grad(set_to_none=True)  # all members share the parameters
        if not self.base.members.finite(slot):
            raise InvariantError("the weights contain NaN or inf")
        return report

    def save(self, folder: Path) -> None:
        for slot, member in self.members.items():
            member.save(folder / folder_of(slot), tokenizer=False)

    def load(self, folder: Path) -> None:
        for slot, member in self.members.items():
            member.load(folder / folder_of(slot))


def folder_of(slot: int) -> str:
    return f"member-{slot}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPrompt:
    """The examples of one member, and how it samples."""

    slot: int
    task: Task
    examples: Sequence[Example]
    count: int
    """Answers per example."""
    temperature: float


@dataclass(frozen=True, slots=True)
class CollectedBatches:
    """The training batches of one step."""

    batches: Mapping[int, Batch]
    """Batches by slot, of sound members only."""
    cursor: int
    diverged: Mapping[int, str]


class MemberRollouts:
    """Generates for all members in one batch."""

    def __init__(self, config: Config, *, split: Split, policy: Policy, engine: MultiLoRAEngine) -> None:
        if config.rollout.curriculum > 1:
            raise ConfigError("rollout.curriculum requires groupwise train; members share their prompts")
        self.config, self.split, self.policy, self.engine = config, split, policy, engine

    def ask(
        self, members: Sequence[MemberPrompt], sampling: Sampling, *, seed_parts: tuple[int | str, ...]
    ) -> tuple[dict[int, list[Group]], dict[int, str]]:
        """Return the groups of each member, by slot, and why other members diverged, by slot.

        All members use the same seeds, so that differences come from the members only.
        """
        parts = []
        for member in members:
            prompts, requests = prompts_and_requests(
                member.examples,
                ask=member.task.ask,
                codec=self.policy,
                group_size=member.count,
                seed_parts=(self.config.run.seed, *seed_parts),
            )
            temperature = None if sampling.greedy else member.temperature
            parts.append(
                (
                    member,
                    prompts,
                    [replace(r, adapter=member.slot, temperature=temperature) for r in requests],
                )
            )
        flat = [request for _, _, requests in parts for request in requests]
        completions, diverged = self.engine.contained(flat, sampling)
        groups: dict[int, list[Group]] = {}
        start = 0
        for member, prompts, requests in parts:
            own = completions[start : start + len(requests)]
            start += len(requests)
            if member.slot not in diverged:
                groups[member.slot] = groups_from_completions(
                    member.examples, prompts, requests, own, codec=self.policy
                )
        return groups, diverged

    def collect(self, step: int, collectors: Mapping[int, Collector], *, cursor: int) -> CollectedBatches:
        """Take the same prompts for all members until each has enough groups with signal, as in a run."""
        with_signal: dict[int, list[Group]] = {slot: [] for slot in collectors}
        without_signal: dict[int, list[Group]] = {slot: [] for slot in collectors}
        diverged: dict[int, str] = {}
        prompts, refill = self.config.rollout.prompts, self.config.rollout.refill
        rollout_seconds = reward_seconds = 0.0
        for turn in range(1 + refill):
            missing = {slot: prompts - len(with_signal[slot]) for slot in collectors if slot not in diverged}
            if not any(missing.values()):
                break
            examples, cursor = self.split.take(cursor, max(missing.values()))
            members = [
                MemberPrompt(
                    slot=slot,
                    task=collectors[slot].task,
                    examples=examples[:count],
                    count=collectors[slot].config.rollout.group_size,
                    temperature=collectors[slot].config.rollout.temperature,
                )
                for slot, count in missing.items()
                if count
            ]
            task = members[0].task
            check_disjoint((task.asks(e) for e in examples), collectors[members[0].slot].held_out)
            started = time.perf_counter()
            groups, failed = self.ask(members, self.config.rollout.sampling, seed_parts=("train", step, turn))
            diverged |= failed
            rollout_seconds += time.perf_counter() - started
            started = time.perf_counter()
            for slot, member_groups in groups.items():
                collector = collectors[slot]
                with TimeLimits(collector.config.task.reward_seconds) as limit:
                    for unscored in member_groups:
                        group = collector.group_advantages(collector.reward_group(unscored, limit))
                        (with_signal if has_signal(group) else without_signal)[slot].append(group)
            reward_seconds += time.perf_counter() - started
        share = 1 / len(collectors)
        batches = {
            slot: make_batch(
                with_signal[slot],
                without_signal[slot],
                cursor,
                prompts,
                refill,
                share * rollout_seconds,
                share * reward_seconds,
            )
            for slot in collectors
            if slot not in diverged
        }
        return CollectedBatches(batches, cursor, diverged)

    def measure(
        self, tasks: Mapping[int, Task], examples: Sequence[Example], *, samples: int
    ) -> tuple[dict[int, tuple[float, ...]], dict[int, str], int]:
        """Return each member's accuracy per example, sampled at the run's temperature, why others
        diverged, and the number of tokens sampled."""
        temperature = self.config.rollout.temperature
        members = [
            MemberPrompt(slot=slot, task=task, examples=examples, count=samples, temperature=temperature)
            for slot, task in tasks.items()
        ]
        groups, diverged = self.ask(members, self.config.rollout.sampling, seed_parts=("measure",))
        scores: dict[int, tuple[float, ...]] = {}
        for slot, member_groups in groups.items():
            task = tasks[slot]
            seconds = self.config.task.reward_seconds
            scored = [
                score_group(group, rewards=task.rewards, weights=task.weights, seconds=seconds)
                for group in member_groups
            ]
            scores[slot] = tuple(sum(map(task.is_right, group.rollouts)) / samples for group in scored)
        return scores, diverged, sum(map(tokens_of, groups.values()))


def make_batch(
    with_signal: list[Group],
    without_signal: list[Group],
    cursor: int,
    prompts: int,
    refill: int,
    rollout_seconds: float,
    reward_seconds: float,
) -> Batch:
    """Build one member's batch in the form that `train` uses."""
    replaced = len(with_signal) + len(without_signal) - prompts
    if not refill:  # keep groups without signal: they count in the mean of the loss
        with_signal, without_signal = with_signal + without_signal, []
    return Batch(
        groups=tuple(with_signal),
        dropped=tuple(without_signal),
        replaced=replaced,
        cursor=cursor,
        rates={},
        passed_over=0,
        rollout_seconds=rollout_seconds,
        reward_seconds=reward_seconds,
    )


def tokens_of(groups: Sequence[Group]) -> int:
    """Return the number of sampled tokens."""
    return sum(rollout.length for group in groups for rollout in group.rollouts)


BEFORE, AFTER = "before", "after"


class MemberEvaluator:
    """Splits the held-out prompts into those for selection and those for the final evaluation."""

    def __init__(
        self, config: Config, *, task: Task, split: Split, base: SharedBase, folder: RunFolder
    ) -> None:
        self.config, self.task, self.base, self.folder = config, task, base, folder
        held_out = () if config.evaluate.skip else split.held_out
        alone = config.evolve.population == 1
        self.choosing = () if alone else held_out[: config.evaluate.during]
        """Examples that selection uses."""
        self.judging = held_out if alone else held_out[config.evaluate.during :]
        """Examples for the evaluation before and after the search only."""

    def notices(self) -> Iterator[str]:
        if self.choosing and not self.judging:
            yield (
                f"all {len(self.choosing)} held-out examples are used for selection, so the best member gets "
                "no independent evaluation: raise task.held_out"
            )

    def evaluate(self, when: str, *, slot: int, step: int) -> Evaluation | None:
        """Evaluate one member on the prompts that selection does not use, and store the result."""
        if not self.judging:
            return None
        result = evaluate(
            self.task,
            self.judging,
            codec=self.base.policy,
            engine=SingleMemberEngine(self.base, slot),
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
    """The engine, generating with one member's adapter."""

    def __init__(self, base: SharedBase, slot: int) -> None:
        self.base, self.slot = base, slot

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return self.base.engine.alone(self.slot, requests, sampling)
