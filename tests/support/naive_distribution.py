"""The sampling distribution in plain Python, one token at a time: what the real one must equal."""

from __future__ import annotations

import math

from torch import Tensor

from groupwise.records import Sampling


def naive_logprobs(logits_V: Tensor, sampling: Sampling) -> list[float]:
    """Return each token's log-probability; -inf for those that are never drawn."""
    logits = [float(x) / (sampling.temperature or 1.0) for x in logits_V]
    top = max(logits)
    weight = {token: math.exp(x - top) for token, x in enumerate(logits)}
    if not sampling.greedy:
        ranked = sorted(weight, key=lambda token: -weight[token])[: sampling.top_k or None]
        total, before, kept = sum(weight[token] for token in ranked), 0.0, []
        for token in ranked:
            if before / total < sampling.top_p:
                kept.append(token)
            before += weight[token]
        weight = {token: weight[token] for token in kept if weight[token] >= sampling.min_p}
    total = sum(weight.values())
    return [math.log(weight[t] / total) if weight.get(t) else -math.inf for t in range(len(logits))]
