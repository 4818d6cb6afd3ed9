"""What a step says about itself: the metrics of its rollouts."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, pstdev

import torch

from groupwise.records import Rollout
from groupwise.tracking.signs import signs
from groupwise.training.batch import Batch, has_signal


def batch_metrics(
    batch: Batch,
    *,
    truncated: bool = False,
    shown_reward: Callable[[Rollout], float] = lambda rollout: rollout.reward,
) -> dict[str, float]:
    """Rewards, lengths and losses of signal, over every rollout drawn."""
    rollouts = [rollout for group in batch.drawn for rollout in group.rollouts]
    valid = [rollout for rollout in rollouts if rollout.error is None]
    silent = sum(not has_signal(group) for group in batch.drawn)
    metrics = {
        "advantage/zero_variance": silent / len(batch.drawn),
        "rollout/groups": float(len(batch.groups)),
        "rollout/replaced": float(batch.replaced),
        "rollout/failed": 1 - len(valid) / len(rollouts),
        "rollout/length": fmean(rollout.length for rollout in rollouts),
        "rollout/length_max": float(max(rollout.length for rollout in rollouts)),
        "rollout/truncated": fmean(rollout.truncated for rollout in rollouts),
        **signs(batch.drawn, truncated=truncated),
    }
    if batch.passed_over:
        metrics["curriculum/passed_over"] = float(batch.passed_over)
        metrics["curriculum/kinds"] = float(len(batch.rates))
    if any(rollout.turns for rollout in rollouts):
        calls = [call for rollout in rollouts for call in rollout.calls]
        metrics["rollout/turns"] = fmean(len(rollout.turns) for rollout in rollouts)
        metrics["rollout/calls"] = len(calls) / len(rollouts)
        metrics["rollout/failed_calls"] = sum(call.error is not None for call in calls) / max(1, len(calls))
        metrics["rollout/read"] = fmean(len(r.tokens) - r.prompt_length - r.length for r in rollouts)
    metrics |= {f"judge/{kind}": float(count) for kind, count in batch.judged.items()}
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


def speed_metrics(
    batch: Batch, *, update_seconds: float, step_seconds: float | None = None
) -> dict[str, float]:
    """Time and memory; the only metrics that differ when a step is repeated.

    `step_seconds`: of the whole step, where its parts overlap.
    """
    tokens = sum(rollout.length for group in batch.drawn for rollout in group.rollouts)
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
    """The most memory this process has held, on the GPU when there is one, in GB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def resident_bytes() -> int:
    """Memory that this process holds now, where the system tells."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return int(peak_memory() * 1e9)
    return pages * os.sysconf("SC_PAGE_SIZE")
