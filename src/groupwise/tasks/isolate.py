"""Trying a task's rewards on one example before a model loads: a mistake in them shows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from groupwise.errors import ConfigError
from groupwise.records import Example, Group, Rollout, Turn
from groupwise.rewards.runner import IsolatedReward, RewardContext, reward_job, score_within
from groupwise.rewards.time_limit import TimeLimits
from groupwise.rewards.worker import Job, Worker, cannot_fork, is_movable
from groupwise.rollout.tool_executor import isolated_tool, tool_job
from groupwise.rollout.tools import tool_of
from groupwise.tasks.self_test import gold_of
from groupwise.tasks.task import Task
from groupwise.tracking.run_log import LOGGER


def failures_on_trial(
    task: Task, example: Example, *, seconds: float, context: RewardContext
) -> dict[str, str]:
    """Return what each reward in a worker process says when it fails on this example, with its traceback.

    The answer is the gold one, or empty where there is none. The worker is thrown away afterwards, so that
    nothing that a reward counts or caches includes the trial; rewards in this process are not tried.
    """
    try:
        rollout = trial_rollout(task, example)
    except Exception:
        return {}  # prompts are checked elsewhere; a state or a gold answer that fails is no reward's fault
    for name, function in task.rewards.items():
        if isinstance(function, IsolatedReward) and function.worker is not None:
            group = Group(example=example, rollouts=(rollout,))
            with TimeLimits(seconds) as limit:
                score_within(limit, group, rewards={name: function}, weights={}, context=context)
            if function.worker is not None:
                function.worker.discard()
    return context.failures


def trial_rollout(task: Task, example: Example) -> Rollout:
    try:
        text = gold_of(task, example)
    except ConfigError:
        text = ""
    return Rollout(
        prompt=task.ask(example),
        text=text,
        tokens=(0, 0),
        trained=(False, True),
        logprobs=(0.0, 0.0),
        entropies=(0.0, 0.0),
        prompt_length=1,
        finish="end",
        turns=(Turn(text=text),) if task.tools else (),
        state=None if task.state is None else task.state(example),
    )


@contextmanager
def isolated(task: Task) -> Iterator[Task]:
    """Yield the task with its rewards and tools in a worker process, as far as they can be.

    Enter before CUDA starts: the worker is forked. Functions of this package stay, and so do those marked
    `in_process` and tools that take a `state`; where nothing can be forked, all of them stay.
    """
    rewards = {name: function for name, function in task.rewards.items() if is_movable(function)}
    tools = [
        function for function in task.tools if is_movable(function) and not tool_of(function).takes_state
    ]
    if not rewards and not tools:
        yield task
        return
    if reason := cannot_fork():
        LOGGER.warning("the rewards and tools of %s run in the trainer's process: %s", task.name, reason)
        yield task
        return
    jobs: dict[str, Job] = {f"reward {name}": reward_job(function) for name, function in rewards.items()}
    jobs |= {f"tool {tool_of(function).name}": tool_job(function) for function in tools}
    with Worker(jobs) as worker:

        def moved(function: Callable[..., Any]) -> Callable[..., Any]:
            return isolated_tool(function, worker) if function in tools else function

        yield replace(
            task,
            rewards={
                name: IsolatedReward(f"reward {name}", function, worker) if name in rewards else function
                for name, function in task.rewards.items()
            },
            tools=[moved(function) for function in task.tools],
        )
