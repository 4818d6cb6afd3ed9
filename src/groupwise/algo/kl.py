"""The KL divergence from the reference policy, estimated on the tokens that were drawn.

With d = log-prob - reference log-prob (Schulman, "Approximating KL divergence", 2020):

    k1 = d                  unbiased, often negative, high variance
    k2 = d^2 / 2            always positive, small bias
    k3 = exp(-d) - 1 + d    unbiased, always positive, low variance

A good estimate of a value need not have a good gradient (arXiv 2506.09477, 2510.01555). As a plain loss on
tokens from the current policy, the mean gradient of k1 is 0, that of k2 is the gradient of
KL(policy || reference), that of k3 the gradient of KL(reference || policy). `kl_penalty` mends k1 and k3
with the importance ratio.
"""

# Axes: T trained tokens of one micro-batch laid flat.

from __future__ import annotations

from collections.abc import Callable

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

    The tokens came from the old policy; r = exp(log-prob - old) makes up for that. An unbiased value
    times r is an unbiased value under the distribution that was drawn from, which does not move, so its
    gradient is unbiased too: r (d + 1) for k1 and r d for k3, per unit of log-prob. k2's gradient d is
    right as it is and needs r only as a weight. So k2 and k3 pull alike and differ in the value they show;
    k1 adds noise of mean 0.
    """
    ratio_T = (logprobs_T - old_T).exp()
    if kind == "k2":
        ratio_T = ratio_T.detach()
    return ratio_T * KL_ESTIMATORS[kind](logprobs_T - reference_T)
