"""Signs of silent failure that a step's rollouts carry: measured in every step, judged by `report.alarms`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

from groupwise.records import Group, Rollout

LOOP_TOKENS = 16
"""A completion loops when its last tokens, this many at least, are one stretch again and again."""
LOOP_TIMES = 4


def signs(groups: Sequence[Group], *, truncated: bool = False) -> dict[str, float]:
    """Return the shares of completions that look wrong whatever their reward.

    `truncated`: the sampler was kept from drawing some tokens, as by top-p, and often had but one to draw.
    """
    completions = [rollout for group in groups for rollout in group.valid]
    if not completions:
        return {}
    return {
        "rollout/repeated": repeated(groups) / len(completions),
        "rollout/same_answer": same_answer(groups) / len(completions),
        "rollout/looping": fmean(map(loops, completions)),
        "rollout/mask_faults": fmean(
            mask_fault(rollout, truncated=truncated) is not None for rollout in completions
        ),
    }


def repeated(groups: Sequence[Group]) -> int:
    """Count the completions that say what an earlier member of their group said."""
    return sum(len(group.valid) - len({r.text for r in group.valid}) for group in groups)


def same_answer(groups: Sequence[Group]) -> int:
    """Count the completions whose whole text was also given to another prompt."""
    said: Counter[str] = Counter()
    asked: dict[str, set[str]] = {}
    for group in groups:
        prompt = str(group.rollouts[0].prompt)
        for rollout in group.valid:
            said[rollout.text] += 1
            asked.setdefault(rollout.text, set()).add(prompt)
    return sum(said[text] for text, prompts in asked.items() if len(prompts) > 1)


def loops(rollout: Rollout) -> bool:
    """Whether a completion ran out of tokens while repeating itself."""
    if not rollout.truncated:
        return False
    tokens = rollout.tokens[rollout.prompt_length :]
    for period in range(1, len(tokens) // LOOP_TIMES + 1):
        length = max(LOOP_TIMES, -(-LOOP_TOKENS // period)) * period
        if length <= len(tokens) and tokens[-length:] == tokens[-period:] * (length // period):
            return True
    return False


def mask_fault(rollout: Rollout, *, truncated: bool = False) -> str | None:
    """Say how the mask contradicts what was sampled; None where it does not.

    The sampler leaves a log-probability and an entropy on what it drew and 0.0 on all else. An entropy
    of exactly 0 also comes from a sampler that had no choice, so one such token proves nothing: a
    stretch of them among tokens with entropy does, unless choices were truncated.
    """
    if any(rollout.trained[: rollout.prompt_length]):
        return "a prompt token is trained"
    if rollout.finish == "end" and rollout.trained and not rollout.trained[-1]:
        return "the end token is not trained"
    if not all(rollout.trained[rollout.prompt_length :]) and any(skipped(rollout)):
        return "a sampled token is not trained"
    silent = rollout.entropies.count(0.0)
    # The count alone settles nearly every rollout, at no cost.
    suspect = len(rollout.trained) > silent >= rollout.trained.count(False) + UNSAMPLED
    if suspect and not truncated and max(stretches(rollout)) >= UNSAMPLED:
        return "tokens that were not sampled are trained"
    return None


def skipped(rollout: Rollout) -> Iterator[bool]:
    """Yield for each token whether it was sampled and is not trained."""
    for trained, entropy in zip(rollout.trained, rollout.entropies, strict=True):
        yield entropy != 0.0 and not trained


UNSAMPLED = 8
"""Trained tokens in a row without log-probability and entropy that cannot have been sampled."""


def stretches(rollout: Rollout) -> Iterator[int]:
    """Yield the lengths of stretches of trained tokens that carry no trace of sampling."""
    length = 0
    for trained, logprob, entropy in zip(rollout.trained, rollout.logprobs, rollout.entropies, strict=True):
        length = length + 1 if trained and logprob == 0.0 and entropy == 0.0 else 0
        yield length
