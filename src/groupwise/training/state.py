"""What a checkpoint holds of a run: the policy, the optimizer and where the run stands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from groupwise.errors import CheckpointError
from groupwise.learner.checkpoint import (
    flattened,
    load_optimizer,
    optimizer_tensors,
    verify,
    write_checkpoint,
)
from groupwise.learner.offload import OffloadedAdamW
from groupwise.model.policy import Policy
from groupwise.model.sharded import Shards, local
from groupwise.model.zero import without_masters
from groupwise.parallel.processes import Processes
from groupwise.tasks.code import changed_code
from groupwise.training.curriculum import Rates

OPTIMIZER = "optimizer.safetensors"
OPTIMIZER_SETTINGS = "optimizer.json"


class Optimizing(Protocol):
    """Whatever learns: what a checkpoint keeps of it."""

    policy: Policy
    optimizer: Optimizer
    updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a run stands after a step; with the weights and the optimizer, all that the next step depends on.

    There is no random state: all noise derives from the seed and the step.
    """

    step: int = 0
    cursor: int = 0
    updates: int = 0
    best_step: int | None = None
    best_accuracy: float = -1.0
    seconds: float = 0.0
    """Time spent training, over all sessions."""
    rates: Rates = field(default_factory=dict)
    """What the curriculum knows of each kind of example."""
    data: str | None = None
    """The fingerprint of the examples; None: of a run that began before it was kept."""
    settings: Mapping[str, Any] | None = None
    """The run's settings, by section; None: of a run that began before they were kept here."""
    code: Mapping[str, str] | None = None
    """The fingerprints of the task's functions; None: of a run that began before they were kept."""

    def with_accuracy(self, accuracy: float) -> State:
        if accuracy <= self.best_accuracy:
            return self
        return replace(self, best_step=self.step, best_accuracy=accuracy)


def same_data(kept: str | None, fingerprint: str) -> str:
    """Refuse to go on with other examples: their order would be another, and so would what is held out."""
    if kept not in (None, fingerprint):
        raise CheckpointError(
            "the examples are not those that the run began with: put them back, or start a new run"
        )
    return fingerprint


def same_code(kept: Mapping[str, str] | None, code: Mapping[str, str]) -> Mapping[str, str]:
    """Refuse to go on with another task: what it measures now could not be compared with what it did."""
    if changed := changed_code(kept, code):
        raise CheckpointError(
            f"the task is not the one that the run began with, its code differs in {', '.join(changed)}: "
            "put it back, or start a new run"
        )
    return code


def save_state(
    folder: Path, state: State, *, policy: Policy, learner: Optimizing, processes: Processes | None = None
) -> None:
    """Write a checkpoint that Hugging Face tools load as a model (or adapter) and `load_state` as a run.

    It does not depend on how many processes there are: all must come by here, and the leader writes.
    """
    if policy.zero is not None:
        tensors, settings = policy.zero.optimizer_state()
    else:
        tensors, settings = optimizer_tensors(learner.optimizer, policy.owned())
    if policy.shards is not None:
        tensors = {key: gathered(policy.shards, key, tensor) for key, tensor in sorted(tensors.items())}
    whole = policy.gathered()

    def write(target: Path) -> None:
        policy.save(target, gathered=whole)
        save_file(tensors, target / OPTIMIZER)
        (target / OPTIMIZER_SETTINGS).write_text(json.dumps(settings))

    (processes or Processes()).lead(
        lambda: write_checkpoint(folder, step=state.step, write=write, state=asdict(state))
    )


def gathered(shards: Shards, key: str, tensor: Tensor) -> Tensor:
    """The optimizer's tensor of a divided parameter, whole: key "weight.exp_avg" is of "weight"."""
    name = key.rpartition(".")[0]
    if name not in shards.parts or tensor.shape != shards.parts[name].shape:
        return tensor
    return shards.gathered(name, tensor)


def own_part(shards: Shards, key: str, tensor: Tensor) -> Tensor:
    """Undo `gathered`."""
    name = key.rpartition(".")[0]
    if name not in shards.parts or tensor.shape != shards.divided[name].shape:
        return tensor
    return shards.own_part(name, tensor)


def read_state(checkpoint: Path) -> State:
    """Check every byte of a checkpoint and return its state."""
    stored: dict[str, Any] = verify(checkpoint)
    return State(**stored)


def load_learner(checkpoint: Path, learner: Optimizing, state: State) -> None:
    """Put the optimizer back as it was."""
    policy = learner.policy
    learner.updates = state.updates
    settings = json.loads((checkpoint / OPTIMIZER_SETTINGS).read_text())
    if policy.zero is not None:
        policy.zero.load_optimizer_state(load_file(checkpoint / OPTIMIZER), settings)
        return
    device = "cpu" if isinstance(learner.optimizer, OffloadedAdamW) else str(policy.device)
    tensors = without_masters(load_file(checkpoint / OPTIMIZER, device=device))
    if (shards := policy.shards) is not None:
        tensors = {key: own_part(shards, key, tensor) for key, tensor in sorted(tensors.items())}
    load_optimizer(learner.optimizer, policy.owned(), tensors=tensors, settings=settings)


def fingerprint(policy: Policy, learner: Optimizing) -> tuple[object, ...]:
    """Return a value that changes when the training state does: bit sums of all tensors, counters, noise."""
    weights = (getattr(p, "ds_tensor", p) for p in policy.model.parameters())  # as DeepSpeed divides them
    moments = (tensor for state in learner.optimizer.state.values() for _, tensor in flattened(state))
    sums = tuple(bit_sum(tensor) for tensor in (*weights, *moments))
    gradients = any(p.grad is not None for p in policy.model.parameters())
    noise = torch.random.get_rng_state().numpy().tobytes()
    return sums, gradients, policy.model.training, learner.updates, noise


def bit_sum(tensor: Tensor) -> int:
    """Return the sum of a tensor's values read as whole numbers: any flipped bit changes it."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(local(tensor.detach()).view(whole[tensor.element_size()]).sum(dtype=torch.int64))
