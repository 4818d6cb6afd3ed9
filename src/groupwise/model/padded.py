"""Attention over stretches of a row, laid side by side with little padding: for any device.

Stretches of like length go together, so that padding stays small however lengths vary.

Axes: T query tokens, S key tokens, N places on a grid, B stretches of a block, L longest of them, H query
heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.model.attend import attend, attend_backward
from groupwise.model.transfer import to_device

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Stretches of a row side by side, in blocks [B, L] of stretches of like length."""

    shapes: tuple[tuple[int, int], ...]
    token_N: Tensor
    """The token at each place, block after block; some other token at an empty one."""
    empty_N: Tensor
    place_T: Tensor
    """Where each token of the stretches sits, in the order of the row."""

    @classmethod
    def build(cls, lengths: Integers, blocks: Sequence[Integers], *, device: torch.device) -> Grid:
        """Lay out stretches that follow one another; `blocks` says which go together."""
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
        parts = torch.split(x_NH, [stretches * longest for stretches, longest in self.shapes])
        return [
            x.view(*shape, *x.shape[1:]).transpose(1, 2) for x, shape in zip(parts, self.shapes, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedAttention:
    """Each stretch of queries attends to the stretch of keys of its number."""

    queries: Grid
    keys: Grid
    causal: bool
    """Queries and keys are the same stretches, and none looks ahead."""

    @classmethod
    def build(
        cls, queries: Integers, keys: Integers, *, causal: bool, device: torch.device
    ) -> PaddedAttention:
        """For stretches of these lengths that follow one another."""
        blocks = alike(np.stack([queries, keys], axis=1))
        grid = Grid.build(queries, blocks, device=device)
        return cls(
            queries=grid, keys=grid if causal else Grid.build(keys, blocks, device=device), causal=causal
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
    """Group stretches, each given by one or more sizes, so that in a group no size is much over another.

    Sizes in one group differ by a factor of at most √2, those up to 16 not minded.
    """
    classes_SX = np.ceil(2 * np.log2(np.maximum(sizes_SX, 16)))
    _, number_S = np.unique(classes_SX, axis=0, return_inverse=True)
    return [np.flatnonzero(number_S == number) for number in range(number_S.max() + 1)]
