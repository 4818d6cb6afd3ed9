"""Save a run in a checkpoint, and resume it: policy, optimizer, and the state of the run.

Where a run resumes: `RunStart.resumed` finds and verifies the checkpoint, `BaseRun._build` loads the policy
from it, `RunStart.restore` loads the optimizer, and `BaseRun.steps` continues after the saved step.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from groupwise.config import Config, config_from_keywords, differences, read_config
from groupwise.errors import CallbackError, CheckpointError, ConfigError
from groupwise.files import write_atomically
from groupwise.learner.checkpoint import (
    flattened,
    latest_checkpoint,
    load_optimizer,
    newest_first,
    optimizer_tensors,
    read_optimizer,
    verify,
    write_checkpoint,
    write_optimizer,
)
from groupwise.learner.optimizer import CPUAdamW
from groupwise.model.policy import Policy
from groupwise.model.sharding import FSDPShards, local, without_masters
from groupwise.parallel.processes import Processes
from groupwise.report.model_card import CARD
from groupwise.tasks import Task
from groupwise.tasks.user_code import changed_code
from groupwise.tracking.run_files import last_step
from groupwise.tracking.run_folder import RunFolder, run_of_checkpoint, step_of
from groupwise.tracking.terminal import command, headline
from groupwise.training.prompt_selection import Rates


class TrainedState(Protocol):
    """The part of a learner that a checkpoint saves."""

    policy: Policy
    optimizer: Optimizer
    updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run after a step. With weights and optimizer, it determines the next step.

    It has no random state: all randomness derives from the seed and the step.
    """

    step: int = 0
    cursor: int = 0
    updates: int = 0
    best_step: int | None = None
    best_accuracy: float = -1.0
    seconds: float = 0.0
    """Training time of all sessions, in seconds."""
    rates: Rates = field(default_factory=dict)
    """Success rates of each kind of example, for the curriculum."""
    entropy_coefficient: float = 0.0
    """State of the adaptive entropy bonus."""
    data: str | None = None
    """Fingerprint of the examples. None in checkpoints of older versions."""
    settings: Mapping[str, Any] | None = None
    """Settings of the run, by section. None in checkpoints of older versions."""
    code: Mapping[str, str] | None = None
    """Fingerprints of the user's functions. None in checkpoints of older versions."""

    def with_accuracy(self, accuracy: float) -> RunState:
        if accuracy <= self.best_accuracy:
            return self
        return replace(self, best_step=self.step, best_accuracy=accuracy)


def same_data(saved: str | None, fingerprint: str) -> str:
    """Refuse to resume with different examples: their order and the held-out set would change."""
    if saved not in (None, fingerprint):
        raise CheckpointError(
            "the examples are not those that the run began with: put them back, or start a new run"
        )
    return fingerprint


def same_code(saved: Mapping[str, str] | None, code: Mapping[str, str]) -> Mapping[str, str]:
    """Refuse to resume with different code: later measurements would not be comparable with earlier ones."""
    if changed := changed_code(saved, code):
        raise CheckpointError(
            f"this is not the code that the run began with, its code differs in {', '.join(changed)}: put it "
            "back, or start a new run"
        )
    return code


def save_state(
    folder: Path,
    state: RunState,
    *,
    policy: Policy,
    learner: TrainedState,
    processes: Processes | None = None,
    card: Callable[[], str] | None = None,
) -> None:
    """Write a checkpoint that Hugging Face tools load as a model or adapter, and `RunStart.resumed` as a run.

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
        if card is not None:
            (target / CARD).write_text(card(), encoding="utf-8")
        write_optimizer(target, tensors, settings)

    (processes or Processes()).lead(
        lambda: write_checkpoint(folder, step=state.step, write=write, state=asdict(state))
    )


def gathered(shards: FSDPShards, key: str, tensor: Tensor) -> Tensor:
    """Gather an optimizer tensor of a sharded parameter: key "weight.exp_avg" belongs to "weight"."""
    name = key.rpartition(".")[0]
    if name not in shards.parts or tensor.shape != shards.parts[name].shape:
        return tensor
    return shards.gathered(name, tensor)


def own_part(shards: FSDPShards, key: str, tensor: Tensor) -> Tensor:
    """Shard a gathered tensor again: the inverse of `gathered`."""
    name = key.rpartition(".")[0]
    if name not in shards.parts or tensor.shape != shards.divided[name].shape:
        return tensor
    return shards.own_part(name, tensor)


def read_state(checkpoint: Path) -> RunState:
    """Verify the checksums of a checkpoint and return its state."""
    stored: dict[str, Any] = verify(checkpoint)
    return RunState(**stored)


def load_learner(checkpoint: Path, learner: TrainedState, state: RunState) -> None:
    """Restore the optimizer from a checkpoint."""
    policy = learner.policy
    learner.updates = state.updates
    if policy.zero is not None:
        policy.zero.load_optimizer_state(*read_optimizer(checkpoint))
        return
    device = "cpu" if isinstance(learner.optimizer, CPUAdamW) else str(policy.device)
    stored, settings = read_optimizer(checkpoint, device=device)
    tensors = without_masters(stored)
    if (shards := policy.shards) is not None:
        tensors = {key: own_part(shards, key, tensor) for key, tensor in sorted(tensors.items())}
    load_optimizer(learner.optimizer, policy.owned(), tensors=tensors, settings=settings)


def fingerprint(policy: Policy, learner: TrainedState) -> tuple[object, ...]:
    """Return a hash of the training state: bit sums of all tensors, counters, random state."""
    weights = (getattr(p, "ds_tensor", p) for p in policy.model.parameters())  # as DeepSpeed shards them
    moments = (tensor for state in learner.optimizer.state.values() for _, tensor in flattened(state))
    sums = tuple(bit_sum(tensor) for tensor in (*weights, *moments))
    gradients = any(p.grad is not None for p in policy.model.parameters())
    noise = torch.random.get_rng_state().numpy().tobytes()
    return sums, gradients, policy.model.training, learner.updates, noise


def bit_sum(tensor: Tensor) -> int:
    """Return the sum of a tensor's bits read as integers: any flipped bit changes it."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(local(tensor.detach()).view(whole[tensor.element_size()]).sum(dtype=torch.int64))


MAY_CHANGE = (
    *("run.max_steps", "run.save_every", "run.keep_", "run.parallel", "run.callbacks", "evaluate.", "track."),
    *("engine.servers", "engine.exchange", "engine.request", "engine.patience"),
)
"""Settings that may change on resume: none of them changes what a step computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """A run folder, locked by this process, and the checkpoint to start from. Nothing is written yet."""

    folder: RunFolder
    lock: IO[str]
    """The folder is locked until this is closed."""
    state: RunState
    checkpoint: Path | None
    """None: start from step 0."""
    recomputing: bool | None = None
    """The value of model.gradient_checkpointing that was chosen when the run began."""
    starts_again: bool = False
    """Whether the run starts again from step 0, because it was stopped before its first checkpoint."""
    parent: Path | None = None
    """The run that a new folder continues from one of its checkpoints."""
    leads: bool = True
    """Whether this process locked the folder. Only the leader does."""

    @classmethod
    def shared(cls, processes: Processes, make: Callable[[], RunStart]) -> RunStart:
        """Create the start in the leader and send it to the other processes."""
        own = processes.lead(make)
        # An open file cannot be pickled.
        known = None if own is None else (own.folder, own.state, own.checkpoint, own.recomputing)
        where = processes.gather(known)[0]
        if own is not None:
            return own
        assert where is not None, "the leader has made its start"
        folder, state, checkpoint, recomputing = where
        return cls(
            folder=folder,
            lock=open(os.devnull, encoding="utf-8"),
            state=state,
            checkpoint=checkpoint,
            recomputing=recomputing,
            leads=False,
        )

    def restore(self, learner: TrainedState) -> None:
        """Restore the optimizer and its counters from the checkpoint, if there is one."""
        if self.checkpoint is not None:
            load_learner(self.checkpoint, learner, self.state)

    @classmethod
    def new(cls, config: Config, *, task: str) -> RunStart:
        folder = RunFolder.create(
            config.run.output_dir, name=config.run.name, task=task, model=config.model.name
        ).absolute()
        return cls(folder=folder, lock=folder.lock(), state=RunState(), checkpoint=None)

    @classmethod
    def resumed(cls, path: Path, config: Config) -> RunStart:
        """Find and verify the newest complete checkpoint, or start at step 0 if none was written yet.

        A damaged checkpoint is refused. `load_policy` reads the weights from it, then `restore` the rest.

        `path` is a run or one of its checkpoints. From a checkpoint, a copy of the run continues in
        a new folder.
        """
        parent = run_of_checkpoint(path)
        folder = (RunFolder.open(path) if parent is None else branch(path, parent, config)).absolute()
        folder.check_paths()
        lock = folder.lock()
        try:
            stored = read_config(folder.config)
            if parent is not None:
                stored = replace(stored, run=replace(stored.run, name=config.run.name))
            refuse_other_settings(stored, with_recomputing(config, stored.model.gradient_checkpointing))
            checkpoint = last_checkpoint(folder, stored)
            state = RunState() if checkpoint is None else read_state(checkpoint)
            refuse_edited_settings(state.settings, stored, folder)
        except BaseException:
            lock.close()
            raise
        return cls(
            folder=folder,
            lock=lock,
            state=state,
            checkpoint=checkpoint,
            recomputing=stored.model.gradient_checkpointing,
            starts_again=checkpoint is None,
            parent=None if parent is None else parent.path,
        )

    def already_done(self, config: Config) -> str | None:
        """Return a message if no step is left and the last session wrote its summary."""
        if self.state.step < config.run.max_steps or steps_in(self.folder.stats) != self.state.step:
            return None
        more = f"run.max_steps={2 * self.state.step}"
        return (
            f"{self.folder.path} is finished: {headline(self.state.step, done=True)}; to train on, "
            f"{command(command_of(config), '--resume', self.folder.path, more)}"
        )

    def withdraw_after(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Remove the folder of a new run that was refused before its first step."""
        new = self.leads and self.checkpoint is None and not self.starts_again
        if new and kind is not None and issubclass(kind, ConfigError) and kind is not CallbackError:
            self.folder.remove_unstarted()


def with_epochs(config: Config, task: Task) -> Config:
    """Return the settings with the number of steps that `run.num_epochs` means for the task's examples."""
    epochs = config.run.num_epochs
    if epochs is None:
        return config
    size = task.split(config.task, config.run.seed).size
    if size is None:
        raise ConfigError(
            f"run.num_epochs requires finite data, but the examples of {task.name} are endless; set "
            "run.max_steps, or task.max_examples"
        )
    steps = -(-epochs * size // config.rollout.prompts)
    return replace(config, run=replace(config.run, max_steps=steps, num_epochs=None))


def with_recomputing(config: Config, chosen: bool | None) -> Config:
    """Set model.gradient_checkpointing to the value that was chosen when the run began."""
    if config.model.gradient_checkpointing is not None:
        return config
    return replace(config, model=replace(config.model, gradient_checkpointing=chosen))


def command_of(config: Config) -> str:
    """Return the command that makes runs of this kind."""
    return {"grpo": "train", "sft": "sft", "evolve": "evolve"}[config.run.kind]


def last_checkpoint(folder: RunFolder, config: Config) -> Path | None:
    """Return the last complete checkpoint, or None if the run was stopped before its first.

    Such a run has recorded no more than `run.save_every` steps. Where there are records of more, its
    checkpoints are lost: starting again would also delete the records, so it is refused.
    """
    checkpoint = latest_checkpoint(folder.checkpoints)
    if checkpoint is not None:
        return checkpoint
    recorded = max(last_step(folder.metrics), steps_in(folder.stats) or 0)
    if newest_first(folder.checkpoints) or steps_in(folder.stats) or recorded > config.run.save_every:
        new = command(command_of(config), "--config", folder.config, "run.name=NEW")
        steps = f"{recorded} step{'s' * (recorded != 1)}"
        raise CheckpointError(
            f"{folder.path} has records of {steps}, but no complete checkpoint in {folder.checkpoints} "
            f"to resume from: put one back, or start a new run by {new}"
        )
    return None


def branch(checkpoint: Path, parent: RunFolder, config: Config) -> RunFolder:
    """Make a new run folder that holds a run up to one of its checkpoints; the run itself stays as it is."""
    state = read_state(checkpoint)
    stored = read_config(parent.config)
    refuse_other_settings(stored, with_recomputing(config, stored.model.gradient_checkpointing), moved=True)
    named = config.run.name if config.run.name != stored.run.name else f"{parent.name}-from-{state.step}"
    folder = RunFolder.create(parent.path.parent, name=named, task=config.task.name, model=config.model.name)
    copy_until(parent, folder, step=state.step)
    about = {"run": str(parent.path), "checkpoint": checkpoint.resolve().name, "step": state.step}
    write_atomically(folder.parent, json.dumps(about, indent=1))
    write_atomically(folder.config, parent.config.read_bytes())  # last: from here on it is a run
    return folder


def copy_until(parent: RunFolder, folder: RunFolder, *, step: int) -> None:
    """Copy a run's files up to a step: the checkpoint, records, and evaluations but those after training."""
    for path in sorted(parent.path.rglob("*")):
        inner = path.relative_to(parent.path)
        at = next((number for part in inner.parts if (number := step_of(part)) is not None), None)
        kept = inner.parts[0] in ("rollouts", "updates", "completions", "eval") and path.stem != "after"
        of_checkpoint = inner.parts[0] == "checkpoints" and at == step
        whole = inner.parts in ((parent.metrics.name,), (parent.tokenizer.name,))
        if path.is_file() and (whole or of_checkpoint or (kept and (at is None or at <= step))):
            target = folder.path / inner
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)


def refuse_edited_settings(saved: Mapping[str, Any] | None, stored: Config, folder: RunFolder) -> None:
    """Refuse a config.yaml that differs from the settings in the checkpoint, if it has settings."""
    if saved is not None:
        refuse_other_settings(
            config_from_keywords(**saved),
            stored,
            instead=f"put them back in {folder.config}, or start",
            moved=folder.parent.exists(),
        )


def refuse_other_settings(
    stored: Config, config: Config, *, instead: str = "start", moved: bool = False
) -> None:
    """A resumed run computes what it computed before: only settings around it may change.

    `moved`: the run continues in a folder with another name.
    """
    if stored.run.kind != config.run.kind:
        raise CheckpointError(f"resume this run with groupwise {command_of(stored)} --resume")
    # A search selects by its evaluations, so they may not change.
    around = tuple(name for name in MAY_CHANGE if name != "evaluate." or stored.run.kind != "evolve")
    around += ("run.name:",) if moved else ()
    changed = [line for line in differences(stored, config) if not line.startswith(around)]
    if changed:
        raise CheckpointError(
            f"a resumed run keeps its settings, but these differ: {'; '.join(changed)}; {instead} a new run"
        )
    if stored.run.max_steps != config.run.max_steps and stored.optim.schedule != "constant":
        raise CheckpointError(
            f"run.max_steps cannot change where optim.schedule={stored.optim.schedule}, whose learning "
            f"rate has been falling towards the last step; {instead} a new run"
        )


def steps_in(stats: Path) -> int | None:
    """Return the number of steps in training_stats.json, which the last session that ended well wrote."""
    try:
        steps: int = json.loads(stats.read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return steps
