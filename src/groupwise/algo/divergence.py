"""How two policies differ on the sampled tokens: KL estimates and importance weights.

With d = log-prob - reference log-prob (Schulman, "Approximating KL divergence", 2020):

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
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def k1(difference_T: Tensor) -> Tensor:
    return difference_T


def k2(difference_T: Tensor) -> Tensor:
    return difference_T.square() / 2


def k3(difference_T: Tensor) -> Tensor:
    return (-difference_T).expm1() + difference_T


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_penalty(logprobs_T: Tensor, reference_T: Tensor, old_T: Tensor, *, kind: str) -> Tensor:
    """Return token penalties whose expected gradient is that of KL(policy || reference), off-policy too.

    The tokens were sampled from the old policy; r = exp(log-prob - old) corrects for that. An unbiased value
    times r is an unbiased value under the sampling distribution, which is fixed, so its
    gradient is unbiased too: r (d + 1) for k1 and r d for k3, per unit of log-prob. k2's gradient d is
    right as it is and needs r only as a weight. So k2 and k3 pull alike and differ in the value they show;
    k1 adds noise of mean 0.
    """
    ratio_T = (logprobs_T - old_T).exp()
    if kind == "k2":
        ratio_T = ratio_T.detach()
    return ratio_T * KL_ESTIMATORS[kind](logprobs_T - reference_T)


def importance_weights(
    old_T: Tensor, sampled_T: Tensor, sequence_T: Tensor, *, kind: str, cap: float
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
        return torch.ones_like(old_T), {}
    scope, action = kind.split("_")
    log_weight_T = (old_T - sampled_T).detach()
    if scope == "sequence":
        log_weight_T = sum_by_sequence(log_weight_T, sequence_T)
    weight_T = log_weight_T.exp()
    if action == "truncate":
        cut_T = weight_T > cap
        bounded_T = weight_T.clamp(max=cap)
    else:
        cut_T = (weight_T > cap) | (weight_T < 1 / cap)
        # masked_fill, not a product with the mask: a weight that overflowed would give inf * 0 = nan.
        bounded_T = weight_T.masked_fill(cut_T, 0.0)
    return bounded_T, {
        "policy/correction": bounded_T.sum(),
        "policy/correction_cut": cut_T.sum(),
        "policy/correction_min": weight_T.min(),
    }


def sum_by_sequence(values_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Return, for each token, the sum over the tokens of its sequence."""
    # There are at most T sequences, so T slots do without reading their number back from the device.
    return torch.zeros_like(values_T).index_add(0, sequence_T, values_T)[sequence_T]
