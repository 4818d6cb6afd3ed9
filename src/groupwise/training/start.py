"""Where a run begins: in a new folder, or at the last checkpoint of an old one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from groupwise.config import Config, config_from_keywords, differences, read_config
from groupwise.errors import CheckpointError
from groupwise.learner.checkpoint import latest_checkpoint, newest_first
from groupwise.parallel.processes import Processes
from groupwise.tracking.metrics import last_step
from groupwise.tracking.run_folder import RunFolder
from groupwise.tracking.summary import command, headline
from groupwise.training.state import State, read_state

MAY_CHANGE = (
    *("run.max_steps", "run.save_every", "run.keep_", "run.parallel", "evaluate.", "track."),
    *("engine.servers", "engine.exchange", "engine.request", "engine.patience"),
)
"""Settings that a resumed run may give anew: none of them changes what a step computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A run's folder, claimed for this process, and where in it to go on. Nothing is written yet."""

    folder: RunFolder
    lock: IO[str]
    """Held until it is closed."""
    state: State
    checkpoint: Path | None
    """None: from the very beginning."""
    recomputing: bool | None = None
    """model.gradient_checkpointing as it was chosen when the run began."""
    begins_again: bool = False
    """Whether an old run begins anew, because it was stopped before its first checkpoint."""
    leads: bool = True
    """Whether this process claimed the folder; of several, only the leader does."""

    @classmethod
    def shared(cls, processes: Processes, make: Callable[[], Start]) -> Start:
        """Let the leader make the start; the others begin where it does."""
        own = processes.lead(make)
        # An open file does not travel.
        found = None if own is None else (own.folder, own.state, own.checkpoint, own.recomputing)
        where = processes.gather(found)[0]
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

    @classmethod
    def new(cls, config: Config, *, task: str) -> Start:
        folder = RunFolder.create(
            config.run.output_dir, name=config.run.name, task=task, model=config.model.name
        ).absolute()
        return cls(folder=folder, lock=folder.lock(), state=State(), checkpoint=None)

    @classmethod
    def again(cls, path: Path, config: Config) -> Start:
        """Go on after the last checkpoint, every byte of it checked, or anew where none was written yet."""
        folder = RunFolder.open(path).absolute()
        lock = folder.lock()
        try:
            stored = read_config(folder.config)
            refuse_other_settings(stored, with_recomputing(config, stored.model.gradient_checkpointing))
            checkpoint = last_checkpoint(folder, stored)
            state = State() if checkpoint is None else read_state(checkpoint)
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
            begins_again=checkpoint is None,
        )

    def already_done(self, config: Config) -> str | None:
        """Say so when no step is left and the last session told its story to the end."""
        if self.state.step < config.run.max_steps or steps_in(self.folder.stats) != self.state.step:
            return None
        more = f"run.max_steps={2 * self.state.step}"
        return (
            f"{self.folder.path} is finished: {headline(self.state.step, done=True)}; to train on, "
            f"{command(command_of(config), '--resume', self.folder.path, more)}"
        )

    def withdraw(self) -> None:
        """Take a new folder back if nothing came of it: a mistake leaves no empty run behind."""
        if self.leads and not self.folder.config.exists():
            with suppress(OSError):
                (self.folder.path / ".lock").unlink(missing_ok=True)
                self.folder.path.rmdir()


def with_recomputing(config: Config, chosen: bool | None) -> Config:
    """Leave open no more what was chosen already."""
    if config.model.gradient_checkpointing is not None:
        return config
    return replace(config, model=replace(config.model, gradient_checkpointing=chosen))


def command_of(config: Config) -> str:
    """The command that makes runs of this kind."""
    return {"grpo": "train", "sft": "sft", "evolve": "evolve"}[config.run.kind]


def last_checkpoint(folder: RunFolder, config: Config) -> Path | None:
    """Return the last complete checkpoint; None: the run was stopped before its first, and begins again.

    Such a run has recorded no more than `run.save_every` steps. Where there are records of more, its
    checkpoints are lost: to begin again would empty the records too, which is refused.
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
            f"to go on from: put one back, or start a new run by {new}"
        )
    return None


def refuse_edited_settings(saved: Mapping[str, Any] | None, stored: Config, folder: RunFolder) -> None:
    """Refuse a config.yaml that is not what the checkpoint was trained with; older ones do not tell."""
    if saved is not None:
        refuse_other_settings(
            config_from_keywords(**saved), stored, instead=f"put them back in {folder.config}, or start"
        )


def refuse_other_settings(stored: Config, config: Config, *, instead: str = "start") -> None:
    """A resumed run computes what it computed before: only settings around it may change."""
    if stored.run.kind != config.run.kind:
        raise CheckpointError(f"this run goes on with groupwise {command_of(stored)} --resume")
    # A search selects by its evaluations.
    around = tuple(name for name in MAY_CHANGE if name != "evaluate." or stored.run.kind != "evolve")
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
    """Return the steps that the last session to end well says were done."""
    try:
        steps: int = json.loads(stats.read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return steps
