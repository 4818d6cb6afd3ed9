"""The output layer's logits, in float32 whatever the weights are in.

A bfloat16 between 16 and 32, where the logits of likely tokens are, is 1/8 from the next: rounded to that,
the log-probabilities that two kernels give one token differ by some 0.05 nats. A GPU adds products up in
float32 anyway and only has to write them down as they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import linear

from groupwise.records import Sampling


def float_logits(hidden_NM: Tensor, weight_VM: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return logits_NV; axes: N tokens, M hidden size, V vocabulary."""
    if weight_VM.dtype == torch.float32 or weight_VM.device.type != "cuda":
        return linear(hidden_NM, weight_VM, bias_V).float()
    logits_NV = torch.mm(hidden_NM, weight_VM.T, out_dtype=torch.float32)
    return logits_NV if bias_V is None else logits_NV.add_(bias_V)


def chunks(tokens_N: Tensor, weight_VM: Tensor, logits: int) -> list[slice]:
    """Parts of the tokens with at most so many logits each."""
    size = max(1, logits // weight_VM.shape[0])
    return [slice(start, start + size) for start in range(0, len(tokens_N), size)]


def scaled_logits(logits_NV: Tensor, sampling: Sampling, *, keep_N: Tensor | None = None) -> Tensor:
    """Return float32 logits whose softmax is the sampling distribution; tokens never drawn have -inf.

    Order: temperature, then top-k, top-p and min-p, each on what the one before left; equals of the
    k-th token all stay. A greedy choice is measured by the distribution at temperature 1, untruncated.
    `keep_N` names a token of each row that stays possible: when training, the token that was drawn,
    which rounding or an update since may have put just outside.
    """
    logits_NV = logits_NV.float()
    if sampling.greedy:
        return logits_NV
    if sampling.temperature != 1.0:
        logits_NV = logits_NV / sampling.temperature
    if not sampling.truncates:
        return logits_NV
    allowed_NV = torch.ones_like(logits_NV, dtype=torch.bool)
    if 0 < sampling.top_k < logits_NV.shape[-1]:
        threshold_N1 = logits_NV.topk(sampling.top_k, dim=-1).values[:, -1:]
        allowed_NV &= logits_NV >= threshold_N1
    if sampling.top_p < 1.0:
        kept = logits_NV.masked_fill(~allowed_NV, float("-inf"))
        sorted_NV, order_NV = kept.softmax(-1).sort(dim=-1, descending=True, stable=True)
        # A token stays while the mass before it is short of top_p, so the likeliest always does.
        short_NV = sorted_NV.cumsum(-1) - sorted_NV < sampling.top_p
        allowed_NV &= torch.zeros_like(short_NV).scatter(1, order_NV, short_NV)
    if sampling.min_p > 0.0:
        # The ratio to the likeliest is a difference of logits, whatever else was left out.
        allowed_NV &= logits_NV >= logits_NV.amax(-1, keepdim=True) + math.log(sampling.min_p)
    if keep_N is not None:
        allowed_NV.scatter_(1, keep_N[:, None], True)
    return logits_NV.masked_fill(~allowed_NV, float("-inf"))


def entropy(logprobs_NV: Tensor) -> Tensor:
    """Return the entropy_N in nats, counting impossible tokens as 0."""
    return -(logprobs_NV.exp() * logprobs_NV.nan_to_num(neginf=0.0)).sum(-1)
