"""The policy losses: sums over tokens that are already normalised.

`token_weights` holds every denominator, `policy_loss` every numerator. The loss of a step is the plain sum
of `policy_loss` over its micro-batches, whatever they are, as long as no sequence is cut in two.

The KL penalty, with d = log-prob - reference log-prob (Schulman, "Approximating KL divergence", 2020):

    k1 = d                  unbiased, often negative, high variance
    k2 = d^2 / 2            always positive, small bias
    k3 = exp(-d) - 1 + d    unbiased, always positive, low variance

A good estimate of a value need not have a good gradient (arXiv 2506.09477, 2510.01555). As a plain loss on
tokens from the current policy, the mean gradient of k1 is 0, that of k2 is the gradient of
KL(policy || reference), that of k3 the gradient of KL(reference || policy). `kl_penalty` corrects k1 and k3
with the importance ratio.

`importance_weights` corrects for the gap between sampler and trainer. The tokens are sampled from the
sampler's distribution, and the loss assumes the trainer's. Kernels, precision or a quantized sampler make the
two differ a little. A cap keeps a rare large weight from dominating the update.

Axes: N trained tokens of one micro-batch, flattened without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from groupwise.algo.surrogates import (
    CUSTOM_LOSSES,
    Surrogate,
    capped_reinforce,
    inside_trust_region,
    soft_gate,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What the loss needs to know of each trained token; only `logprobs_N` and `entropy_N` carry gradient."""

    logprobs_N: Tensor
    """Under the policy as it is now."""
    old_N: Tensor
    """By the trainer, before the first update of this step."""
    sampled_N: Tensor
    """By the sampler, when the token was sampled."""
    reference_N: Tensor | None
    """Under the reference policy; needed when beta > 0."""
    entropy_N: Tensor | None
    """Of the policy as it is now; needed when entropy_bonus > 0."""
    teacher_N: Tensor | None = None
    """Under the teacher; NaN where it has none. Needed when distill > 0."""
    advantages_N: Tensor
    weights_N: Tensor
    """The weight of the token's sequence, from `token_weights`."""
    sequence_N: Tensor
    """Which sequence of the micro-batch the token belongs to: 0, 1, 2, …"""

    def __post_init__(self) -> None:
        present = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        shapes = {name: tuple(tensor.shape) for name, tensor in present.items()}
        assert len(set(shapes.values())) == 1, f"all of Tokens must share one shape [N], got {shapes}"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Accept the names that losses of users had before: `logprobs_T` for `logprobs_N`."""
            if name.endswith("_T"):
                return getattr(self, f"{name[:-2]}_N")
            raise AttributeError(f"'Tokens' object has no attribute {name!r}")


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
    surrogate_N, metrics = surrogate(tokens, settings)
    correction_N, correction_metrics = importance_weights(
        tokens.old_N,
        tokens.sampled_N,
        tokens.sequence_N,
        kind=settings.correction,
        cap=settings.correction_cap,
    )
    loss_N = correction_N * surrogate_N
    if settings.off_policy_mask is not None:
        dropped_N = off_policy_tokens(tokens, limit=settings.off_policy_mask)
        loss_N = loss_N.masked_fill(dropped_N, 0.0)
        metrics = {**metrics, "policy/off_policy": dropped_N.sum()}
    if settings.beta:
        assert tokens.reference_N is not None, "beta > 0 needs the reference policy's log-probs"
        penalty_N = kl_penalty(tokens.logprobs_N, tokens.reference_N, tokens.old_N, kind=settings.kl)
        loss_N = loss_N + settings.beta * penalty_N
    if settings.distill and tokens.teacher_N is not None:
        known_N = ~tokens.teacher_N.isnan()
        teacher_N = torch.where(known_N, tokens.teacher_N, tokens.logprobs_N.detach())
        # k2 has the gradient of k3 without its exponential, which overflows far from the teacher.
        distance_N = kl_penalty(tokens.logprobs_N, teacher_N, tokens.old_N, kind="k2")
        loss_N = loss_N + settings.distill * torch.where(known_N, distance_N, 0.0)
        gap_N = torch.where(known_N, (tokens.logprobs_N - teacher_N).detach(), 0.0)
        metrics = {**metrics, "policy/teacher_kl": gap_N.sum(), "policy/taught": known_N.sum()}
    if settings.entropy_bonus:
        assert tokens.entropy_N is not None, "entropy_bonus > 0 needs the policy's entropies"
        loss_N = loss_N - settings.entropy_bonus * tokens.entropy_N
    return (tokens.weights_N * loss_N).sum(), {**metrics, **correction_metrics, **divergences(tokens)}


def clipped_tokens(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's clipped surrogate with one ratio a token (grpo, bnpo, dapo, dr_grpo)."""
    ratio_N = (tokens.logprobs_N - tokens.old_N).exp()
    return clipped(ratio_N, tokens.advantages_N, settings)


def clipped_sequences(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped surrogate with one ratio a sequence (GSPO, arXiv 2507.18071).

    The ratio is the geometric mean of the tokens' ratios. This is the paper's GSPO-token form: each token
    has the sequence's ratio as value and its own log-prob as gradient, so that advantages may differ between
    tokens; where they do not, the sum over the sequence has the sequence form's gradient.
    """
    log_ratio_N = (tokens.logprobs_N - tokens.old_N).detach()
    length_N = sum_by_sequence(torch.ones_like(log_ratio_N), tokens.sequence_N)
    mean_N = sum_by_sequence(log_ratio_N, tokens.sequence_N) / length_N
    ratio_N = (mean_N + (tokens.logprobs_N - tokens.logprobs_N.detach())).exp()
    return clipped(ratio_N, tokens.advantages_N, settings)


def clipped(
    ratio_N: Tensor, advantages_N: Tensor, settings: LossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -advantage * ratio, where the ratio stops counting once it has moved far enough.

    This is -min(ratio * A, clip(ratio) * A) written by the sign of A: a rewarded token gains nothing above
    1 + clip_high, a punished one nothing below 1 - clip_low. Only `clip_two_sided` bounds a punished token's
    ratio from above (INTELLECT-2, arXiv 2505.07291).
    """
    low, high, two_sided = 1 - settings.clip_low, 1 + settings.clip_high, settings.clip_two_sided
    bounded_N = torch.where(advantages_N > 0, ratio_N.clamp(max=high), ratio_N.clamp(min=low, max=two_sided))
    fixed_N = ratio_N.detach()
    metrics = {
        "policy/ratio": fixed_N.sum(),
        "policy/clip_low": ((advantages_N < 0) & (fixed_N < low)).sum(),
        "policy/clip_high": ((advantages_N > 0) & (fixed_N > high)).sum(),
    }
    if two_sided is not None:
        metrics["policy/clip_two_sided"] = ((advantages_N < 0) & (fixed_N > two_sided)).sum()
    return -advantages_N * bounded_N, metrics


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


@torch.no_grad()
def off_policy_tokens(tokens: Tokens, *, limit: float) -> Tensor:
    """Return which tokens are punished and in a sequence that has become too unlikely (arXiv 2512.02556).

    That is one whose mean of log(sampler / policy) exceeds `limit`: off-policy sequence masking, as in
    DeepSeek-V3.2. Pushing such a sequence down further teaches little and destabilises.
    """
    drift_N = tokens.sampled_N - tokens.logprobs_N
    length_N = sum_by_sequence(torch.ones_like(drift_N), tokens.sequence_N)
    return (tokens.advantages_N < 0) & (sum_by_sequence(drift_N, tokens.sequence_N) / length_N > limit)


def k1(difference_N: Tensor) -> Tensor:
    return difference_N


def k2(difference_N: Tensor) -> Tensor:
    return difference_N.square() / 2


def k3(difference_N: Tensor) -> Tensor:
    return (-difference_N).expm1() + difference_N


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_penalty(logprobs_N: Tensor, other_N: Tensor, old_N: Tensor, *, kind: str) -> Tensor:
    """Return token penalties whose expected gradient is that of KL(policy || other), off-policy too.

    The other policy is the reference or a teacher.

    The tokens were sampled from the old policy; r = exp(log-prob - old) corrects for that. An unbiased value
    times r is an unbiased value under the sampling distribution, which is fixed, so its
    gradient is unbiased too: r (d + 1) for k1 and r d for k3, per unit of log-prob. k2's gradient d is
    right as it is and needs r only as a weight. So k2 and k3 pull alike and differ in the value they show;
    k1 adds noise of mean 0.
    """
    ratio_N = (logprobs_N - old_N).exp()
    if kind == "k2":
        ratio_N = ratio_N.detach()
    return ratio_N * KL_ESTIMATORS[kind](logprobs_N - other_N)


def importance_weights(
    old_N: Tensor, sampled_N: Tensor, sequence_N: Tensor, *, kind: str, cap: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return one weight a token, without gradient, and its diagnostics.

    none               1
    token_truncate     min(w, cap)                       w = exp(old - sampled) of the token
    token_mask         w where 1/cap <= w <= cap, else 0
    sequence_truncate  min(W, cap)                       W = exp(sum of old - sampled) of its sequence
    sequence_mask      W where 1/cap <= W <= cap, else 0

    A sequence's weight is the product of its tokens' because that is the ratio of the probabilities
    of drawing the whole sequence: unbiased, at a variance that grows with length. A mean in the
    exponent would not be the ratio of any probability.
    """
    if kind == "none":
        return torch.ones_like(old_N), {}
    scope, action = kind.split("_")
    log_weight_N = (old_N - sampled_N).detach()
    if scope == "sequence":
        log_weight_N = sum_by_sequence(log_weight_N, sequence_N)
    weight_N = log_weight_N.exp()
    if action == "truncate":
        cut_N = weight_N > cap
        bounded_N = weight_N.clamp(max=cap)
    else:
        cut_N = (weight_N > cap) | (weight_N < 1 / cap)
        # masked_fill, not a product with the mask: a weight that overflowed would give inf * 0 = nan.
        bounded_N = weight_N.masked_fill(cut_N, 0.0)
    return bounded_N, {
        "policy/correction": bounded_N.sum(),
        "policy/correction_cut": cut_N.sum(),
        "policy/correction_min": weight_N.min(),
    }


def sum_by_sequence(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Return, for each token, the sum over the tokens of its sequence."""
    # There are at most N sequences, so N slots do without reading their number back from the device.
    return torch.zeros_like(values_N).index_add(0, sequence_N, values_N)[sequence_N]


def try_loss(settings: LossSettings, *, teacher: str | None = None) -> None:
    """Call the user's loss on a few made-up tokens, so that most mistakes show before a model loads.

    `teacher` is the setting `algo.teacher`: only a model in this process scores every token.
    """
    old_N = torch.tensor([-0.1, -0.7, -2.3, -1.2, -0.4])
    teacher_N = old_N + 0.05
    if teacher is not None and (teacher == "self" or teacher.startswith(("http://", "https://"))):
        teacher_N[:3] = torch.nan
    policy_loss(
        Tokens(
            logprobs_N=(old_N + torch.tensor([0.0, 0.1, -0.2, 0.4, 0.0])).requires_grad_(),
            old_N=old_N,
            sampled_N=old_N,
            reference_N=old_N - 0.1 if settings.beta else None,
            entropy_N=torch.tensor([0.3, 1.0, 2.0, 1.5, 0.8]),
            teacher_N=teacher_N if teacher else None,
            advantages_N=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
            weights_N=torch.full_like(old_N, 0.2),
            sequence_N=torch.tensor([0, 0, 0, 1, 1]),
        ),
        settings,
    )


@torch.no_grad()
def divergences(tokens: Tokens) -> dict[str, Tensor]:
    """Return how far apart the policies are that had a part in these tokens.

    `policy/kl` is always k3 without the ratio, so that runs with different `algo.kl` can be compared.
    """
    gap_N = (tokens.old_N - tokens.sampled_N).abs()
    metrics = {
        "policy/tokens": torch.full((), len(gap_N), device=gap_N.device),
        "policy/gap": gap_N.sum(),
        "policy/gap_max": gap_N.max(),
        "policy/gap_kl": k3(tokens.sampled_N - tokens.old_N).sum(),  # KL(sampler || trainer)
        # k3 with the old policy as the sampling policy: KL(old || now).
        "policy/kl_old": k3(tokens.old_N - tokens.logprobs_N).sum(),
    }
    if tokens.reference_N is not None:
        metrics["policy/kl"] = k3(tokens.logprobs_N - tokens.reference_N).sum()
    if tokens.entropy_N is not None:
        metrics["policy/entropy"] = tokens.entropy_N.sum()
    return metrics


MEAN_OVER = {
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
"""What each loss is a mean over, unless algo.normalize says otherwise; losses of the user: tokens."""


def token_weights(
    kind: str,
    minibatches: Sequence[Sequence[int]],
    *,
    sequences: int,
    tokens: int,
    max_tokens: int,
    normalize: str | None = None,
    rollouts: Sequence[Sequence[int]] | None = None,
) -> list[list[float]]:
    """Return, for one pass over a training step, the weight of each sequence's tokens.

    `minibatches` has the trained length of each computed sequence, by optimizer step (of all processes).
    `sequences` and `tokens` count the step's whole batch, zero advantages included (`samples.batch_size`).
    With M mini-batches, the tokens of a sequence of length L weigh

        sequences         M / (sequences * L)            each sequence alike
        max_tokens        M / (sequences * max_tokens)   each token alike, by a number that no answer changes
        tokens            M / tokens                     each token alike, in whichever mini-batch it lands
        minibatch_tokens  1 / tokens of its mini-batch   each token alike within its mini-batch

    so that the sum over a mini-batch is a mean. `normalize` None: what `MEAN_OVER` has for the loss,
    `tokens` for a loss of the user. For minibatch_tokens each mini-batch is taken to hold its share of the
    tokens that are not computed, so with one mini-batch it is `tokens`.

    A rollout with branches has several sequences. It counts once in `sequences`, and L is its length as a
    whole: `rollouts` has it for each sequence.
    """
    lengths = [length for minibatch in minibatches for length in minibatch]
    assert min(lengths, default=1) > 0, "a sequence without trained tokens has no weight"
    wholes = minibatches if rollouts is None else rollouts
    assert rollouts is not None or len(lengths) <= sequences, (
        "the batch holds fewer sequences than are computed of it"
    )
    assert sum(lengths) <= tokens, "the batch holds fewer tokens than are computed of it"
    count = len(minibatches)
    match normalize or MEAN_OVER.get(kind, "tokens"):
        case "sequences":
            return [[count / (sequences * length) for length in minibatch] for minibatch in wholes]
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
