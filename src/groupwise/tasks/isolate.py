"""Run the functions of a task in a worker process; try its rewards before a model loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from groupwise.errors import ConfigError
from groupwise.isolation.time_limit import TimeLimits
from groupwise.isolation.worker import Job, Worker, cannot_fork, is_movable
from groupwise.records import Example, Group, Rollout, Turn
from groupwise.rewards.runner import IsolatedReward, RewardContext, reward_job, score_within
from groupwise.rewards.score_ahead import ASYNC_JOB, async_job
from groupwise.rollout.agent_rollouts import AGENT_JOB, IsolatedAgent, agent_job
from groupwise.rollout.environment import (
    JOB,
    EnvironmentExecutor,
    EnvironmentFactory,
    IsolatedEnvironment,
    environment_job,
)
from groupwise.rollout.tool_executor import isolated_tool, tool_job
from groupwise.rollout.tools import tool_of
from groupwise.tasks.self_test import gold_of
from groupwise.tasks.task import Task
from groupwise.tracking.run_folder import LOGGER


def failures_on_trial(
    task: Task, example: Example, *, seconds: float, context: RewardContext
) -> dict[str, str]:
    """Score one example with each isolated reward and return the failures with their tracebacks.

    The completion is the gold answer, or empty if there is none. The worker is discarded afterwards, so that
    no state of a reward includes the trial. Rewards in this process are not tried.
    """
    try:
        rollout = trial_rollout(task, example)
    except Exception:
        return {}  # prompts are checked elsewhere, and a failing state or gold answer is not a reward's fault
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
        turns=(Turn(text=text),) if task.is_multi_turn else (),
        state=None if task.state is None else task.state(example),
    )


@contextmanager
def isolated(task: Task, *, workers: int = 1) -> Iterator[Task]:
    """Yield the task with its rewards, tools, environment and agent in a worker process, where possible.

    Enter before CUDA is initialized, because the worker is forked. Functions of this package, functions
    marked `in_process`, tools that take a `state` and asynchronous environments stay in this process. If the
    process must not fork, all functions stay.

    `workers`: processes that score rewards at the same time. Tools, the environment and the agent use the
    first one. An agent that is a command has processes of its own.
    """
    rewards = {name: function for name, function in task.rewards.items() if is_movable(function)}
    tools = [
        function for function in task.tools if is_movable(function) and not tool_of(function).takes_state
    ]
    environment, agent = movable_environment(task), task.agent
    moves_agent = callable(agent) and is_movable(agent)
    if not rewards and not tools and environment is None and not moves_agent:
        yield task
        return
    if reason := cannot_fork():
        LOGGER.warning(
            "the rewards, tools, environment and agent of %s run in the trainer's process: %s",
            task.name,
            reason,
        )
        yield task
        return
    jobs: dict[str, Job] = {f"reward {name}": reward_job(function) for name, function in rewards.items()}
    jobs |= {f"{ASYNC_JOB}reward {name}": async_job(function) for name, function in rewards.items()}
    jobs |= {f"tool {tool_of(function).name}": tool_job(function) for function in tools}
    jobs |= {} if environment is None else {JOB: environment_job(environment)}
    if callable(agent) and moves_agent:
        jobs[AGENT_JOB] = agent_job(agent)
    with Worker(jobs) as worker, ExitStack() as pool:
        others = tuple(pool.enter_context(Worker(jobs)) for _ in range(workers - 1)) if rewards else ()

        def moved(function: Callable[..., Any]) -> Callable[..., Any]:
            return isolated_tool(function, worker) if function in tools else function

        yield replace(
            task,
            rewards={
                name: IsolatedReward(f"reward {name}", function, worker, others)
                if name in rewards
                else function
                for name, function in task.rewards.items()
            },
            tools=[moved(function) for function in task.tools],
            environment=task.environment if environment is None else IsolatedEnvironment(environment, worker),
            prompt=task.prompt if environment is None else None,
            agent=IsolatedAgent(agent, worker) if callable(agent) and moves_agent else agent,
        )


def movable_environment(task: Task) -> EnvironmentFactory | None:
    """Return the environment of a task if it can run in a worker."""
    make = task.environment
    if (
        make is None
        or getattr(make, "in_process", False)
        or EnvironmentExecutor(make, seconds=1).asynchronous
    ):
        return None
    return make
