"""Trying a task's rewards on one example before a model loads: a mistake in them shows at once."""

from __future__ import annotations

from groupwise.errors import ConfigError
from groupwise.records import Example, Group, Rollout, Turn
from groupwise.rewards.isolated_reward import IsolatedReward
from groupwise.rewards.reward_call import RewardContext
from groupwise.rewards.score import score_within
from groupwise.rewards.time_limit import TimeLimits
from groupwise.tasks.task import Task
from groupwise.tasks.verify import gold_of


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
