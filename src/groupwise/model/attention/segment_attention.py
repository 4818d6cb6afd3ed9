"""Attention over consecutive segments of a row, as partial results that merge by log-sum-exp.

`VarlenAttention` uses the flash-attention kernel on a GPU. `PaddedAttention` works on any device: it pads
blocks of segments of similar length, so padding stays small. The functions at the end compute one block.

Axes: T query tokens, S key tokens, N cells of a padded grid, B segments of a block, L longest of them, H
query heads, K key heads, D head size, Q queries of a block.
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
    """Padded blocks [B, L] of segments of similar length."""

    shapes: tuple[tuple[int, int], ...]
    token_N: Tensor
    """Token index of each cell, block after block; token 0 in padding cells."""
    empty_N: Tensor
    cell_T: Tensor
    """Cell of each token, in row order."""

    @classmethod
    def build(cls, lengths: Integers, blocks: Sequence[Integers], *, device: torch.device) -> SegmentGrid:
        """Build the grid of consecutive segments; `blocks` lists the segments of each block."""
        starts = np.cumsum(lengths) - lengths
        shapes, tokens, filled = [], [], []
        for block in blocks:
            offset_L = np.arange(max(1, lengths[block].max()))
            filled_BL = offset_L < lengths[block, None]
            tokens.append(np.where(filled_BL, starts[block, None] + offset_L, 0).ravel())
            filled.append(filled_BL.ravel())
            shapes.append(filled_BL.shape)
        token_N, filled_N = np.concatenate(tokens), np.concatenate(filled)
        cell_T = np.flatnonzero(filled_N)
        cell_T = cell_T[np.argsort(token_N[cell_T])]
        return cls(
            shapes=tuple(shapes),
            token_N=to_device(token_N, device),
            empty_N=to_device(~filled_N, device),
            cell_T=to_device(cell_T, device),
        )

    def scatter(self, x_THD: Tensor) -> list[Tensor]:
        """Scatter a row into blocks: a tensor [B, H, L, …] for each."""
        return self._blocks(x_THD.index_select(0, self.token_N))

    def scatter_lse(self, lse_TH: Tensor) -> list[Tensor]:
        """Scatter a log-sum-exp into blocks; +inf in padding cells makes their gradients 0."""
        return self._blocks(
            lse_TH.index_select(0, self.token_N).masked_fill_(self.empty_N[:, None], torch.inf)
        )

    def masks(self, dtype: torch.dtype) -> list[Tensor]:
        """Return additive key masks [B, 1, 1, L]: 0 for tokens, -inf for padding."""
        mask_N1 = torch.zeros(len(self.empty_N), 1, dtype=dtype, device=self.empty_N.device)
        return [
            block[:, :, None]
            for block in self._blocks(mask_N1.masked_fill_(self.empty_N[:, None], -torch.inf))
        ]

    def gather(self, blocks: Sequence[Tensor]) -> Tensor:
        """Gather blocks back into a row [T, H, …]."""
        return torch.cat([x.transpose(1, 2).flatten(0, 1) for x in blocks]).index_select(0, self.cell_T)

    def _blocks(self, x_NH: Tensor) -> list[Tensor]:
        parts = torch.split(x_NH, [segments * longest for segments, longest in self.shapes])
        return [
            x.view(*shape, *x.shape[1:]).transpose(1, 2) for x, shape in zip(parts, self.shapes, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedAttention:
    """Attention of each query segment to the key segment with the same index, in padded blocks."""

    queries: SegmentGrid
    keys: SegmentGrid
    causal: bool
    """Causal attention; without a window, queries and keys are the same segments."""
    window: int | None
    """Sliding window of causal attention; a segment's last query is at its last key."""
    ends: tuple[tuple[Tensor, Tensor], ...]
    """With a window, the query and key lengths [B, 1] of each block's segments."""

    @classmethod
    def build(
        cls,
        queries: Integers,
        keys: Integers,
        *,
        causal: bool,
        device: torch.device,
        window: int | None = None,
    ) -> PaddedAttention:
        """Build the attention of consecutive segments with these lengths."""
        blocks = similar_sizes(np.stack([queries, keys], axis=1))
        grid = SegmentGrid.build(queries, blocks, device=device)
        ends = ((queries[block, None], keys[block, None]) for block in blocks if window is not None)
        return cls(
            queries=grid,
            keys=grid if causal and window is None else SegmentGrid.build(keys, blocks, device=device),
            causal=causal,
            window=window,
            ends=tuple((to_device(q, device), to_device(k, device)) for q, k in ends),
        )

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, *, scale: float, cap: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (output_THD, lse_TH)."""
        operands = zip(
            self.queries.scatter(q_THD),
            self.keys.scatter(k_SKD),
            self.keys.scatter(v_SKD),
            self._masks(q_THD.dtype),
            strict=True,
        )
        causal = self.causal and self.window is None
        parts = [attend(q, k, v, causal=causal, mask=m, scale=scale, cap=cap) for q, k, v, m in operands]
        outputs, lses = zip(*parts, strict=True)
        return self.queries.gather(outputs), self.queries.gather(lses)

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
        cap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq_THD, dk_SKD, dv_SKD), given the merged output and lse over these and other keys."""
        grad, q, output = map(self.queries.scatter, (grad_THD, q_THD, output_THD))
        k, v, lse = self.keys.scatter(k_SKD), self.keys.scatter(v_SKD), self.queries.scatter_lse(lse_TH)
        blocks = zip(grad, q, k, v, output, lse, strict=True)
        parts = [
            attend_backward(
                *block, causal=self.causal and self.window is None, mask=mask, scale=scale, cap=cap
            )
            for block, mask in zip(blocks, self._masks(q_THD.dtype), strict=True)
        ]
        dq, dk, dv = zip(*parts, strict=True)
        return self.queries.gather(dq), self.keys.gather(dk), self.keys.gather(dv)

    def _masks(self, dtype: torch.dtype) -> Sequence[Tensor | None]:
        """Return the masks; causal attention without a window needs none because padding is at the end."""
        if self.window is not None:
            return [self._window_mask(block, self.window, dtype) for block in range(len(self.ends))]
        return [None] * len(self.keys.shapes) if self.causal else self.keys.masks(dtype)

    def _window_mask(self, block: int, window: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [B, 1, Q, S] of a block with a sliding window."""
        (_, longest_q), (_, longest_k) = self.queries.shapes[block], self.keys.shapes[block]
        queries_B1, keys_B1 = self.ends[block]
        device = queries_B1.device
        # Padding queries are at the last key: a row without keys would give NaN.
        at_BQ = torch.minimum(torch.arange(longest_q, device=device) + keys_B1 - queries_B1, keys_B1 - 1)
        distance_BQS = at_BQ[:, :, None] - torch.arange(longest_k, device=device)
        hidden_BQS = (distance_BQS < 0) | (distance_BQS >= window)
        mask_BQS = torch.zeros(hidden_BQS.shape, dtype=dtype, device=device)
        return mask_BQS.masked_fill_(hidden_BQS, -torch.inf)[:, None]


def similar_sizes(sizes_SX: Integers) -> list[Integers]:
    """Group segments, each given by one or more sizes, into groups of similar sizes.

    Sizes above 16 differ by a factor of at most √2 within a group.
    """
    classes_SX = np.ceil(2 * np.log2(np.maximum(sizes_SX, 16)))
    _, number_S = np.unique(classes_SX, axis=0, return_inverse=True)
    return [np.flatnonzero(number_S == number) for number in range(number_S.max() + 1)]


LARGEST_HEAD = 256


def supports_flash(q_THD: Tensor) -> bool:
    """Whether the flash-attention kernel supports these queries."""
    half, size = q_THD.dtype in (torch.float16, torch.bfloat16), q_THD.shape[-1]
    return q_THD.device.type == "cuda" and half and size <= LARGEST_HEAD and size % 8 == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenAttention:
    """Attention of each query segment to the key segment with the same index, by the varlen flash kernel."""

    starts_q: Tensor
    """Cumulative lengths of the query segments, starting with 0."""
    starts_k: Tensor
    longest_q: int
    longest_k: int
    causal: bool
    window: int | None
    """Sliding window of causal attention; a segment's last query is at its last key."""

    @classmethod
    def build(
        cls,
        queries: Integers,
        keys: Integers,
        *,
        causal: bool,
        device: torch.device,
        window: int | None = None,
    ) -> VarlenAttention:
        """Build the attention of consecutive segments with these lengths."""

        def starts(lengths: Integers) -> Tensor:
            bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            return to_device(bounds, device)

        starts_q = starts(queries)
        return cls(
            starts_q=starts_q,
            starts_k=starts_q if causal and window is None else starts(keys),
            longest_q=int(queries.max()),
            longest_k=int(keys.max()),
            causal=causal,
            window=window,
        )

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, *, scale: float, cap: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (output_THD, lse_TH)."""
        assert cap is None, "the flash-attention kernel has no soft cap"
        output_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            q_THD, k_SKD, v_SKD, *self._segments, 0.0, self.causal, False, scale=scale, **self._window
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
        cap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq_THD, dk_SKD, dv_SKD), given the merged output and lse over these and other keys."""
        assert cap is None, "the flash-attention kernel has no soft cap"
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
            **self._window,
        )
        return dq_THD, dk_SKD, dv_SKD

    @property
    def _window(self) -> dict[str, int]:
        return {} if self.window is None else {"window_size_left": self.window - 1, "window_size_right": 0}

    @property
    def _segments(self) -> tuple[Tensor, Tensor, int, int]:
        return self.starts_q, self.starts_k, self.longest_q, self.longest_k


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(
    q_BHQD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (output_BHQD, lse_BHQ); `mask` is added to the scores, `causal` requires Q == S."""
    if q_BHQD.device.type != "cpu" or cap is not None:
        return plain_attend(q_BHQD, k_BKSD, v_BKSD, causal=causal, mask=mask, scale=scale, cap=cap)
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
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    `output` and `lse` may be those of merged attention over more keys than these. The weights
    exp(score - lse) are then this part's share of the whole, and the gradients of the parts add up.
    A query whose lse is +inf has weight 0 everywhere.
    """
    tensors = (grad_BHQD, q_BHQD, k_BKSD, v_BKSD, output_BHQD, lse_BHQ)
    if q_BHQD.device.type != "cpu" or cap is not None:
        return plain_attend_backward(*tensors, causal=causal, mask=mask, scale=scale, cap=cap)
    dq_BHQD, dk_BKSD, dv_BKSD = _flash_backward(*tensors, 0.0, causal, attn_mask=mask, scale=scale)
    return dq_BHQD, dk_BKSD, dv_BKSD


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys into attention over their union."""
    (output_a, lse_a), (output_b, lse_b) = one, other
    share_b = torch.sigmoid(lse_b - lse_a).to(output_b.dtype)
    return torch.lerp(output_a, output_b, share_b[..., None]), torch.logaddexp(lse_a, lse_b)


def plain_attend(
    q_BHQD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend` on any device, with an optional soft cap on scores."""
    scores_BHQS, _ = _scores(q_BHQD, k_BKSD, causal=causal, mask=mask, scale=scale, cap=cap)
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
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` on any device."""
    scores_BHQS, slope_BHQS = _scores(q_BHQD, k_BKSD, causal=causal, mask=mask, scale=scale, cap=cap)
    weights_BHQS = (scores_BHQS - lse_BHQ[..., None]).exp()
    delta_BHQ = (grad_BHQD * output_BHQD).sum(-1, dtype=weights_BHQS.dtype)
    dweights_BHQS = _wide(grad_BHQD @ _per_query_head(v_BKSD, q_BHQD).transpose(-1, -2))
    dscores_BHQS = weights_BHQS * (dweights_BHQS - delta_BHQ[..., None]) * scale
    if slope_BHQS is not None:
        dscores_BHQS *= slope_BHQS
    dscores_BHQS = dscores_BHQS.to(q_BHQD.dtype)
    dq_BHQD = dscores_BHQS @ _per_query_head(k_BKSD, q_BHQD)
    dk_BHSD = dscores_BHQS.transpose(-1, -2) @ q_BHQD
    dv_BHSD = weights_BHQS.to(grad_BHQD.dtype).transpose(-1, -2) @ grad_BHQD
    return dq_BHQD, _per_key_head(dk_BHSD, k_BKSD), _per_key_head(dv_BHSD, k_BKSD)


def _scores(
    q_BHQD: Tensor, k_BKSD: Tensor, *, causal: bool, mask: Tensor | None, scale: float, cap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return the masked scores and, with a cap, its derivative."""
    scores_BHQS = _wide(q_BHQD @ _per_query_head(k_BKSD, q_BHQD).transpose(-1, -2)) * scale
    slope_BHQS = None
    if cap is not None:
        tanh_BHQS = torch.tanh(scores_BHQS / cap)
        scores_BHQS, slope_BHQS = cap * tanh_BHQS, 1 - tanh_BHQS.square()
    if causal:
        later_QS = torch.ones(scores_BHQS.shape[-2:], dtype=torch.bool, device=scores_BHQS.device).triu(1)
        scores_BHQS = scores_BHQS.masked_fill(later_QS, float("-inf"))
    return scores_BHQS if mask is None else scores_BHQS + mask, slope_BHQS


def _wide(x: Tensor) -> Tensor:
    """Return half precision as float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _per_query_head(x_BKSD: Tensor, q_BHQD: Tensor) -> Tensor:
    return x_BKSD.repeat_interleave(q_BHQD.shape[1] // x_BKSD.shape[1], 1)


def _per_key_head(grad_BHSD: Tensor, k_BKSD: Tensor) -> Tensor:
    batch, key_heads, keys, size = k_BKSD.shape
    return grad_BHSD.reshape(batch, key_heads, -1, keys, size).sum(2)
