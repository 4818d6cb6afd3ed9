"""The policy losses: sums over tokens that are already normalised.

`token_weights` holds every denominator, `policy_loss` every numerator. The loss of a step is the plain sum
of `policy_loss` over its micro-batches, whatever they are, as long as no sequence is cut in two.
"""

# Axes: T trained tokens of one micro-batch flattened (no padding).

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from groupwise.algo.divergence import importance_weights, k3, kl_penalty, sum_by_sequence
from groupwise.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What the loss needs to know of each trained token; only `logprobs_T` and `entropy_T` carry gradient."""

    logprobs_T: Tensor
    """Under the policy as it is now."""
    old_T: Tensor
    """By the trainer, before the first update of this step."""
    sampled_T: Tensor
    """By the sampler, when the token was sampled."""
    reference_T: Tensor | None
    """Under the reference policy; needed when beta > 0."""
    entropy_T: Tensor | None
    """Of the policy as it is now; needed when entropy_bonus > 0."""
    teacher_T: Tensor | None = None
    """Under the teacher; NaN where it has none. Needed when distill > 0."""
    advantages_T: Tensor
    weights_T: Tensor
    """The weight of the token's sequence, from `token_weights`."""
    sequence_T: Tensor
    """Which sequence of the micro-batch the token belongs to: 0, 1, 2, …"""

    def __post_init__(self) -> None:
        present = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        shapes = {name: tuple(tensor.shape) for name, tensor in present.items()}
        assert len(set(shapes.values())) == 1, f"all of Tokens must share one shape [T], got {shapes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What the loss is made of; docs/algorithms.md says what each part is for."""

    kind: str
    clip_low: float
    clip_high: float
    clip_two_sided: float | None
    beta: float
    kl: str
    correction: str
    correction_cap: float
    entropy_bonus: float
    divergence_limit: float | None = None
    """Of dppo_tv and dppo_kl; None: what the paper recommends."""
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    """Of sapo."""
    off_policy_mask: float | None = None
    """Drop punished sequences that the policy has moved away from by more than this."""
    distill: float = 0.0
    """Weight of the KL divergence from the teacher."""


def policy_loss(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted sum of the token losses and the diagnostics, as sums over tokens.

    token loss = correction * surrogate + beta * KL - entropy_bonus * entropy + distill * KL from the teacher
    """
    surrogate = SURROGATES.get(settings.kind) or CUSTOM_LOSSES[settings.kind]
    surrogate_T, metrics = surrogate(tokens, settings)
    correction_T, correction_metrics = importance_weights(
        tokens.old_T,
        tokens.sampled_T,
        tokens.sequence_T,
        kind=settings.correction,
        cap=settings.correction_cap,
    )
    loss_T = correction_T * surrogate_T
    if settings.off_policy_mask is not None:
        dropped_T = off_policy_tokens(tokens, limit=settings.off_policy_mask)
        loss_T = loss_T.masked_fill(dropped_T, 0.0)
        metrics = {**metrics, "policy/off_policy": dropped_T.sum()}
    if settings.beta:
        assert tokens.reference_T is not None, "beta > 0 needs the reference policy's log-probs"
        penalty_T = kl_penalty(tokens.logprobs_T, tokens.reference_T, tokens.old_T, kind=settings.kl)
        loss_T = loss_T + settings.beta * penalty_T
    if settings.distill and tokens.teacher_T is not None:
        known_T = ~tokens.teacher_T.isnan()
        teacher_T = torch.where(known_T, tokens.teacher_T, tokens.logprobs_T.detach())
        # k2 has the gradient of k3 without its exponential, which overflows far from the teacher.
        distance_T = kl_penalty(tokens.logprobs_T, teacher_T, tokens.old_T, kind="k2")
        loss_T = loss_T + settings.distill * torch.where(known_T, distance_T, 0.0)
        gap_T = torch.where(known_T, (tokens.logprobs_T - teacher_T).detach(), 0.0)
        metrics = {**metrics, "policy/teacher_kl": gap_T.sum(), "policy/taught": known_T.sum()}
    if settings.entropy_bonus:
        assert tokens.entropy_T is not None, "entropy_bonus > 0 needs the policy's entropies"
        loss_T = loss_T - settings.entropy_bonus * tokens.entropy_T
    return (tokens.weights_T * loss_T).sum(), {**metrics, **correction_metrics, **divergences(tokens)}


def clipped_tokens(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's clipped surrogate with one ratio a token (grpo, bnpo, dapo, dr_grpo)."""
    ratio_T = (tokens.logprobs_T - tokens.old_T).exp()
    return clipped(ratio_T, tokens.advantages_T, settings)


def clipped_sequences(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped surrogate with one ratio a sequence (GSPO, arXiv 2507.18071).

    The ratio is the geometric mean of the tokens' ratios. This is the paper's GSPO-token form: each token
    has the sequence's ratio as value and its own log-prob as gradient, so that advantages may differ between
    tokens; where they do not, the sum over the sequence has the sequence form's gradient.
    """
    log_ratio_T = (tokens.logprobs_T - tokens.old_T).detach()
    length_T = sum_by_sequence(torch.ones_like(log_ratio_T), tokens.sequence_T)
    mean_T = sum_by_sequence(log_ratio_T, tokens.sequence_T) / length_T
    ratio_T = (mean_T + (tokens.logprobs_T - tokens.logprobs_T.detach())).exp()
    return clipped(ratio_T, tokens.advantages_T, settings)


def clipped(
    ratio_T: Tensor, advantages_T: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -advantage * ratio, where the ratio stops counting once it has moved far enough.

    This is -min(ratio * A, clip(ratio) * A) written by the sign of A: a rewarded token gains nothing above
    1 + clip_high, a punished one nothing below 1 - clip_low. Only `clip_two_sided` bounds a punished token's
    ratio from above (INTELLECT-2, arXiv 2505.07291).
    """
    low, high, two_sided = 1 - settings.clip_low, 1 + settings.clip_high, settings.clip_two_sided
    bounded_T = torch.where(advantages_T > 0, ratio_T.clamp(max=high), ratio_T.clamp(min=low, max=two_sided))
    fixed_T = ratio_T.detach()
    metrics = {
        "policy/ratio": fixed_T.sum(),
        "policy/clip_low": ((advantages_T < 0) & (fixed_T < low)).sum(),
        "policy/clip_high": ((advantages_T > 0) & (fixed_T > high)).sum(),
    }
    if two_sided is not None:
        metrics["policy/clip_two_sided"] = ((advantages_T < 0) & (fixed_T > two_sided)).sum()
    return -advantages_T * bounded_T, metrics


def capped_reinforce(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return REINFORCE weighted by the ratio, capped at 1 + clip_high (CISPO, arXiv 2506.13585).

    The cap is on the weight, not on the gradient: every token keeps its gradient. As in the paper there is
    no lower bound; `clip_low` and `clip_two_sided` are not used.
    """
    ratio_T = (tokens.logprobs_T - tokens.old_T).exp().detach()
    cap = 1 + settings.clip_high
    metrics = {"policy/ratio": ratio_T.sum(), "policy/clip_high": (ratio_T > cap).sum()}
    return -ratio_T.clamp(max=cap) * tokens.advantages_T * tokens.logprobs_T, metrics


def inside_trust_region(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return REINFORCE weighted by the ratio, on tokens inside a trust region (DPPO, arXiv 2602.04879).

    A token leaves the region when the policy has moved it in the direction of its advantage, and the
    divergence between the policy and the sampler exceeds `divergence_limit`. The divergence is that of two
    outcomes, this token or any other: total variation |p - q| (dppo_tv) or KL(q || p) (dppo_kl), where p is
    the token's probability now and q the one that it was sampled with.
    """
    with torch.no_grad():
        now_T, sampled_T = tokens.logprobs_T.exp(), tokens.sampled_T.exp()
        if settings.kind == "dppo_tv":
            divergence_T, default = (now_T - sampled_T).abs(), 0.15
        else:
            divergence_T, default = binary_kl(sampled_T, now_T), 0.05
        limit = default if settings.divergence_limit is None else settings.divergence_limit
        outward_T = torch.where(tokens.advantages_T > 0, now_T > sampled_T, now_T < sampled_T)
        masked_T = outward_T & (divergence_T > limit)
        ratio_T = (tokens.logprobs_T - tokens.old_T).exp().clamp(max=DPPO_RATIO_CAP)
    metrics = {
        "policy/ratio": ratio_T.sum(),
        "policy/clip_low": (masked_T & (tokens.advantages_T < 0)).sum(),
        "policy/clip_high": (masked_T & (tokens.advantages_T > 0)).sum(),
    }
    return -ratio_T.masked_fill(masked_T, 0.0) * tokens.advantages_T * tokens.logprobs_T, metrics


DPPO_RATIO_CAP = 20.0
"""Bound of the ratio, as in the authors' code; tokens that far out are almost always masked."""


def binary_kl(q_T: Tensor, p_T: Tensor) -> Tensor:
    """Return KL between Bernoulli(q) and Bernoulli(p)."""
    tiny = torch.finfo(q_T.dtype).tiny
    rest_T = ((1 - q_T).clamp(min=tiny) / (1 - p_T).clamp(min=tiny)).log()
    return q_T * (q_T.clamp(min=tiny) / p_T.clamp(min=tiny)).log() + (1 - q_T) * rest_T


def soft_gate(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -advantage * 4 / tau * sigmoid(tau * (ratio - 1)) (SAPO, arXiv 2511.20347).

    The gate replaces the clip: its slope is 1 at a ratio of 1 and fades smoothly on both sides, faster for
    punished tokens (`tau_negative`).
    """
    ratio_T = (tokens.logprobs_T - tokens.old_T).exp()
    tau_T = torch.where(tokens.advantages_T > 0, settings.tau_positive, settings.tau_negative)
    gate_T = (tau_T * (ratio_T - 1)).sigmoid() * 4 / tau_T
    return -tokens.advantages_T * gate_T, {"policy/ratio": ratio_T.detach().sum()}


@torch.no_grad()
def off_policy_tokens(tokens: Tokens, *, limit: float) -> Tensor:
    """Return which tokens are punished and in a sequence that has become too unlikely (arXiv 2512.02556).

    That is one whose mean of log(sampler / policy) exceeds `limit`: off-policy sequence masking, as in
    DeepSeek-V3.2. Pushing such a sequence down further teaches little and destabilises.
    """
    drift_T = tokens.sampled_T - tokens.logprobs_T
    length_T = sum_by_sequence(torch.ones_like(drift_T), tokens.sequence_T)
    return (tokens.advantages_T < 0) & (sum_by_sequence(drift_T, tokens.sequence_T) / length_T > limit)


Surrogate = Callable[[Tokens, LossSettings], tuple[Tensor, dict[str, Tensor]]]

SURROGATES: dict[str, Surrogate] = {
    "grpo": clipped_tokens,
    "bnpo": clipped_tokens,
    "dapo": clipped_tokens,
    "dr_grpo": clipped_tokens,
    "gspo": clipped_sequences,
    "cispo": capped_reinforce,
    "dppo_tv": inside_trust_region,
    "dppo_kl": inside_trust_region,
    "sapo": soft_gate,
}


CUSTOM_LOSSES: dict[str, Surrogate] = {}
"""Functions of the user, by the name that algo.loss gives them."""


def register_loss(name: str, function: Callable[[Tokens, LossSettings], Any]) -> None:
    """Let algo.loss name a function of the user."""
    CUSTOM_LOSSES[name] = checked_loss(name, function)


def checked_loss(name: str, function: Callable[[Tokens, LossSettings], Any]) -> Surrogate:
    """Return the user's function as a `Surrogate` that names its mistakes.

    It returns the loss of each token, or that and a dict of metrics, which are sums over tokens.
    """

    def surrogate(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
        try:
            returned = function(tokens, settings)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"algo.loss {name} raised {type(error).__name__}: {error}") from error
        loss_T, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        shape = tuple(tokens.logprobs_T.shape)
        if not isinstance(loss_T, Tensor) or tuple(loss_T.shape) != shape:
            got = f"shape {tuple(loss_T.shape)}" if isinstance(loss_T, Tensor) else type(loss_T).__name__
            raise ConfigError(
                f"algo.loss {name} must return one loss per token, a tensor of shape {shape}; got {got}"
            )
        if tokens.logprobs_T.requires_grad and not loss_T.requires_grad:
            raise ConfigError(
                f"algo.loss {name} has no gradient; compute its loss from tokens.logprobs_T without detach()"
            )
        if not bool(loss_T.isfinite().all()):
            count = int((~loss_T.isfinite()).sum())
            raise ConfigError(f"algo.loss {name} returned NaN or inf for {count} of {len(loss_T)} tokens")
        return loss_T, {key: as_sum(name, key, value, loss_T) for key, value in dict(metrics).items()}

    return surrogate


def as_sum(name: str, key: str, value: Any, like: Tensor) -> Tensor:
    """Return a metric of the user's loss as a scalar tensor."""
    number = torch.as_tensor(value, device=like.device).detach()
    if number.numel() != 1:
        raise ConfigError(
            f"algo.loss {name} returned the metric {key!r} with shape {tuple(number.shape)}; return its sum "
            "over tokens"
        )
    return number.reshape(())


def try_loss(settings: LossSettings) -> None:
    """Call the user's loss on a few made-up tokens, so that most mistakes show before a model loads."""
    old_T = torch.tensor([-0.1, -0.7, -2.3, -1.2, -0.4])
    policy_loss(
        Tokens(
            logprobs_T=(old_T + torch.tensor([0.0, 0.1, -0.2, 0.4, 0.0])).requires_grad_(),
            old_T=old_T,
            sampled_T=old_T,
            reference_T=old_T - 0.1 if settings.beta else None,
            entropy_T=torch.tensor([0.3, 1.0, 2.0, 1.5, 0.8]),
            advantages_T=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
            weights_T=torch.full_like(old_T, 0.2),
            sequence_T=torch.tensor([0, 0, 0, 1, 1]),
        ),
        settings,
    )


@torch.no_grad()
def divergences(tokens: Tokens) -> dict[str, Tensor]:
    """Return how far apart the policies are that had a part in these tokens."""
    gap_T = (tokens.old_T - tokens.sampled_T).abs()
    metrics = {
        "policy/tokens": torch.full((), len(gap_T), device=gap_T.device),
        "policy/gap": gap_T.sum(),
        "policy/gap_max": gap_T.max(),
        "policy/gap_kl": k3(tokens.sampled_T - tokens.old_T).sum(),  # KL(sampler || trainer)
        # k3 with the old policy as the sampling policy: KL(old || now).
        "policy/kl_old": k3(tokens.old_T - tokens.logprobs_T).sum(),
    }
    if tokens.reference_T is not None:
        metrics["policy/kl"] = k3(tokens.logprobs_T - tokens.reference_T).sum()
    if tokens.entropy_T is not None:
        metrics["policy/entropy"] = tokens.entropy_T.sum()
    return metrics


NORMALIZATION = {
    "grpo": "sequences",
    "gspo": "sequences",
    "dr_grpo": "max_tokens",
    "dapo": "tokens",
    "cispo": "tokens",
    "dppo_tv": "tokens",
    "dppo_kl": "tokens",
    "sapo": "sequences",
    "bnpo": "minibatch_tokens",
}
"""What each loss is a mean over, unless algo.normalize says otherwise."""


def token_weights(
    kind: str,
    minibatches: Sequence[Sequence[int]],
    *,
    sequences: int,
    tokens: int,
    max_tokens: int,
    normalize: str | None = None,
) -> list[list[float]]:
    """Return, for one pass over a training step, the weight of each sequence's tokens.

    `minibatches` has the trained length of each computed sequence, by optimizer step (of all processes).
    `sequences` and `tokens` count the step's whole batch, zero advantages included (`samples.batch_size`).
    With M mini-batches, the tokens of a sequence of length L weigh

        sequences         M / (sequences * L)            each sequence alike
        max_tokens        M / (sequences * max_tokens)   each token alike, by a number that no answer changes
        tokens            M / tokens                     each token alike, in whichever mini-batch it lands
        minibatch_tokens  1 / tokens of its mini-batch   each token alike within its mini-batch

    so that the sum over a mini-batch is a mean. `normalize` None: what `NORMALIZATION` has for the loss,
    `tokens` for a loss of the user. For minibatch_tokens each mini-batch is taken to hold its share of the
    tokens that are not computed, so with one mini-batch it is `tokens`.
    """
    lengths = [length for minibatch in minibatches for length in minibatch]
    assert min(lengths, default=1) > 0, "a sequence without trained tokens has no weight"
    assert len(lengths) <= sequences, "the batch holds fewer sequences than are computed of it"
    assert sum(lengths) <= tokens, "the batch holds fewer tokens than are computed of it"
    count = len(minibatches)
    match normalize or NORMALIZATION.get(kind, "tokens"):
        case "sequences":
            return [[count / (sequences * length) for length in minibatch] for minibatch in minibatches]
        case "max_tokens":
            return [[count / (sequences * max_tokens)] * len(minibatch) for minibatch in minibatches]
        case "tokens":
            return [[count / tokens] * len(minibatch) for minibatch in minibatches]
        case "minibatch_tokens":
            share = sum(lengths) / tokens
            return [[share / sum(minibatch)] * len(minibatch) for minibatch in minibatches]
    raise KeyError(normalize)


def merge(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the metrics of all parts together."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = combine(name, total[name], value) if name in total else value
    return total


def combine(name: str, left: Tensor, right: Tensor) -> Tensor:
    """Return two values of one metric as one: the greater, the smaller or the sum, as its name asks."""
    if name.endswith("_max"):
        return torch.maximum(left, right)
    if name.endswith("_min"):
        return torch.minimum(left, right)
    return left + right


def averages(total: Mapping[str, Tensor]) -> dict[str, float]:
    """Return merged metrics as means per token, extremes and sums as they are; nothing without tokens."""
    tokens = float(total.get("policy/tokens", 0.0))
    if not tokens:
        return {}
    return {
        name: float(value) if name.endswith(("_max", "_min", "_sum")) else float(value) / tokens
        for name, value in total.items()
        if name != "policy/tokens"
    }
