"""The one loop: prompt → rollout → reward → advantage → loss → update → log."""

from __future__ import annotations

from pathlib import Path

from groupwise.config.schema import Config
from groupwise.errors import ConfigError
from groupwise.parallel.processes import Processes, joined_processes
from groupwise.tasks import Task, isolated, leave_task_file, load_task
from groupwise.tracking.terminal import open_display
from groupwise.tracking.trackers import tracker_names
from groupwise.training.grpo_run import GRPORun
from groupwise.training.interrupt import explain_full_disk
from groupwise.training.resume import RunStart, command_of


def train(config: Config, *, resume: Path | None = None, task: Task | None = None) -> Path:
    """Train, and return the run's folder. `resume` goes on, bit for bit, from a run's last checkpoint."""
    if task is not None:
        leave_task_file(task)
    if config.run.kind != "grpo":
        raise ConfigError(f"these settings are for another command: groupwise {command_of(config)}")
    config = config.resolve()
    task = task or load_task(config.task)
    tracker_names(config.track)  # a missing one is found before a folder is made
    with isolated(task) as task, joined_processes() as processes:
        return train_with(processes, config, task, resume)


def train_with(processes: Processes, config: Config, task: Task, resume: Path | None) -> Path:
    """Train as one of these processes."""
    start = RunStart.shared(
        processes,
        lambda: RunStart.new(config, task=task.name) if resume is None else RunStart.again(resume, config),
    )
    if done := start.already_done(config):
        start.lock.close()
        if processes.leader:
            open_display().message(done)
        return start.folder.path

    with (
        explain_full_disk(start.folder, config),
        GRPORun(config, task=task, start=start, processes=processes) as run,
    ):
        for step in run.steps():
            batch = run.collect(step)  # 1 prompt, 2 rollout, 3 reward, 4 advantage
            report = run.learn(step, batch)  # 5 loss, 6 update
            run.track(step, batch, report)  # 7 log, evaluate, checkpoint
    return run.folder.path
