"""Attention over segments of a row, laid side by side with little padding: for any device.

Segments of like length go together, so that padding stays small however lengths vary.

Axes: T query tokens, S key tokens, N places on a grid, B segments of a block, L longest of them, H query
heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.model.device import to_device

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentGrid:
    """Segments of a row side by side, in blocks [B, L] of segments of like length."""

    shapes: tuple[tuple[int, int], ...]
    token_N: Tensor
    """The token at each place, block after block; some other token at an empty one."""
    empty_N: Tensor
    place_T: Tensor
    """Where each token of the segments sits, in the order of the row."""

    @classmethod
    def build(cls, lengths: Integers, blocks: Sequence[Integers], *, device: torch.device) -> SegmentGrid:
        """Lay out segments that follow one another; `blocks` says which go together."""
        starts = np.cumsum(lengths) - lengths
        shapes, tokens, filled = [], [], []
        for block in blocks:
            offset_L = np.arange(max(1, lengths[block].max()))
            filled_BL = offset_L < lengths[block, None]
            tokens.append(np.where(filled_BL, starts[block, None] + offset_L, 0).ravel())
            filled.append(filled_BL.ravel())
            shapes.append(filled_BL.shape)
        token_N, filled_N = np.concatenate(tokens), np.concatenate(filled)
        place_T = np.flatnonzero(filled_N)
        place_T = place_T[np.argsort(token_N[place_T])]
        return cls(
            shapes=tuple(shapes),
            token_N=to_device(token_N, device),
            empty_N=to_device(~filled_N, device),
            place_T=to_device(place_T, device),
        )

    def lay(self, x_THD: Tensor) -> list[Tensor]:
        """From the row to the blocks: a tensor [B, H, L, …] for each."""
        return self._blocks(x_THD.index_select(0, self.token_N))

    def lay_normaliser(self, lse_TH: Tensor) -> list[Tensor]:
        """The same for a log-sum-exp; +inf at empty places keeps them out of every gradient."""
        return self._blocks(
            lse_TH.index_select(0, self.token_N).masked_fill_(self.empty_N[:, None], torch.inf)
        )

    def masks(self, dtype: torch.dtype) -> list[Tensor]:
        """What to add to the scores of these places as keys: 0, and -inf at empty ones; [B, 1, 1, L]."""
        mask_N1 = torch.zeros(len(self.empty_N), 1, dtype=dtype, device=self.empty_N.device)
        return [
            block[:, :, None]
            for block in self._blocks(mask_N1.masked_fill_(self.empty_N[:, None], -torch.inf))
        ]

    def back(self, blocks: Sequence[Tensor]) -> Tensor:
        """From the blocks to the row: [T, H, …]."""
        return torch.cat([x.transpose(1, 2).flatten(0, 1) for x in blocks]).index_select(0, self.place_T)

    def _blocks(self, x_NH: Tensor) -> list[Tensor]:
        parts = torch.split(x_NH, [segments * longest for segments, longest in self.shapes])
        return [
            x.view(*shape, *x.shape[1:]).transpose(1, 2) for x, shape in zip(parts, self.shapes, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedAttention:
    """Each segment of queries attends to the segment of keys of its number."""

    queries: SegmentGrid
    keys: SegmentGrid
    causal: bool
    """Queries and keys are the same segments, and none looks ahead."""

    @classmethod
    def build(
        cls, queries: Integers, keys: Integers, *, causal: bool, device: torch.device
    ) -> PaddedAttention:
        """For segments of these lengths that follow one another."""
        blocks = alike(np.stack([queries, keys], axis=1))
        grid = SegmentGrid.build(queries, blocks, device=device)
        return cls(
            queries=grid,
            keys=grid if causal else SegmentGrid.build(keys, blocks, device=device),
            causal=causal,
        )

    def attend(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """Return (output_THD, lse_TH)."""
        operands = zip(
            self.queries.lay(q_THD),
            self.keys.lay(k_SKD),
            self.keys.lay(v_SKD),
            self._masks(q_THD.dtype),
            strict=True,
        )
        parts = [attend(q, k, v, causal=self.causal, mask=m, scale=scale) for q, k, v, m in operands]
        outputs, lses = zip(*parts, strict=True)
        return self.queries.back(outputs), self.queries.back(lses)

    def backward(
        self,
        grad_THD: Tensor,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        output_THD: Tensor,
        lse_TH: Tensor,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq_THD, dk_SKD, dv_SKD), given the output and lse over these keys and any others."""
        grad, q, output = map(self.queries.lay, (grad_THD, q_THD, output_THD))
        k, v, lse = self.keys.lay(k_SKD), self.keys.lay(v_SKD), self.queries.lay_normaliser(lse_TH)
        blocks = zip(grad, q, k, v, output, lse, strict=True)
        parts = [
            attend_backward(*block, causal=self.causal, mask=mask, scale=scale)
            for block, mask in zip(blocks, self._masks(q_THD.dtype), strict=True)
        ]
        dq, dk, dv = zip(*parts, strict=True)
        return self.queries.back(dq), self.keys.back(dk), self.keys.back(dv)

    def _masks(self, dtype: torch.dtype) -> Sequence[Tensor | None]:
        """None is needed where nothing looks ahead: empty places are at the end."""
        return [None] * len(self.keys.shapes) if self.causal else self.keys.masks(dtype)


def alike(sizes_SX: Integers) -> list[Integers]:
    """Group segments, each given by one or more sizes, so that in a group no size is much over another.

    Sizes in one group differ by a factor of at most √2, those up to 16 not minded.
    """
    classes_SX = np.ceil(2 * np.log2(np.maximum(sizes_SX, 16)))
    _, number_S = np.unique(classes_SX, axis=0, return_inverse=True)
    return [np.flatnonzero(number_S == number) for number in range(number_S.max() + 1)]


LARGEST_HEAD = 256


def fits(q_THD: Tensor) -> bool:
    """Whether the kernel takes queries of this kind."""
    half, size = q_THD.dtype in (torch.float16, torch.bfloat16), q_THD.shape[-1]
    return q_THD.device.type == "cuda" and half and size <= LARGEST_HEAD and size % 8 == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenAttention:
    """Each segment of queries attends to the segment of keys of its number."""

    starts_q: Tensor
    """Where each segment of queries begins, and the end of the last."""
    starts_k: Tensor
    longest_q: int
    longest_k: int
    causal: bool

    @classmethod
    def build(
        cls, queries: Integers, keys: Integers, *, causal: bool, device: torch.device
    ) -> VarlenAttention:
        """For segments of these lengths that follow one another."""

        def starts(lengths: Integers) -> Tensor:
            bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            return to_device(bounds, device)

        starts_q = starts(queries)
        return cls(
            starts_q=starts_q,
            starts_k=starts_q if causal else starts(keys),
            longest_q=int(queries.max()),
            longest_k=int(keys.max()),
            causal=causal,
        )

    def attend(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """Return (output_THD, lse_TH)."""
        output_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            q_THD, k_SKD, v_SKD, *self._segments, 0.0, self.causal, False, scale=scale
        )
        return output_THD, lse_HT.T

    def backward(
        self,
        grad_THD: Tensor,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        output_THD: Tensor,
        lse_TH: Tensor,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq_THD, dk_SKD, dv_SKD), given the output and lse over these keys and any others."""
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q_THD.device)
        dq_THD, dk_SKD, dv_SKD = torch.ops.aten._flash_attention_backward(
            grad_THD,
            q_THD,
            k_SKD,
            v_SKD,
            output_THD,
            lse_TH.T.contiguous(),
            *self._segments,
            0.0,
            self.causal,
            no_dropout,
            no_dropout,
            scale=scale,
        )
        return dq_THD, dk_SKD, dv_SKD

    @property
    def _segments(self) -> tuple[Tensor, Tensor, int, int]:
        return self.starts_q, self.starts_k, self.longest_q, self.longest_k


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
