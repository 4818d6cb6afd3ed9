"""The shared base model and engine, and the members on it: how they train, are copied, saved and loaded.

`PopulationCollector` is the `Collector` of a population: `training.loop.collect_batch` calls its stages,
which work on all members at once. Each member has its own group size, temperature and reward weights. The end
of the module measures held-out accuracy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from groupwise.config.schema import Config
from groupwise.engine.multi_lora import AdapterEngine, LoRABank, MultiLoRAEngine, Weights
from groupwise.errors import InvariantError
from groupwise.evaluate.held_out import (
    Evaluation,
    compare,
    evaluate,
    read_evaluation,
    score_groups,
    write_evaluation,
)
from groupwise.evolution.search_space import Values, applied
from groupwise.learner.checkpoint import (
    load_optimizer,
    optimizer_tensors,
    read_optimizer,
    write_optimizer,
)
from groupwise.learner.learner import Learner
from groupwise.learner.teacher import SELF, Teacher, sampled_like
from groupwise.model.load import load_policy
from groupwise.records import Example, Group, Rollout, derive_seed
from groupwise.rollout.collect import GroupRequest, generate_groups, group_requests
from groupwise.serve.agent_endpoint import multi_turn
from groupwise.tasks import Split, Task, UserFunctions
from groupwise.tracking.run_folder import RunFolder
from groupwise.training.base_run import load_teacher, use_sampling_rules
from groupwise.training.collector import Batch, BatchDraft, Collector, StageTimes, check_failures
from groupwise.training.prompt_selection import Rates, updated
from groupwise.training.sft_run import WorkedAnswers

REFERENCE = "training/reference.safetensors"
OLD_REFERENCE = "reference.safetensors"
"""Where earlier versions put it."""


class SharedBase:
    """A base model that is loaded once, and the weights of its members."""

    def __init__(self, config: Config, functions: UserFunctions | None = None) -> None:
        torch.manual_seed(derive_seed(config.run.seed, "adapters"))
        self.policy = load_policy(config.model, config.lora)
        use_sampling_rules(self.policy, config, functions or UserFunctions())
        self._teachers: dict[str, Teacher] = {}
        self.members = LoRABank(self.policy)
        self.engine = MultiLoRAEngine(self.members, config.engine)
        self.fresh = {name: tensor.clone() for name, tensor in self.members.of(0).items()}
        """Initial weights of every member."""
        self.members.drop(0)

    def teacher(self, config: Config, *, is_right: Callable[[Rollout], bool]) -> Teacher | None:
        """Return the teacher that these settings name, under their sampling distribution; load it once."""
        name = config.algo.teacher
        if name is None:
            return None
        if name not in self._teachers or name == SELF:
            self._teachers[name] = load_teacher(config, self.policy, is_right=is_right)
        return sampled_like(self._teachers[name], config.rollout.sampling)


class Member:
    """One trained variant of the base model: its weights, optimizer and KL reference."""

    def __init__(
        self,
        base: SharedBase,
        config: Config,
        *,
        weights: Mapping[str, Tensor],
        is_right: Callable[[Rollout], bool],
        number: int | None = None,
    ) -> None:
        self.base, self.is_right = base, is_right
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
        learner.entropy_coefficient = self.learner.entropy_coefficient
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
        self.learner.entropy_coefficient = other.learner.entropy_coefficient
        self.reference = None if other.reference is None else dict(other.reference)

    def save(self, folder: Path, *, tokenizer: bool = True) -> None:
        """Save the adapter or model for Hugging Face tools, and the state that training resumes from."""
        folder.mkdir(parents=True, exist_ok=True)
        self.put_in_place()
        self.base.policy.save(folder, tokenizer=tokenizer)
        tensors, settings = optimizer_tensors(self.learner.optimizer, self.base.policy.trainable())
        progress = {
            "updates": self.learner.updates,
            "entropy_coefficient": self.learner.entropy_coefficient,
        }
        write_optimizer(folder, tensors, {**settings, **progress})
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
        self.learner.entropy_coefficient = settings.get("entropy_coefficient", 0.0)
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
            teacher=self.base.teacher(config, is_right=self.is_right),
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
        self.worked_answers = WorkedAnswers(config, task=task, policy=base.policy)

    def __iter__(self) -> Iterator[int]:
        return iter(self.members)

    def put(self, slot: int, values: Values, *, parent: int | None = None) -> None:
        """Create a member in a slot: as a copy of its parent, or fresh."""
        config, _ = applied(values, self.config, self.task)
        parent_member = self.members.get(parent) if parent is not None else None
        if slot in self.members and parent != slot:
            self.members[slot].drop()
            del self.members[slot]
        if slot not in self.members:
            weights = self.base.fresh if parent_member is None else parent_member.weights
            self.members[slot] = Member(
                self.base, config, weights=weights, is_right=self.task.is_right, number=slot
            )
            if parent_member is not None:
                self.members[slot].become(parent_member)
        self.set_values(slot, values)

    def set_values(self, slot: int, values: Values) -> None:
        """Change a member's values."""
        config, task = applied(values, self.config, self.task)
        self.members[slot].configure(config)
        self.collectors[slot] = Collector(
            config, task=task, split=self.split, codec=self.base.policy, engine=self.base.engine.alone(slot)
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
            report = member.learner.train_on(batch.groups, self.worked_answers.samples(batch.groups))
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
class PopulationBatch:
    """The training batches of one step."""

    members: Mapping[int, Batch]
    """Batches by slot, of sound members only."""
    cursor: int
    rates: Rates
    """Success rate of each kind of example over all members, for the curriculum."""
    diverged: Mapping[int, str]
    """Why other members diverged, by slot."""


@dataclass(slots=True, kw_only=True)
class PopulationDraft:
    """The batches of all members under construction."""

    step: int
    cursor: int
    rates: Rates
    members: dict[int, BatchDraft]
    """Drafts by slot, of sound members only."""
    diverged: dict[int, str] = field(default_factory=dict)
    rounds: int = 0


Sampled = dict[int, list[Group]]
"""Groups by slot."""


class PopulationCollector:
    """The stages that make the batches of all members.

    All members answer the same prompts with the same seeds in one call of the engine, so that differences
    come from the members only. Groups without a learning signal are refilled for each member that has some.
    Scores and advantages are each member's own. A curriculum uses the success rates over all members.
    """

    def __init__(self, population: Population) -> None:
        self.population, self.config = population, population.config
        self.tools = multi_turn(population.task, self.config.tools, self.config.agent)

    def begin(self, step: int, *, cursor: int, rates: Rates) -> PopulationDraft:
        drafts = {
            slot: collector.begin(step, cursor=cursor, rates=rates)
            for slot, collector in self.population.collectors.items()
        }
        return PopulationDraft(step=step, cursor=cursor, rates=rates, members=drafts)

    def needs_groups(self, draft: PopulationDraft) -> bool:
        """Whether a member needs another round."""
        return bool(self._incomplete(draft))

    def sample_prompts(self, draft: PopulationDraft) -> dict[int, Sequence[Example]]:
        """Take the examples that the member with the most missing groups needs; others use the first ones."""
        missing = {
            slot: collector.missing(draft.members[slot])
            for slot, collector in self._incomplete(draft).items()
        }
        first = next(iter(missing))
        shared = replace(draft.members[first], cursor=draft.cursor, rates=draft.rates)
        examples = self.population.collectors[first].take_prompts(shared, max(missing.values()))
        draft.cursor = shared.cursor
        for slot in missing:
            draft.members[slot].cursor = shared.cursor
            draft.members[slot].passed_over = shared.passed_over
        return {slot: examples[:count] for slot, count in missing.items()}

    def rollout(self, draft: PopulationDraft, prompts: Mapping[int, Sequence[Example]]) -> Sampled:
        """Generate the groups of all members in one batch. Members that diverge leave the draft."""
        started, seconds = time.perf_counter(), 0.0
        wanted = {
            slot: self._wanted(slot, examples, ("train", draft.step, draft.rounds))
            for slot, examples in prompts.items()
        }
        groups, diverged = self._generate(wanted)
        if self.tools is not None:
            seconds = self.tools.pop_seconds()
        draft.diverged |= diverged
        for slot in diverged:
            del draft.members[slot]
        share = 1 / len(prompts)
        for slot in groups:
            member = draft.members[slot]
            member.times = StageTimes(rollout=share * (time.perf_counter() - started), tools=share * seconds)
            self.population.collectors[slot].expect(member, len(prompts[slot]))
        return groups

    def score(self, draft: PopulationDraft, groups: Sampled) -> Sampled:
        return {
            slot: self.population.collectors[slot].score(draft.members[slot], own)
            for slot, own in groups.items()
        }

    def advantages(self, draft: PopulationDraft, groups: Sampled) -> Sampled:
        return {
            slot: self.population.collectors[slot].advantages(draft.members[slot], own)
            for slot, own in groups.items()
        }

    def add(self, draft: PopulationDraft, groups: Sampled) -> None:
        for slot, own in groups.items():
            self.population.collectors[slot].add(draft.members[slot], own)
            if self.config.rollout.curriculum > 1:
                draft.rates = updated(draft.rates, own, task=self.population.task)
        draft.rounds += 1

    def finish(self, draft: PopulationDraft) -> PopulationBatch:
        batches = {
            slot: self.population.collectors[slot].finish(member) for slot, member in draft.members.items()
        }
        return PopulationBatch(
            members=batches, cursor=draft.cursor, rates=draft.rates, diverged=draft.diverged
        )

    def measure(
        self, examples: Sequence[Example], *, samples: int
    ) -> tuple[dict[int, tuple[float, ...]], dict[int, str], int]:
        """Return each member's accuracy per example, sampled at the run's temperature, why others
        diverged, and the number of tokens sampled."""
        temperature = self.config.rollout.temperature
        groups, diverged = self._generate(
            {
                slot: self._wanted(slot, examples, ("measure",), size=samples, temperature=temperature)
                for slot in self.population
            }
        )
        scores: dict[int, tuple[float, ...]] = {}
        for slot, member_groups in groups.items():
            task = self.population.collectors[slot].task
            limits = self.config.task
            scored = score_groups(
                task, member_groups, seconds=limits.reward_seconds, concurrency=limits.reward_concurrency
            )
            scores[slot] = tuple(sum(map(task.is_right, group.rollouts)) / samples for group in scored)
        return scores, diverged, sum(map(tokens_of, groups.values()))

    def _incomplete(self, draft: PopulationDraft) -> dict[int, Collector]:
        """Return the collectors of the members that need another round, by slot."""
        collectors = self.population.collectors
        return {
            slot: collectors[slot]
            for slot, member in draft.members.items()
            if collectors[slot].needs_groups(member)
        }

    def _wanted(
        self,
        slot: int,
        examples: Sequence[Example],
        seed_parts: tuple[int | str, ...],
        *,
        size: int | None = None,
        temperature: float | None = None,
    ) -> list[GroupRequest]:
        """Return the groups of one member; by default, of its own size and temperature."""
        own = self.population.collectors[slot].config.rollout
        return group_requests(
            examples,
            ask=self.population.task.ask,
            size=size or own.group_size,
            seed_parts=(self.config.run.seed, *seed_parts),
            adapter=slot,
            temperature=None if self.config.rollout.sampling.greedy else temperature or own.temperature,
        )

    def _generate(self, wanted: Mapping[int, list[GroupRequest]]) -> tuple[Sampled, dict[int, str]]:
        """Return the groups of each member, by slot, and why other members diverged, by slot."""

        def work(engine: AdapterEngine, slots: Sequence[int]) -> Sampled:
            groups = generate_groups(
                [one for slot in slots for one in wanted[slot]],
                codec=self.population.base.policy,
                engine=engine,
                sampling=self.config.rollout.sampling,
                tools=self.tools,
            )
            each = iter(groups)
            return {slot: list(islice(each, len(wanted[slot]))) for slot in slots}

        return self.population.base.engine.contained(tuple(wanted), work)


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
            engine=self.base.engine.alone(slot),
            sampling=self.config.rollout.sampling,
            samples=self.config.evaluate.samples,
            seed=self.config.run.seed,
            seconds=self.config.task.reward_seconds,
            concurrency=self.config.task.reward_concurrency,
            tools=multi_turn(self.task, self.config.tools, self.config.agent),
        )
        about: dict[str, object] = {"step": step, "seed": self.config.run.seed}
        if when == AFTER and (before := self.recall(BEFORE)) is not None:
            about["change"] = {name: asdict(change) for name, change in compare(before, result).items()}
        write_evaluation(self.folder.evaluations, when, result, about=about)
        return result

    def recall(self, when: str) -> Evaluation | None:
        return read_evaluation(self.folder, when)
