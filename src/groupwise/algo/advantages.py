"""How good an answer is, relative to the other answers of its group.

Each built-in function takes the rewards of a group's valid members and gives one advantage a member; a
function of the user may also give one per turn or per token (`checked_advantage`). A group
whose rewards agree to within `SAME` has nothing to teach and gets exact zeros, so its members can be
left out of the update; every other group has a standard deviation far above rounding noise, so none
of the divisions needs an epsilon that would shrink small but real differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from groupwise.errors import ConfigError
from groupwise.records import Group, Rollout

SAME = 1e-6
"""Rewards that differ by no more than this count as equal: 0.1 + 0.2 and 0.3 are one reward."""

Values = float | tuple[float, ...]
"""The advantage of a rollout: one number, or one per trained token."""

ENVIRONMENT = "environment"
"""The reward part that is the sum of what the environment gave to the turns."""

BATCH_STD = "batch_std"
"""reward - mean of the group, divided by the standard deviation of the batch (`scaled_by_batch`)."""

OVERLONG = "overlong"
"""The reward part that holds the penalty for running long."""


def grpo(rewards: Sequence[float]) -> list[float]:
    """Return (reward - mean) / sample standard deviation (DeepSeekMath, arXiv 2402.03300)."""
    if not differ(rewards):
        return [0.0] * len(rewards)
    mean, deviation = fmean(rewards), stdev(rewards)
    return [(reward - mean) / deviation for reward in rewards]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """Return reward - mean.

    No division by the standard deviation: it would weigh near-solved and near-impossible prompts
    most (Dr. GRPO, arXiv 2503.20783).
    """
    if not differ(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """Return reward - mean of the other members, an unbiased baseline (RLOO, arXiv 2402.14740)."""
    if not differ(rewards):
        return [0.0] * len(rewards)
    total, others = math.fsum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


def maxrl(rewards: Sequence[float]) -> list[float]:
    """Return (reward - mean) / mean (MaxRL, arXiv 2602.02710).

    With rewards of 0 and 1 this estimates the gradient of the log of the success rate, so rare successes
    weigh most. A mean of 0 or less has no such meaning: the group gets zeros.
    """
    if not differ(rewards) or fmean(rewards) <= SAME:
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    return [(reward - mean) / mean for reward in rewards]


def turn_level(rollouts: Sequence[Rollout], weights: Mapping[str, float]) -> list[Values]:
    """Return, for each turn, its return compared with that of the same turn in the other members.

    The return of a turn is the rollout's reward without what the environment gave for earlier turns. It is
    normalised as by `grpo`, among the members that have that turn (GTPO, arXiv 2511.14846, undiscounted).
    """
    weight = weights.get(ENVIRONMENT, 1.0)
    lengths = [rollout.turn_lengths for rollout in rollouts]
    returns = [
        [
            rollout.reward - weight * math.fsum(turn.reward for turn in rollout.turns[:number])
            for number in range(len(own))
        ]
        for rollout, own in zip(rollouts, lengths, strict=True)
    ]
    advantages: list[list[float]] = [[] for _ in rollouts]
    for number in range(max(map(len, lengths), default=0)):
        having = [member for member, own in enumerate(returns) if number < len(own)]
        normalised = grpo([returns[member][number] for member in having])
        for member, advantage in zip(having, normalised, strict=True):
            advantages[member] += [advantage] * lengths[member][number]
    return [one_or_each(own) for own in advantages]


def one_or_each(advantages: Sequence[float]) -> Values:
    """Return the advantages of tokens as one number where all are equal: such rollouts are cheaper."""
    return tuple(advantages) if len(set(advantages)) > 1 else float(advantages[0] if advantages else 0.0)


def gdpo(rewards: Sequence[Mapping[str, float]], *, weights: Mapping[str, float]) -> list[float]:
    """Return the weighted sum of each named reward's own `grpo` advantage (GDPO, arXiv 2601.05242).

    A reward counts among the members that have it; a member without it gets 0 for it. A reward
    without a weight weighs 1.
    """
    advantages = [0.0] * len(rewards)
    for name in sorted({name for parts in rewards for name in parts}):
        having = [member for member, parts in enumerate(rewards) if name in parts]
        normalised = grpo([rewards[member][name] for member in having])
        for member, advantage in zip(having, normalised, strict=True):
            advantages[member] += weights.get(name, 1.0) * advantage
    return advantages


Advantage = Callable[[Sequence[Rollout], Mapping[str, float]], Sequence[Values]]
"""The valid members of a group and the weights of the named rewards to one advantage a member."""

ADVANTAGES: dict[str, Advantage] = {
    "grpo": lambda rollouts, weights: grpo([rollout.reward for rollout in rollouts]),
    "dr_grpo": lambda rollouts, weights: dr_grpo([rollout.reward for rollout in rollouts]),
    "rloo": lambda rollouts, weights: rloo([rollout.reward for rollout in rollouts]),
    "gdpo": lambda rollouts, weights: gdpo([rollout.rewards for rollout in rollouts], weights=weights),
    "maxrl": lambda rollouts, weights: maxrl([rollout.reward for rollout in rollouts]),
    "turn": turn_level,
    BATCH_STD: lambda rollouts, weights: dr_grpo([rollout.reward for rollout in rollouts]),
}


CUSTOM_ADVANTAGES: dict[str, Advantage] = {}
"""Functions of the user, by the name that algo.advantage gives them."""


def register_advantage(name: str, function: Callable[[list[Rollout]], Any]) -> None:
    """Let algo.advantage name a function of the user."""
    CUSTOM_ADVANTAGES[name] = checked_advantage(name, function)


def checked_advantage(name: str, function: Callable[[list[Rollout]], Any]) -> Advantage:
    """Return the user's function as an `Advantage` that names its mistakes.

    It takes the valid rollouts of a group and returns one value per rollout: a number, a list with a number
    per turn, or a list with a number per trained token.
    """

    def advantages(rollouts: Sequence[Rollout], weights: Mapping[str, float]) -> list[Values]:
        try:
            returned = function(list(rollouts))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"algo.advantage {name} raised {type(error).__name__}: {error}") from error
        values = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(values, list | tuple) or len(values) != len(rollouts):
            got = f"{len(values)} values" if isinstance(values, list | tuple) else repr(values)[:60]
            raise ConfigError(
                f"algo.advantage {name} must return one value per rollout, {len(rollouts)} here; got {got}"
            )
        return [per_token(name, rollout, value) for rollout, value in zip(rollouts, values, strict=True)]

    return advantages


def per_token(name: str, rollout: Rollout, value: Any) -> Values:
    """Return a value of the user's function as a number, or as one number per trained token."""
    value = value.tolist() if hasattr(value, "tolist") else value
    numbers = list(value) if isinstance(value, list | tuple) else [value]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ConfigError(f"algo.advantage {name} must return finite numbers; got {number!r}")
    if not isinstance(value, list | tuple):
        return float(value)
    turns, tokens = rollout.turn_lengths, rollout.length
    if len(numbers) == len(turns):
        numbers = [number for number, length in zip(numbers, turns, strict=True) for _ in range(length)]
    if len(numbers) != tokens:
        raise ConfigError(
            f"algo.advantage {name} must return a number, or a list with one per turn ({len(turns)}) or per "
            f"token ({tokens}); got a list of {len(numbers)}"
        )
    return one_or_each(list(map(float, numbers)))


def with_advantages(
    group: Group,
    *,
    kind: str,
    weights: Mapping[str, float],
    chosen: Callable[[Sequence[Rollout]], list[Rollout]] = list,
) -> Group:
    """Return the group with every member's advantage set; failed members count nowhere and get 0.

    `chosen` picks the members to compare; the others get 0, and the chosen are centred on themselves.
    """
    assert all(math.isfinite(rollout.reward) for rollout in group.valid), "a reward is not a finite number"
    compared = chosen(group.valid)
    function = ADVANTAGES.get(kind) or CUSTOM_ADVANTAGES[kind]
    advantages = dict(zip(map(id, compared), function(compared, weights), strict=True))

    def compared_with(rollout: Rollout) -> Rollout:
        advantage = advantages.get(id(rollout), 0.0)
        if isinstance(advantage, tuple):
            return rollout.scored(advantage=fmean(advantage), token_advantages=advantage)
        # Most of what scoring costs is copies: where nothing can be learned, none is made.
        unchanged = advantage == rollout.advantage and rollout.token_advantages is None
        return rollout if unchanged else rollout.scored(advantage=advantage)

    return replace(group, rollouts=tuple(map(compared_with, group.rollouts)))


def scaled_by_batch(groups: Sequence[Group], drawn: Sequence[Group]) -> list[Group]:
    """Return the groups with each advantage divided by the standard deviation of all rewards in `drawn`.

    One scale for the batch keeps easy and hard prompts in proportion, and does not amplify the noise of a
    group whose rewards hardly differ (Lite PPO, arXiv 2508.08221).
    """
    rewards = [rollout.reward for group in drawn for rollout in group.valid]
    if not differ(rewards):
        return list(groups)
    scale = stdev(rewards)
    return [
        replace(
            group,
            rollouts=tuple(
                rollout.scored(advantage=rollout.advantage / scale) if rollout.advantage else rollout
                for rollout in group.rollouts
            ),
        )
        for group in groups
    ]


def overlong_penalty(length: int, *, max_tokens: int, buffer: int, penalty: float) -> float:
    """Return 0 up to max_tokens - buffer, then a straight line down to -penalty at max_tokens.

    A buffer of 0 turns the penalty off (DAPO's soft overlong punishment, arXiv 2503.14476).
    """
    if buffer == 0:
        return 0.0
    over = min(max(length - (max_tokens - buffer), 0), buffer)
    return penalty * -over / buffer


def with_overlong_penalty(group: Group, *, max_tokens: int, buffer: int, penalty: float) -> Group:
    """Return the group with the penalty as one more reward part of each valid member.

    As a part of its own it shows in the metrics, tells apart members of equal reward and is normalised
    like any other by `gdpo`. Of several turns the longest counts: `max_tokens` is the limit of each.
    """
    if buffer == 0:
        return group

    def penalised(rollout: Rollout) -> Rollout:
        if rollout.error is not None:
            return rollout
        length = rollout.longest_turn
        part = overlong_penalty(length, max_tokens=max_tokens, buffer=buffer, penalty=penalty)
        return rollout.scored(rewards={**rollout.rewards, OVERLONG: part}, reward=rollout.reward + part)

    return replace(group, rollouts=tuple(penalised(rollout) for rollout in group.rollouts))


def differ(rewards: Sequence[float]) -> bool:
    """Tell whether there are two rewards or more that are not all the same."""
    return len(rewards) >= 2 and max(rewards) - min(rewards) > SAME
