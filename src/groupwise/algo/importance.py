"""Importance weights for the gap between the sampler and the trainer.

The tokens were drawn from the sampler's distribution; the loss assumes the trainer's. Kernels,
precision or a quantised sampler make the two differ a little. Weighing each token by
trainer / sampler takes the difference out, and a cap keeps a rare huge weight from ruling the update.
"""

# Axes: T trained tokens of one micro-batch laid flat.

from __future__ import annotations

import torch
from torch import Tensor


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
    exponent would be the ratio of nothing that was drawn.
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
