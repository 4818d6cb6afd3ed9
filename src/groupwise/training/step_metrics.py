"""The metrics of a step: rewards, lengths, signs of degenerate rollouts, speed and memory."""

from __future__ import annotations

import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, pstdev

import torch

from groupwise.records import Group, Rollout
from groupwise.training.collector import Batch, has_signal


def batch_metrics(
    batch: Batch,
    *,
    truncated: bool = False,
    shown_reward: Callable[[Rollout], float] = lambda rollout: rollout.reward,
) -> dict[str, float]:
    """Return rewards, lengths and the share of groups without signal, over all sampled rollouts."""
    rollouts = [rollout for group in batch.all_groups for rollout in group.rollouts]
    valid = [rollout for rollout in rollouts if rollout.error is None]
    silent = sum(not has_signal(group) for group in batch.all_groups)
    metrics = {
        "advantage/zero_variance": silent / len(batch.all_groups),
        "rollout/groups": float(len(batch.groups)),
        "rollout/replaced": float(batch.replaced),
        "rollout/failed": 1 - len(valid) / len(rollouts),
        "rollout/length": fmean(rollout.length for rollout in rollouts),
        "rollout/length_max": float(max(rollout.length for rollout in rollouts)),
        "rollout/truncated": fmean(rollout.truncated for rollout in rollouts),
        **signs(batch.all_groups, truncated=truncated),
    }
    if batch.passed_over:
        metrics["curriculum/passed_over"] = float(batch.passed_over)
        metrics["curriculum/kinds"] = float(len(batch.rates))
    if any(rollout.turns for rollout in rollouts):
        calls = [call for rollout in rollouts for call in rollout.calls]
        metrics["rollout/turns"] = fmean(len(rollout.turns) for rollout in rollouts)
        metrics["rollout/calls"] = len(calls) / len(rollouts)
        metrics["rollout/failed_calls"] = sum(call.error is not None for call in calls) / max(1, len(calls))
        metrics["rollout/read"] = fmean(map(tokens_read, rollouts))
    if any(rollout.rewritten is not None for rollout in rollouts):
        metrics["agent/sequences"] = fmean(len(rollout.sequences) for rollout in rollouts)
        metrics["agent/rewritten"] = float(sum(rollout.rewritten or 0 for rollout in rollouts))
    metrics |= {f"judge/{kind}": float(count) for kind, count in batch.judge_usage.items()}
    metrics |= {f"logged/{name}": value for name, value in batch.logged.items()}
    if valid:
        rewards = [shown_reward(rollout) for rollout in valid]
        metrics["reward/mean"] = fmean(rewards)
        metrics["reward/std"] = pstdev(rewards)
    for name in sorted({name for rollout in valid for name in rollout.rewards}):
        values = [rollout.rewards[name] for rollout in valid if name in rollout.rewards]
        metrics[f"reward/{name}/mean"] = fmean(values)
        metrics[f"reward/{name}/std"] = pstdev(values)
    return metrics


def tokens_read(rollout: Rollout) -> int:
    """Return the number of tokens after the prompts that the policy did not sample."""
    return sum(len(one.tokens) - one.prompt_length for one in rollout.sequences) - rollout.length


def speed_metrics(
    batch: Batch, *, update_seconds: float, step_seconds: float | None = None
) -> dict[str, float]:
    """Return time and memory: the only metrics that differ when a step is repeated.

    `step_seconds` is the duration of the whole step; pass it if rollout and update overlap.
    """
    tokens = sum(rollout.length for group in batch.all_groups for rollout in group.rollouts)
    step = step_seconds or batch.rollout_seconds + batch.reward_seconds + update_seconds
    return {
        "speed/tokens_per_second": tokens / step,
        "speed/rollout_tokens_per_second": tokens / batch.rollout_seconds,
        "time/rollout": batch.rollout_seconds,
        **({"time/tools": batch.tool_seconds} if batch.tool_seconds else {}),
        "time/reward": batch.reward_seconds,
        "time/update": update_seconds,
        "time/step": step,
        "memory/peak_gb": peak_memory(),
    }


def peak_memory() -> float:
    """Return the peak memory of this process in GB, of the GPU if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def resident_bytes() -> int:
    """Return the resident memory of this process; where the system does not report it, the peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return int(peak_memory() * 1e9)
    return pages * os.sysconf("SC_PAGE_SIZE")


LOOP_TOKENS = 16
"""A completion loops if at least this many of its last tokens repeat one segment."""
LOOP_TIMES = 4


def signs(groups: Sequence[Group], *, truncated: bool = False) -> dict[str, float]:
    """Return the shares of completions that look degenerate, whatever their reward.

    `truncated`: top-k, top-p or min-p was used, so the sampler often had only one token to choose from.
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
    """Count the completions whose text equals that of an earlier member of their group."""
    return sum(len(group.valid) - len({r.text for r in group.valid}) for group in groups)


def same_answer(groups: Sequence[Group]) -> int:
    """Count the completions whose whole text also answers another prompt."""
    count: Counter[str] = Counter()
    prompts_of: dict[str, set[str]] = {}
    for group in groups:
        prompt = str(group.rollouts[0].prompt)
        for rollout in group.valid:
            count[rollout.text] += 1
            prompts_of.setdefault(rollout.text, set()).add(prompt)
    return sum(count[text] for text, prompts in prompts_of.items() if len(prompts) > 1)


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
    """Describe how the training mask contradicts the sampled tokens; None if it does not.

    Sampled tokens have a log-probability and an entropy; all others have 0.0. An entropy
    of exactly 0 also comes from a sampler that had no choice, so one such token proves nothing: a
    segment of them among tokens with entropy does, unless choices were truncated.
    """
    if any(rollout.trained[: rollout.prompt_length]):
        return "a prompt token is trained"
    ended = rollout.finish == "end" and not rollout.branches  # of several sequences, one has not ended last
    if ended and rollout.trained and not rollout.trained[-1]:
        return "the end token is not trained"
    if not all(rollout.trained[rollout.prompt_length :]) and any(skipped(rollout)):
        return "a sampled token is not trained"
    silent = rollout.entropies.count(0.0)
    # The count alone decides for nearly every rollout, and is cheap.
    suspect = len(rollout.trained) > silent >= rollout.trained.count(False) + UNSAMPLED
    if suspect and not truncated and max(segments(rollout)) >= UNSAMPLED:
        return "tokens that were not sampled are trained"
    return None


def skipped(rollout: Rollout) -> Iterator[bool]:
    """Yield for each token whether it was sampled and is not trained."""
    for trained, entropy in zip(rollout.trained, rollout.entropies, strict=True):
        yield entropy != 0.0 and not trained


UNSAMPLED = 8
"""Number of consecutive trained tokens without log-probability and entropy that is a fault."""


def segments(rollout: Rollout) -> Iterator[int]:
    """Yield, at each token, the length of the run of trained tokens that were not sampled."""
    length = 0
    for trained, logprob, entropy in zip(rollout.trained, rollout.logprobs, rollout.entropies, strict=True):
        length = length + 1 if trained and logprob == 0.0 and entropy == 0.0 else 0
        yield length
