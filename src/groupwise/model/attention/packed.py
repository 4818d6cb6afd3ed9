"""Attention for training: one row without padding, with each group's prompt computed once.

A packed row holds the prompts of all groups, then the completions of all their members:

    [prompt 0][prompt 1]…[member 0.0][member 0.1]…[member 1.0]…

A prompt token attends to its prompt so far. A member token attends to its group's prompt and to its member so
far: two attentions, merged by log-sum-exp. Both work on consecutive segments of the row.

Axes: T tokens of the row, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.model.attention.segment_attention import (
    Integers,
    PaddedAttention,
    VarlenAttention,
    merge,
    supports_flash,
)
from groupwise.model.device import has_kernels

Kind = type[PaddedAttention] | type[VarlenAttention]
Attention = PaddedAttention | VarlenAttention
Parts = tuple[Attention, Attention | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Which tokens of the row attend to which others."""

    prompts: Integers
    """Length of each group's prompt."""
    members: Integers
    """Length of each member, without empty members."""
    followers: Integers
    """Total length of each group's members."""
    device: torch.device
    _parts: dict[Kind, Parts] = field(default_factory=dict)

    @classmethod
    def build(cls, groups: Sequence[tuple[int, Sequence[int]]], *, device: torch.device) -> PackedLayout:
        """Build the layout of groups given as (prompt length, member lengths), in row order."""
        return cls(
            prompts=np.array([prompt for prompt, _ in groups], dtype=np.int64),
            members=np.array(
                [length for _, lengths in groups for length in lengths if length], dtype=np.int64
            ),
            followers=np.array([sum(lengths) for _, lengths in groups], dtype=np.int64),
            device=device,
        )

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens, which come first in the row."""
        return int(self.prompts.sum())

    def parts(self, kind: Kind) -> Parts:
        """Return the attention within each prompt and member, and that of members to their prompt.

        Built once and shared by all layers. Example: [(2, [1, 2])] is the row p0 p1 a0 b0 b1 ->
            within 0–1, 2, 3–4; across from 2–4 to 0–1
        """
        if kind not in self._parts:
            segments = np.concatenate([self.prompts, self.members])
            within = kind.build(segments, segments, causal=True, device=self.device)
            across = None
            if len(self.members):
                across = kind.build(self.followers, self.prompts, causal=False, device=self.device)
            self._parts[kind] = within, across
        return self._parts[kind]

    def attend(self, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, *, layer: int, scale: float) -> Tensor:
        """Return the attention output_1THD; `layer` is unused because nothing is cached."""
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (q_1HTD, k_1KTD, v_1KTD))
        output_THD: Tensor = _PackedAttention.apply(q_THD, k_TKD, v_TKD, self, scale)  # type: ignore[no-untyped-call]
        return output_THD[None]


class _PackedAttention(torch.autograd.Function):
    """Attend within every segment and from members to their prompts, and merge both."""

    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: PackedLayout, scale: float
    ) -> Tensor:
        # The outputs have the layout of the queries, and the kernel that merges them needs rows of heads.
        q_THD = q_THD.contiguous()
        within, across = layout.parts(VarlenAttention if supports_flash(q_THD) else PaddedAttention)
        prompts, members = slice(layout.prompt_tokens), slice(layout.prompt_tokens, None)
        output_THD, lse_TH = within.attend(q_THD, k_TKD, v_TKD, scale=scale)
        if across is not None:
            own = output_THD[members], lse_TH[members]
            other = across.attend(q_THD[members], k_TKD[prompts], v_TKD[prompts], scale=scale)
            if has_kernels(q_THD):
                from groupwise.model.ops.triton_kernels import merge_into

                lse_TH[members] = merge_into(*own, *other)
            else:
                output_THD[members], lse_TH[members] = merge(own, other)
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, output_THD, lse_TH)
        ctx.within, ctx.across, ctx.prompts, ctx.members, ctx.scale = within, across, prompts, members, scale
        return output_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TKD, v_TKD, output_THD, lse_TH = ctx.saved_tensors
        grad_THD = grads[0].contiguous()
        dq_THD, dk_TKD, dv_TKD = ctx.within.backward(
            grad_THD, q_THD, k_TKD, v_TKD, output_THD, lse_TH, scale=ctx.scale
        )
        if ctx.across is not None:
            prompts, members = ctx.prompts, ctx.members
            dq, dk, dv = ctx.across.backward(
                grad_THD[members],
                q_THD[members],
                k_TKD[prompts],
                v_TKD[prompts],
                output_THD[members],
                lse_TH[members],
                scale=ctx.scale,
            )
            dq_THD[members] += dq
            dk_TKD[prompts] += dk
            dv_TKD[prompts] += dv
        return dq_THD, dk_TKD, dv_TKD, None, None
