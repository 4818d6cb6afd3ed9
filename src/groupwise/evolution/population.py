"""What members share: one model in memory, the generator on it, and how a member learns and is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from groupwise.config.schema import Config
from groupwise.engine.multi_lora import MultiLoRAEngine
from groupwise.errors import InvariantError
from groupwise.evolution.search_space import Values, applied
from groupwise.learner.checkpoint import load_optimizer, optimizer_tensors
from groupwise.learner.learner import Learner
from groupwise.model.adapters.lora_bank import LoRABank, Weights
from groupwise.model.load import load_policy
from groupwise.seeds import derive_seed
from groupwise.tasks import Split, Task
from groupwise.training.collector import Batch, Collector, check_failures
from groupwise.training.resume import OPTIMIZER, OPTIMIZER_SETTINGS

REFERENCE = "reference.safetensors"


class SharedBase:
    """A model that is loaded once, and its members."""

    def __init__(self, config: Config) -> None:
        torch.manual_seed(derive_seed(config.run.seed, "adapters"))
        self.policy = load_policy(config.model, config.lora)
        self.members = LoRABank(self.policy)
        self.engine = MultiLoRAEngine(self.members, config.engine)
        self.fresh = {name: tensor.clone() for name, tensor in self.members.of(0).items()}
        """Where every member begins."""
        self.members.drop(0)


class Member:
    """One trained form of the base: its weights, its optimizer, and what it holds on to."""

    def __init__(
        self, base: SharedBase, config: Config, *, weights: Mapping[str, Tensor], number: int | None = None
    ) -> None:
        self.base = base
        self.number = base.members.add(weights, number=number)
        self.reference: Weights | None = None
        """What a KL penalty holds it to; None: the base without adapters."""
        if config.algo.beta > 0 and not base.policy.has_adapter:
            self.reference = {name: tensor.clone() for name, tensor in base.fresh.items()}
        self.learner = self._learner(config)

    @property
    def weights(self) -> Weights:
        return self.base.members.of(self.number)

    def put_in_place(self) -> None:
        """Let the policy be this member."""
        self.base.members.put_in_place(self.number)
        self.base.policy.anchor = self.reference

    def configure(self, config: Config) -> None:
        """Go on with other settings; weights and the optimizer's state stay."""
        learner = self._learner(config)
        learner.optimizer.load_state_dict(self.learner.optimizer.state_dict())
        learner.updates = self.learner.updates
        self.learner = learner

    def become(self, other: Member) -> None:
        """Take over another member's weights, optimizer state and reference, as copies."""
        for name, tensor in self.weights.items():
            tensor.copy_(other.weights[name])
        state = other.learner.optimizer.state_dict()
        state["state"] = {
            key: {k: copied(v) for k, v in each.items()} for key, each in state["state"].items()
        }
        self.learner.optimizer.load_state_dict(state)
        self.learner.updates = other.learner.updates
        self.reference = None if other.reference is None else dict(other.reference)

    def save(self, folder: Path, *, tokenizer: bool = True) -> None:
        """Write the adapter (or the model) for Hugging Face tools, and what training goes on from."""
        folder.mkdir(parents=True, exist_ok=True)
        self.put_in_place()
        self.base.policy.save(folder, tokenizer=tokenizer)
        tensors, settings = optimizer_tensors(self.learner.optimizer, self.base.policy.trainable())
        save_file(tensors, folder / OPTIMIZER)
        (folder / OPTIMIZER_SETTINGS).write_text(
            json.dumps({**settings, "updates": self.learner.updates}), encoding="utf-8"
        )
        (folder / REFERENCE).unlink(missing_ok=True)  # that of an earlier save
        if self.reference is not None:
            save_file(self.reference, folder / REFERENCE)

    def load(self, folder: Path) -> None:
        """Put back what `save` wrote, bit for bit."""
        device = str(self.base.policy.device)
        for name, tensor in stored_weights(folder, self.base).items():
            self.weights[name].copy_(tensor)
        settings: dict[str, Any] = json.loads((folder / OPTIMIZER_SETTINGS).read_text(encoding="utf-8"))
        load_optimizer(
            self.learner.optimizer,
            self.base.policy.trainable(),
            tensors=load_file(folder / OPTIMIZER, device=device),
            settings=settings,
        )
        self.learner.updates = settings["updates"]
        kept = folder / REFERENCE
        self.reference = dict(load_file(kept, device=device)) if kept.is_file() else None

    def drop(self) -> None:
        """Give the memory back."""
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
    """What training moves, read from a saved adapter or model by the policy's own names."""
    names = base.policy.trainable()
    if not base.policy.has_adapter:
        stored = load_file(folder / "model.safetensors", device=str(base.policy.device))
        return {name: stored[name] for name in names}
    stored = load_file(folder / "adapter_model.safetensors", device=str(base.policy.device))
    # PEFT leaves the adapter's own name out of its files.
    return {name: stored[name.replace(".default", "")] for name in names}


class Population:
    """Members by place. A place's number among the base's members is the place itself."""

    def __init__(self, config: Config, *, task: Task, split: Split, base: SharedBase) -> None:
        self.config, self.task, self.split, self.base = config, task, split, base
        self.members: dict[int, Member] = {}
        self.collectors: dict[int, Collector] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self.members)

    @property
    def tasks(self) -> Mapping[int, Task]:
        return {place: collector.task for place, collector in self.collectors.items()}

    def place(self, place: int, values: Values, *, parent: int | None = None) -> None:
        """Put a member in a place: as its parent is now, or fresh."""
        config, _ = applied(values, self.config, self.task)
        model = self.members.get(parent) if parent is not None else None
        if place in self.members and parent != place:
            self.members[place].drop()
            del self.members[place]
        if place not in self.members:
            weights = self.base.fresh if model is None else model.weights
            self.members[place] = Member(self.base, config, weights=weights, number=place)
            if model is not None:
                self.members[place].become(model)
        self.set_values(place, values)

    def set_values(self, place: int, values: Values) -> None:
        """Let a member go on with these values."""
        config, task = applied(values, self.config, self.task)
        self.members[place].configure(config)
        self.collectors[place] = Collector(
            config, task=task, split=self.split, codec=self.base.policy, engine=self.base.engine
        )

    def drop(self, place: int) -> None:
        """Empty a place, and give its memory back."""
        self.members.pop(place).drop()
        del self.collectors[place]

    def learn(self, place: int, batch: Batch, *, step: int) -> dict[str, float]:
        """Update one member; raises `InvariantError` where that breaks it, and harms nobody else."""
        member = self.members[place]
        check_failures(batch, limit=self.config.task.max_failed)
        torch.manual_seed(derive_seed(self.config.run.seed, "update", step))
        member.put_in_place()
        try:
            report = member.learner.train_on(batch.groups)
        finally:
            member.learner.optimizer.zero_grad(set_to_none=True)  # the parameters are everyone's
        if not self.base.members.finite(place):
            raise InvariantError("its weights are no numbers any more")
        return report

    def save(self, folder: Path) -> None:
        for place, member in self.members.items():
            member.save(folder / folder_of(place), tokenizer=False)

    def load(self, folder: Path) -> None:
        for place, member in self.members.items():
            member.load(folder / folder_of(place))


def folder_of(place: int) -> str:
    return f"member-{place}"
