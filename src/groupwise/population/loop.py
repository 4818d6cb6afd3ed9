"""A population's loop: everyone answers together, learns alone, and now and then is selected."""

from __future__ import annotations

from pathlib import Path

from groupwise.config import Config
from groupwise.errors import ConfigError
from groupwise.population.opening import Opening
from groupwise.population.search import Search
from groupwise.tasks import Task, isolated, leave_task_file, load_task
from groupwise.tracking.display import open_display
from groupwise.tracking.trackers import tracker_names
from groupwise.training.full_disk import told_when_full
from groupwise.training.start import command_of


def evolve(config: Config, *, resume: Path | None = None, task: Task | None = None) -> Path:
    """Search, and return the folder. `resume` goes on, bit for bit, from the last checkpoint."""
    if task is not None:
        leave_task_file(task)
    if config.run.kind != "evolve":
        raise ConfigError(f"these settings are for another command: groupwise {command_of(config)}")
    config = config.resolve()
    task = task or load_task(config.task)
    refuse_what_cannot_be_shared(config, task)
    tracker_names(config.track)
    opening = Opening.new(config, task=task.name) if resume is None else Opening.again(resume, config)
    if done := opening.already_done(config):
        opening.lock.close()
        open_display().message(done)
        return opening.folder.path

    with (
        isolated(task) as task,
        told_when_full(opening.folder, config),
        Search(config, task=task, opening=opening) as search,
    ):
        for step in search.steps():
            batches = search.collect(step)  # prompt, rollout, reward, advantage: all members at once
            reports = search.learn(step, batches)  # loss, update: one adapter at a time
            search.track(step, reports)  # log, measure, select, checkpoint
    return search.folder.path


def refuse_what_cannot_be_shared(config: Config, task: Task) -> None:
    if not config.lora.r:
        raise ConfigError("members are adapters on one base: set lora.r, such as lora.r=16")
    if task.tools:
        raise ConfigError(f"task {task.name} has tools, which populations do not use yet")
    if config.engine.kind != "own":
        raise ConfigError("the members of a population answer in one batch, by engine.kind=own")
