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
    if q_BHQD.device.type != "cpu":
        return plain_attend(q_BHQD, k_BKSD, v_BKSD, causal=causal, mask=mask, scale=scale)
    output_BHQD, lse_BHQ = _flash(q_BHQD, k_BKSD, v_BKSD, 0.0, causal, attn_mask=mask, scale=scale)
    return output_BHQD, lse_BHQ


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
    A query whose lse is +inf has weight 0 everywhere: it takes no part.
    """
    tensors = (grad_BHQD, q_BHQD, k_BKSD, v_BKSD, output_BHQD, lse_BHQ)
    if q_BHQD.device.type != "cpu":
        return plain_attend_backward(*tensors, causal=causal, mask=mask, scale=scale)
    dq_BHQD, dk_BKSD, dv_BKSD = _flash_backward(*tensors, 0.0, causal, attn_mask=mask, scale=scale)
    return dq_BHQD, dk_BKSD, dv_BKSD


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of keys into attention over their union."""
    (output_a, lse_a), (output_b, lse_b) = one, other
    share_b = torch.sigmoid(lse_b - lse_a).to(output_b.dtype)
    return torch.lerp(output_a, output_b, share_b[..., None]), torch.logaddexp(lse_a, lse_b)


def plain_attend(
    q_BHQD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`attend` for any device."""
    scores_BHQS = _scores(q_BHQD, k_BKSD, causal=causal, mask=mask, scale=scale)
    lse_BHQ = torch.logsumexp(scores_BHQS, -1)
    weights_BHQS = (scores_BHQS - lse_BHQ[..., None]).exp().to(v_BKSD.dtype)
    return weights_BHQS @ _per_query_head(v_BKSD, q_BHQD), lse_BHQ


def plain_attend_backward(
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
    """`attend_backward` for any device."""
    scores_BHQS = _scores(q_BHQD, k_BKSD, causal=causal, mask=mask, scale=scale)
    weights_BHQS = (scores_BHQS - lse_BHQ[..., None]).exp()
    delta_BHQ = (grad_BHQD * output_BHQD).sum(-1, dtype=torch.float32)
    toward_BHQS = (grad_BHQD @ _per_query_head(v_BKSD, q_BHQD).transpose(-1, -2)).float()
    dscores_BHQS = (weights_BHQS * (toward_BHQS - delta_BHQ[..., None]) * scale).to(q_BHQD.dtype)
    dq_BHQD = dscores_BHQS @ _per_query_head(k_BKSD, q_BHQD)
    dk_BHSD = dscores_BHQS.transpose(-1, -2) @ q_BHQD
    dv_BHSD = weights_BHQS.to(grad_BHQD.dtype).transpose(-1, -2) @ grad_BHQD
    return dq_BHQD, _per_key_head(dk_BHSD, k_BKSD), _per_key_head(dv_BHSD, k_BKSD)


def _scores(q_BHQD: Tensor, k_BKSD: Tensor, *, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    scores_BHQS = (q_BHQD @ _per_query_head(k_BKSD, q_BHQD).transpose(-1, -2)).float() * scale
    if causal:
        later_QS = torch.ones(scores_BHQS.shape[-2:], dtype=torch.bool, device=scores_BHQS.device).triu(1)
        scores_BHQS = scores_BHQS.masked_fill(later_QS, float("-inf"))
    return scores_BHQS if mask is None else scores_BHQS + mask


def _per_query_head(x_BKSD: Tensor, q_BHQD: Tensor) -> Tensor:
    return x_BKSD.repeat_interleave(q_BHQD.shape[1] // x_BKSD.shape[1], 1)


def _per_key_head(grad_BHSD: Tensor, k_BKSD: Tensor) -> Tensor:
    batch, key_heads, keys, size = k_BKSD.shape
    return grad_BHSD.reshape(batch, key_heads, -1, keys, size).sum(2)
