"""Softmax attention that also returns its normaliser, forward and backward.

With the log-sum-exp beside the output, attention over two sets of keys can be computed one set at
a time and merged exactly; that is what lets a group share its prompt. CPUs use torch's flash kernel,
other devices plain matrix products.

Axes: B batch, H query heads, K key heads (H is a multiple of K), Q queries, S keys, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(
    q_BHQD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (output_BHQD, lse_BHQ); `mask` is added to the scores, `causal` needs Q == S."""
    if q_BHQD.device.type == "cpu":
        output, lse = _flash(q_BHQD, k_BKSD, v_BKSD, 0.0, causal, attn_mask=mask, scale=scale)
        return output, lse
    scores_BHQS = _scores(q_BHQD, k_BKSD, causal=causal, mask=mask, scale=scale)
    lse_BHQ = torch.logsumexp(scores_BHQS, -1)
    weights_BHQS = (scores_BHQS - lse_BHQ[..., None]).exp().to(v_BKSD.dtype)
    return weights_BHQS @ _per_query_head(v_BKSD, q_BHQD), lse_BHQ


def attend_backward(
    grad_BHQD: Tensor,
    q_BHQD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    output_BHQD: Tensor,
    lse_BHQ: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    `output` and `lse` may be those of the merged attention over more keys than these: the weights
    exp(score - lse) are then this part's share of the whole, and the gradients of the parts add up.
    """
    if q_BHQD.device.type == "cpu":
        dq, dk, dv = _flash_backward(
            grad_BHQD, q_BHQD, k_BKSD, v_BKSD, output_BHQD, lse_BHQ, 0.0, causal, attn_mask=mask, scale=scale
        )
        return dq, dk, dv
    scores_BHQS = _scores(q_BHQD, k_BKSD, causal=causal, mask=mask, scale=scale)
    weights_BHQS = (scores_BHQS - lse_BHQ[..., None]).exp()
    delta_BHQ = (grad_BHQD * output_BHQD).sum(-1, dtype=torch.float32)
    toward_BHQS = (grad_BHQD @ _per_query_head(v_BKSD, q_BHQD).transpose(-1, -2)).float()
    dscores_BHQS = (weights_BHQS * (toward_BHQS - delta_BHQ[..., None]) * scale).to(q_BHQD.dtype)
    dq_BHQD = dscores_BHQS @ _per_query_head(k_BKSD, q_BHQD)
    dk_BHSD = dscores_BHQS.transpose(-1, -2) @ q_BHQD
    dv_BHSD = weights_BHQS.to(grad_BHQD.dtype).transpose(-1, -2) @ grad_BHQD
    return dq_BHQD, _per_key_head(dk_BHSD, k_BKSD), _per_key_head(dv_BHSD, k_BKSD)


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of keys into attention over their union."""
    (output_a, lse_a), (output_b, lse_b) = one, other
    lse = torch.logaddexp(lse_a, lse_b)
    share_a = (lse_a - lse).exp()[..., None].to(output_a.dtype)
    share_b = (lse_b - lse).exp()[..., None].to(output_b.dtype)
    return output_a * share_a + output_b * share_b, lse


def _scores(q_BHQD: Tensor, k_BKSD: Tensor, *, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    scores = (q_BHQD @ _per_query_head(k_BKSD, q_BHQD).transpose(-1, -2)).float() * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores if mask is None else scores + mask


def _per_query_head(x_BKSD: Tensor, q_BHQD: Tensor) -> Tensor:
    return x_BKSD.repeat_interleave(q_BHQD.shape[1] // x_BKSD.shape[1], 1)


def _per_key_head(grad_BHSD: Tensor, k_BKSD: Tensor) -> Tensor:
    return grad_BHSD.unflatten(1, (k_BKSD.shape[1], -1)).sum(2)
