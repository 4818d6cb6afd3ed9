"""A task whose own functions run in a worker process: what is not ours may hang, crash or leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from groupwise.rewards.isolated_reward import IsolatedReward, reward_job
from groupwise.rewards.worker import Job, Worker, cannot_fork, is_movable
from groupwise.rollout.run_tool import isolated_tool, tool_job
from groupwise.rollout.tools import tool_of
from groupwise.tasks.task import Task
from groupwise.tracking.log import LOGGER


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
