"""Attention for training: one row without padding, each group's prompt computed once.

A packed row holds the prompt of every group, then what follows it in each of its members:

    [prompt 0][prompt 1]…[member 0.0][member 0.1]…[member 1.0]…

A prompt's token sees the prompt so far. A member's token sees its group's prompt and the member so far:
two attentions, merged. Linear layers run on the row as it is; only attention lays stretches of it side
by side, those of like length together, so that padding stays small however lengths vary.

Axes: T tokens of the row, N places on a grid, B stretches of a block, L longest of them, H query heads,
K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.model.attend import attend, attend_backward, merge

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Stretches of the row side by side, in blocks [B, L] of stretches of like length."""

    shapes: tuple[tuple[int, int], ...]
    token_N: Tensor
    """The token at each place, block after block; some other token at an empty one."""
    empty_N: Tensor
    place_T: Tensor
    """Where each token of the stretches sits, in the order of the row."""

    @classmethod
    def build(
        cls, starts: Integers, lengths: Integers, blocks: Sequence[Integers], *, device: torch.device
    ) -> Grid:
        """Lay out stretches, given by their first token and length; `blocks` says which go together."""
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
            token_N=torch.from_numpy(token_N).to(device),
            empty_N=torch.from_numpy(~filled_N).to(device),
            place_T=torch.from_numpy(place_T).to(device),
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
class PackedLayout:
    """Which tokens of the row attend to which."""

    prompt_tokens: int
    """The row's first tokens, all prompts; the others are members'."""
    stretches: Grid
    """Every prompt and every member: each attends within itself, causally."""
    queries: Grid | None
    """The tokens of all members of a group together, and in the same place of …"""
    keys: Grid | None
    """… the prompt that they attend to. None when no member has a token of its own."""

    @classmethod
    def build(cls, groups: Sequence[tuple[int, Sequence[int]]], *, device: torch.device) -> PackedLayout:
        """Lay out groups given as (prompt length, member lengths), in the order of the row.

        Example: [(2, [1, 2])] is the row p0 p1 a0 b0 b1 ->
            stretches 0–1, 2, 3–4; queries 2–4 over keys 0–1
        """
        prompts = np.array([prompt for prompt, _ in groups])
        members = np.array([length for _, lengths in groups for length in lengths if length], dtype=np.int64)
        lengths = np.concatenate([prompts, members])
        starts = np.cumsum(lengths) - lengths
        stretches = Grid.build(starts, lengths, alike(lengths[:, None]), device=device)
        queries = keys = None
        if len(members):
            followers = np.array([sum(lengths) for _, lengths in groups])
            first_follower = prompts.sum() + np.cumsum(followers) - followers
            blocks = alike(np.stack([followers, prompts], axis=1))
            queries = Grid.build(first_follower, followers, blocks, device=device)
            keys = Grid.build(starts[: len(prompts)], prompts, blocks, device=device)
        return cls(prompt_tokens=int(prompts.sum()), stretches=stretches, queries=queries, keys=keys)

    def attend(self, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, *, layer: int, scale: float) -> Tensor:
        """Return the attention output_1THD; `layer` is not needed, nothing is cached."""
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (q_1HTD, k_1KTD, v_1KTD))
        output_THD: Tensor = _PackedAttention.apply(q_THD, k_TKD, v_TKD, self, scale)  # type: ignore[no-untyped-call]
        return output_THD[None]


def alike(sizes_SX: Integers) -> list[Integers]:
    """Group stretches, each given by one or more sizes, so that in a group no size is much over another.

    Sizes in one group differ by a factor of at most √2, those up to 16 not minded.
    """
    classes_SX = np.ceil(2 * np.log2(np.maximum(sizes_SX, 16)))
    _, number_S = np.unique(classes_SX, axis=0, return_inverse=True)
    return [np.flatnonzero(number_S == number) for number in range(number_S.max() + 1)]


class _PackedAttention(torch.autograd.Function):
    """Attend within every stretch, then from the members to their prompts, and merge the two."""

    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: PackedLayout, scale: float
    ) -> Tensor:
        blocks = zip(*map(layout.stretches.lay, (q_THD, k_TKD, v_TKD)), strict=True)
        within = [attend(q, k, v, causal=True, mask=None, scale=scale) for q, k, v in blocks]
        output_THD, lse_TH = _rows(layout.stretches, within)
        if layout.queries is not None and layout.keys is not None:
            operands = zip(
                layout.queries.lay(q_THD),
                layout.keys.lay(k_TKD),
                layout.keys.lay(v_TKD),
                layout.keys.masks(q_THD.dtype),
                strict=True,
            )
            across = [attend(q, k, v, causal=False, mask=m, scale=scale) for q, k, v, m in operands]
            members = slice(layout.prompt_tokens, None)
            output_THD[members], lse_TH[members] = merge(
                (output_THD[members], lse_TH[members]), _rows(layout.queries, across)
            )
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, output_THD, lse_TH)
        ctx.layout, ctx.scale = layout, scale
        return output_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TKD, v_TKD, output_THD, lse_TH = ctx.saved_tensors
        layout, scale, grad_THD = ctx.layout, ctx.scale, grads[0]
        grid = layout.stretches
        operands = zip(
            *map(grid.lay, (grad_THD, q_THD, k_TKD, v_TKD, output_THD)),
            grid.lay_normaliser(lse_TH),
            strict=True,
        )
        within = [attend_backward(*block, causal=True, mask=None, scale=scale) for block in operands]
        dq_THD, dk_TKD, dv_TKD = (grid.back(blocks) for blocks in zip(*within, strict=True))
        if layout.queries is not None:
            queries, keys = layout.queries, layout.keys
            grad, q, output = map(queries.lay, (grad_THD, q_THD, output_THD))
            operands = zip(
                grad, q, keys.lay(k_TKD), keys.lay(v_TKD), output, queries.lay_normaliser(lse_TH), strict=True
            )
            across = [
                attend_backward(*block, causal=False, mask=mask, scale=scale)
                for block, mask in zip(operands, keys.masks(q_THD.dtype), strict=True)
            ]
            dq, dk, dv = zip(*across, strict=True)
            dq_THD[layout.prompt_tokens :] += queries.back(dq)
            dk_TKD[: layout.prompt_tokens] += keys.back(dk)
            dv_TKD[: layout.prompt_tokens] += keys.back(dv)
        return dq_THD, dk_TKD, dv_TKD, None, None


def _rows(grid: Grid, parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    outputs, lses = zip(*parts, strict=True)
    return grid.back(outputs), grid.back(lses)
