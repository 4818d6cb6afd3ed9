"""Rewards for rollouts that search: did they find, think, search as told, and cite what they read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from groupwise.records import Example, Rollout
from groupwise.rewards.overlap import Reward
from groupwise.rewards.tags import END_THINK

CALL = "<tool_call>"


def spoken(text: str) -> str:
    """Return what a turn says after its thinking."""
    return text.rpartition(END_THINK)[2].strip()


def last_word(rollout: Rollout) -> str:
    """Return the answer: what the last turn says, or nothing if it is one more call."""
    answer = spoken(rollout.text)
    return "" if CALL in answer or (rollout.turns and rollout.turns[-1].calls) else answer


def searches(rollout: Rollout) -> list[tuple[str, ...]]:
    """Return what each call found, best first; calls that failed found nothing."""
    return [call.found for call in rollout.calls if call.error is None]


def reciprocal_rank(found: Sequence[Sequence[str]], gold: Collection[str]) -> float:
    """Return 1 / rank of the first gold name, in the search where it stands highest; 0 without one.

    Example: found (a, b) and (b, c), gold {b} -> 1.0, since the second search has it first.
    """
    ranks = [names.index(name) + 1 for names in found for name in gold if name in names]
    return 1 / min(ranks) if ranks else 0.0


def mrr(*, needed: Callable[[Example], Sequence[Collection[str]]]) -> Reward:
    """Make a reward: the mean, over what a question needs, of how high its searches found it.

    `needed` gives for each hop the documents of which any will do.
    """

    def found_high(rollout: Rollout, example: Example) -> float:
        hops, found = needed(example), searches(rollout)
        return sum(reciprocal_rank(found, gold) for gold in hops) / len(hops)

    return found_high


def recall(*, needed: Callable[[Example], Sequence[Collection[str]]], at: int) -> Reward:
    """Make a reward: the share of what a question needs that is among the first `at` of some search."""

    def found_at_all(rollout: Rollout, example: Example) -> float:
        hops, found = needed(example), [names[:at] for names in searches(rollout)]
        return sum(any(name in names for names in found for name in gold) for gold in hops) / len(hops)

    return found_at_all


def thinks_every_turn(rollout: Rollout, example: Example) -> float:
    """The share of turns that think before they speak; 0 for a rollout that never called a tool."""
    if not rollout.calls:
        return 0.0
    return sum(END_THINK in turn.text for turn in rollout.turns) / len(rollout.turns)


def searches_once(rollout: Rollout, example: Example) -> float:
    """1 for one call that worked and no other, falling by half with each one more; 0 for none."""
    calls = rollout.calls
    if not any(call.error is None for call in calls):
        return 0.0
    return 0.5 ** (len(calls) - 1)


def cites_well(rollout: Rollout, example: Example) -> float | None:
    """The share of the answer's [names] that some search returned; None for an answer that cites nothing."""
    seen = {name for names in searches(rollout) for name in names}
    cited = [part.partition("]")[0].strip() for part in last_word(rollout).split("[")[1:] if "]" in part]
    return sum(name in seen for name in cited) / len(cited) if cited else None
