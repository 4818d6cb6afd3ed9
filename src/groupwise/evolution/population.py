"""The shared base model and engine, and the members on it: how they train, are copied, saved and loaded."""

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
        save_file(tensors, folder / OPTIMIZER)
        (folder / OPTIMIZER_SETTINGS).write_text(
            json.dumps({**settings, "updates": self.learner.updates}), encoding="utf-8"
        )
        (folder / REFERENCE).unlink(missing_ok=True)  # from an earlier save
        if self.reference is not None:
            save_file(self.reference, folder / REFERENCE)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, bit for bit."""
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
        reference = folder / REFERENCE
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
