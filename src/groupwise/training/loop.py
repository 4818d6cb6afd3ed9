"""The training loop: sample prompts → rollout → score → advantage → loss → update → log.

`train` opens a run; `train_step` and `collect_batch` call the seven stages.
"""

from __future__ import annotations

from pathlib import Path

from groupwise.config.schema import Config
from groupwise.errors import ConfigError
from groupwise.learner.learner import try_custom_loss
from groupwise.parallel.processes import Processes, joined_processes
from groupwise.tasks import Task, UserFunctions, isolated, leave_task_file, load_task, use_functions
from groupwise.tracking.terminal import open_display
from groupwise.tracking.trackers import tracker_names
from groupwise.training.callbacks import check_callback
from groupwise.training.collector import Batch, Collected, Draft, Groups, Prompts, Stages
from groupwise.training.grpo_run import GRPORun
from groupwise.training.prompt_selection import NOTHING_KNOWN, Rates
from groupwise.training.resume import RunStart, command_of, with_epochs
from groupwise.training.run_end import explain_full_disk


def train(
    config: Config,
    *,
    resume: Path | None = None,
    task: Task | None = None,
    functions: UserFunctions | None = None,
) -> Path:
    """Train and return the run's folder. `resume` continues a run exactly from its last checkpoint.

    `functions` are the user's own that the settings name; None: they are loaded here.
    """
    if task is not None:
        leave_task_file(task)
    if config.run.kind != "grpo":
        raise ConfigError(f"these settings are for another command: groupwise {command_of(config)}")
    if resume is None:
        config.algo.check_combination()
    config = config.resolve()
    task = task or load_task(config.task)
    config = with_epochs(config, task)
    functions = functions or use_functions(config)
    try_custom_loss(config.algo)
    for callback in functions.callbacks:
        check_callback(callback)
    tracker_names(config.track)  # report a missing tracker before a folder is created
    with (
        isolated(task, workers=config.task.reward_workers) as task,
        joined_processes() as processes,
    ):
        return train_with(processes, config, task, resume, functions)


def train_with(
    processes: Processes, config: Config, task: Task, resume: Path | None, functions: UserFunctions
) -> Path:
    """Train as one of these processes."""
    start = RunStart.shared(
        processes,
        lambda: RunStart.new(config, task=task.name) if resume is None else RunStart.resumed(resume, config),
    )
    if done := start.already_done(config):
        start.lock.close()
        if processes.leader:
            open_display().message(done)
        return start.folder.path

    with (
        explain_full_disk(start.folder, config),
        GRPORun(config, task=task, start=start, processes=processes, functions=functions) as run,
    ):
        for step in run.steps():
            train_step(run, step)
    return run.folder.path


def train_step(run: GRPORun, step: int) -> Batch:
    """Run one step of GRPO, stage by stage."""
    batch = run.next_batch(step, collect_batch)  # stages 1 to 4, or a prefetched batch
    for minibatch in run.minibatches(step, batch):
        run.learner.compute_loss(minibatch)  # 5 loss: forward and backward
        run.learner.step()  # 6 update: the optimizer
    run.log(step, batch)  # 7 log, evaluate, checkpoint
    return batch


def collect_batch(
    collector: Stages[Draft, Prompts, Groups, Collected],
    step: int,
    *,
    cursor: int,
    rates: Rates = NOTHING_KNOWN,
) -> Collected:
    """Collect the batch of a step. Groups without a learning signal are refilled (`rollout.refill`).

    A run has a `Collector`. A population has a `PopulationCollector`, whose stages work on all members.
    """
    draft = collector.begin(step, cursor=cursor, rates=rates)
    while collector.needs_groups(draft):
        prompts = collector.sample_prompts(draft)  # 1 sample prompts
        groups = collector.rollout(draft, prompts)  # 2 rollout
        groups = collector.score(draft, groups)  # 3 score
        groups = collector.advantages(draft, groups)  # 4 advantage
        collector.add(draft, groups)
    return collector.finish(draft)
