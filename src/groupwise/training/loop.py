"""The one loop: prompt → rollout → reward → advantage → loss → update → log."""

from __future__ import annotations

from pathlib import Path

from groupwise.config.sections import Config
from groupwise.tasks import Task, leave_task_file, load_task
from groupwise.training.run import Run


def train(config: Config, *, resume: Path | None = None, task: Task | None = None) -> Path:
    """Train, and return the run's folder. `resume` goes on, bit for bit, from a run's last checkpoint."""
    if task is not None:
        leave_task_file(task)
    with Run.open(config.resolve(), task=task or load_task(config.task), resume=resume) as run:
        for step in run.steps():
            batch = run.collect(step)  # 1 prompt, 2 rollout, 3 reward, 4 advantage
            report = run.learn(batch)  # 5 loss, 6 update
            run.track(step, batch, report)  # 7 log, evaluate, checkpoint
    return run.folder.path
