"""Running a task's rewards over a group: each member's rewards and their weighted sum, or why it failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from groupwise.errors import RolloutError
from groupwise.records import Example, Group, Rollout
from groupwise.rewards.isolated_reward import IsolatedReward
from groupwise.rewards.reward_call import LARGEST, Outcome, RewardContext, RewardFunction, outcomes_of
from groupwise.rewards.time_limit import Limit, TimeLimits, Watched
from groupwise.rewards.worker import UnmovableError, described, is_ours
from groupwise.tracking.log import LOGGER


def score_group(
    group: Group, *, rewards: Mapping[str, RewardFunction], weights: Mapping[str, float], seconds: float
) -> Group:
    """Return the group with each rollout's rewards and weighted sum, or the error that prevented them.

    A reward without a weight weighs 1; a weight of 0 makes it a mere metric. Rollouts that failed
    before are left alone. `seconds` limits one call (see `time_limit` for where it cannot).
    """
    with TimeLimits(seconds) as limit:
        return score_within(limit, group, rewards=rewards, weights=weights)


def score_within(
    limit: Limit,
    group: Group,
    *,
    rewards: Mapping[str, RewardFunction],
    weights: Mapping[str, float],
    context: RewardContext | None = None,
) -> Group:
    """Do the same under a limit that many groups share; `context` is what rewards learn of the run."""
    context = replace(context or RewardContext(), seconds=limit.seconds)
    members = {index: rollout for index, rollout in enumerate(group.rollouts) if rollout.error is None}
    parts: dict[int, dict[str, float]] = {index: {} for index in members}
    errors: dict[int, str] = {}
    for name, function in rewards.items():
        if not members:
            break
        outcomes = scored_by(function, list(members.values()), group.example, limit=limit, context=context)
        for index, outcome in zip(list(members), outcomes, strict=True):
            if isinstance(outcome, RolloutError):
                errors[index] = f"reward {name}: {outcome}"
                context.failed(name, outcome)
                del members[index]
            elif outcome is not None:
                parts[index][name] = outcome

    def scored(index: int, rollout: Rollout) -> Rollout:
        if index not in parts:
            return rollout
        if index in errors:
            return rollout.judged(error=errors[index])
        if not parts[index]:
            return rollout.judged(error="no reward applies: each returned None")
        total = weighted_sum(parts[index], weights)
        if not -LARGEST <= total <= LARGEST:
            return rollout.judged(error=f"the weighted sum of the rewards is {total}; lower task.weights")
        return rollout.judged(rewards=parts[index], reward=total)

    return replace(group, rollouts=tuple(scored(i, r) for i, r in enumerate(group.rollouts)))


def weighted_sum(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Add rewards up; one without a weight counts once."""
    return sum([weights.get(name, 1.0) * value for name, value in rewards.items()])


def scored_by(
    function: RewardFunction,
    rollouts: Sequence[Rollout],
    example: Example,
    *,
    limit: Limit,
    context: RewardContext,
) -> list[Outcome]:
    """Return the outcome of each rollout, from a worker process or from this one."""
    if isinstance(function, IsolatedReward):
        if function.worker is not None:
            try:
                return function.scored(rollouts, example, context)
            except UnmovableError as error:
                LOGGER.warning("%s runs in the trainer's process: %s", function.name, error)
                function.worker = None
        function = function.function
    guard = limit if is_ours(function) else Watched(limit, f"the reward {described(function)}")
    calls = outcomes_of(function, rollouts, example, limit=guard, context=context)
    return [outcome for outcomes in calls for outcome in outcomes]
