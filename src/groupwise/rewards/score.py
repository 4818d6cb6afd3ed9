"""Running a task's rewards over a group.

A reward is a function in one of two styles, told apart by its parameter names:

    (rollout, example) -> float | bool | None          called once for each rollout
    (prompts, completions, **columns) -> list          TRL style, called once for each group

TRL style may name any of `prompts`, `completions`, `completion_ids` and the example's columns, each
a list with one entry per rollout, or take them all as `**kwargs`. For a chat prompt a completion is
`[{"role": "assistant", "content": …}]`, a prefill included. Either style may be `async`.

None means that the reward does not apply. An exception, a timeout or a value that is not a finite
number marks the rollout as failed (in TRL style: the group's rollouts); it never becomes a 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, SupportsFloat

from groupwise.errors import RolloutError
from groupwise.records import Example, Group, Rollout
from groupwise.rewards.time_limit import Limit, TimeLimitReached, TimeLimits

RewardFunction = Callable[..., Any]
Outcome = float | None | RolloutError

BATCH_NAMES = frozenset({"prompts", "completions", "completion_ids"})
# Columns TRL keeps to itself: the plural names above carry them.
RESERVED_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})


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
    limit: Limit, group: Group, *, rewards: Mapping[str, RewardFunction], weights: Mapping[str, float]
) -> Group:
    """Do the same under a limit that many groups share."""
    members = {index: rollout for index, rollout in enumerate(group.rollouts) if rollout.error is None}
    parts: dict[int, dict[str, float]] = {index: {} for index in members}
    errors: dict[int, str] = {}
    for name, function in rewards.items():
        if not members:
            break
        run = score_together if takes_batches(function) else score_each
        outcomes = run(function, list(members.values()), group.example, limit)
        for index, outcome in zip(list(members), outcomes, strict=True):
            if isinstance(outcome, RolloutError):
                errors[index] = f"reward {name}: {outcome}"
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
        return rollout.judged(rewards=parts[index], reward=weighted_sum(parts[index], weights))

    return replace(group, rollouts=tuple(scored(i, r) for i, r in enumerate(group.rollouts)))


def weighted_sum(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Add rewards up; one without a weight counts once."""
    return sum([weights.get(name, 1.0) * value for name, value in rewards.items()])


def takes_batches(function: RewardFunction) -> bool:
    """Tell whether a reward is written in TRL style."""
    try:
        return _takes_batches(function)
    except TypeError:  # an object that has no hash, which cannot be remembered
        return _takes_batches.__wrapped__(function)


@lru_cache(maxsize=64)
def _takes_batches(function: RewardFunction) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    by_keyword_only = all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)
    return by_keyword_only or any(p.name in BATCH_NAMES for p in parameters)


def score_each(
    function: RewardFunction, rollouts: Sequence[Rollout], example: Example, limit: Limit
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for rollout in rollouts:
        try:
            outcomes.append(finite(call(function, rollout, example, limit=limit)))
        except RolloutError as error:
            outcomes.append(error)
    return outcomes


def score_together(
    function: RewardFunction, rollouts: Sequence[Rollout], example: Example, limit: Limit
) -> list[Outcome]:
    try:
        values = call(function, limit=limit, **batch_arguments(function, rollouts, example))
        try:
            values = list(values)
        except TypeError:
            raise RolloutError(f"returned {type(values).__name__}, not a list of numbers") from None
        if len(values) != len(rollouts):
            raise RolloutError(f"returned {len(values)} values for {len(rollouts)} completions")
        return [finite(value) for value in values]
    except RolloutError as error:
        return [error] * len(rollouts)


def batch_arguments(
    function: RewardFunction, rollouts: Sequence[Rollout], example: Example
) -> dict[str, list[Any]]:
    """Return the keyword arguments that TRL would give this function, less those it does not take."""
    prompts, completions = zip(*(as_trl(rollout) for rollout in rollouts), strict=True)
    available = {
        **{
            column: [value] * len(rollouts)
            for column, value in example.items()
            if column not in RESERVED_COLUMNS
        },
        "prompts": list(prompts),
        "completions": list(completions),
        "completion_ids": [list(rollout.tokens[rollout.prompt_length :]) for rollout in rollouts],
    }
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return available
    return {name: values for name, values in available.items() if name in parameters}


def as_trl(rollout: Rollout) -> tuple[Any, Any]:
    """Return (prompt, completion), a prefill moved from the first to the second as TRL does."""
    if isinstance(rollout.prompt, str):
        return rollout.prompt, rollout.text
    messages = [dict(message) for message in rollout.prompt]
    prefill = messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else ""
    return messages, [{"role": "assistant", "content": prefill + rollout.text}]


def call(function: RewardFunction, *arguments: Any, limit: Limit, **columns: Any) -> Any:
    """Call a reward within the time limit; whatever goes wrong is a RolloutError."""
    try:
        with limit:
            result = function(*arguments, **columns)
            if isinstance(result, float) or not inspect.isawaitable(result):  # in this order: asking is slow
                return result
            return asyncio.run(completed(result))
    except TimeLimitReached:
        raise RolloutError(f"took longer than {limit.seconds:g} s") from None
    except Exception as error:
        raise RolloutError(f"{type(error).__name__}: {error}") from error


async def completed(result: Awaitable[Any]) -> Any:
    return await result


def finite(value: Any) -> float | None:
    """Return a reward as a float, None as None, and refuse everything else."""
    if value is None:
        return None
    if not isinstance(value, float) and not isinstance(value, SupportsFloat):  # asking the protocol is slow
        raise RolloutError(f"returned {type(value).__name__}, not a number")
    try:
        number = float(value)
    except Exception as error:
        raise RolloutError(f"returned a {type(value).__name__} that is not one number: {error}") from error
    if not math.isfinite(number):
        raise RolloutError(f"returned {number}")
    return number
