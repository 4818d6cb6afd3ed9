"""The update as one writes it first: a padded batch, full logits, loops over tokens, double precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.config.schema import AlgoConfig
from groupwise.records import Sample, Sampling

Gradients = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of each sample, what the model says about its trained tokens."""

    logprobs: list[Tensor]
    entropies: list[Tensor]


def measure(model: Any, samples: Sequence[Sample], sampling: Sampling) -> Measured:
    """Run a plain Hugging Face model on the padded batch."""
    longest = max(len(sample.tokens) for sample in samples)
    tokens_BT = torch.tensor([s.tokens + (0,) * (longest - len(s.tokens)) for s in samples])
    mask_BT = torch.tensor([[int(t < len(s.tokens)) for t in range(longest)] for s in samples])
    logits_BTV = model(input_ids=tokens_BT, attention_mask=mask_BT).logits / sampling.temperature
    logprobs_BTV = logits_BTV.log_softmax(-1)
    entropy_BT = -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)
    trained = [[t for t, trained in enumerate(sample.trained) if trained] for sample in samples]
    return Measured(
        logprobs=[
            torch.stack([logprobs_BTV[b, t - 1, samples[b].tokens[t]] for t in places])
            for b, places in enumerate(trained)
        ],
        entropies=[torch.stack([entropy_BT[b, t - 1] for t in places]) for b, places in enumerate(trained)],
    )


def naive_loss(
    now: Measured,
    *,
    old: list[Tensor],
    reference: list[Tensor] | None,
    samples: Sequence[Sample],
    algo: AlgoConfig,
    step_samples: Sequence[Sample],
    minibatches: int,
    max_tokens: int,
) -> Tensor:
    """Return the loss of one mini-batch, `samples`, of a step that holds `step_samples`."""
    total = torch.zeros((), dtype=torch.float64)
    for b, sample in enumerate(samples):
        places = [t for t, trained in enumerate(sample.trained) if trained]
        sampled = [sample.logprobs[t] for t in places]
        weights = corrections(algo, [float(x) for x in old[b]], sampled)
        sequence_ratio = (now.logprobs[b] - old[b]).mean().exp()
        for i, place in enumerate(places):
            logprob, ratio = now.logprobs[b][i], (now.logprobs[b][i] - old[b][i]).exp()
            if algo.loss == "gspo":
                ratio = sequence_ratio.detach() * logprob.exp() / logprob.exp().detach()
            token = weights[i] * surrogate(algo, ratio, logprob, sample.advantages[place], sampled[i])
            drift = sum(sampled) / len(places) - now.logprobs[b].detach().mean().item()
            if (
                algo.off_policy_mask is not None
                and sample.advantages[place] < 0
                and drift > algo.off_policy_mask
            ):
                token = 0.0 * token
            if reference is not None:
                token = token + algo.beta * penalty(algo, logprob, reference[b][i], old[b][i])
            token = token - algo.entropy_bonus * now.entropies[b][i]
            total = total + token / denominator(algo, sample, samples, step_samples, minibatches, max_tokens)
    return total


def surrogate(algo: AlgoConfig, ratio: Tensor, logprob: Tensor, advantage: float, sampled: float) -> Tensor:
    if algo.loss.startswith("dppo"):
        p, q = math.exp(logprob.detach().item()), math.exp(sampled)
        divergence, limit = abs(p - q), 0.15
        if algo.loss == "dppo_kl":
            divergence, limit = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)), 0.05
        outside = divergence > (algo.divergence_limit or limit) and (p > q if advantage > 0 else p < q)
        return 0.0 * logprob if outside else -min(ratio.detach().item(), 20.0) * advantage * logprob
    if algo.loss == "sapo":
        tau = algo.tau_positive if advantage > 0 else algo.tau_negative
        return -advantage * (4 / tau) / (1 + (-tau * (ratio - 1)).exp())
    if algo.loss == "cispo":
        return -ratio.detach().clamp(max=1 + algo.clip_high) * advantage * logprob
    bounded = ratio.clamp(1 - algo.clip_low, 1 + algo.clip_high)
    objective = torch.minimum(ratio * advantage, bounded * advantage)
    if algo.clip_two_sided is not None and advantage < 0:
        objective = torch.maximum(objective, torch.tensor(algo.clip_two_sided * advantage).double())
    return -objective


def penalty(algo: AlgoConfig, logprob: Tensor, reference: Tensor, old: Tensor) -> Tensor:
    difference, ratio = logprob - reference, (logprob - old).exp()
    if algo.kl == "k1":
        return ratio * difference
    if algo.kl == "k2":
        return ratio.detach() * difference**2 / 2
    return ratio * ((-difference).exp() - 1 + difference)


def corrections(algo: AlgoConfig, old: list[float], sampled: list[float]) -> list[float]:
    if algo.correction == "none":
        return [1.0] * len(old)
    scope, action = algo.correction.split("_")
    weights = [math.exp(a - b) for a, b in zip(old, sampled, strict=True)]
    if scope == "sequence":
        weights = [math.prod(weights)] * len(weights)
    cap = algo.correction_cap
    if action == "truncate":
        return [min(weight, cap) for weight in weights]
    return [weight if 1 / cap <= weight <= cap else 0.0 for weight in weights]


def denominator(
    algo: AlgoConfig,
    sample: Sample,
    minibatch: Sequence[Sample],
    step_samples: Sequence[Sample],
    minibatches: int,
    max_tokens: int,
) -> float:
    match algo.loss:
        case "grpo" | "gspo" | "sapo":
            return len(step_samples) * sample.length / minibatches
        case "dr_grpo":
            return len(step_samples) * max_tokens / minibatches
        case "bnpo":
            return sum(s.length for s in minibatch)
        case _:
            return sum(s.length for s in step_samples) / minibatches


def gradients(model: Any) -> Gradients:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
