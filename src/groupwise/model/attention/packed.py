"""Attention for training: one row without padding, with each group's prompt computed once.

A packed row holds the prompts of all groups, then the completions of all their members:

    [prompt 0][prompt 1]…[member 0.0][member 0.1]…[member 1.0]…

A prompt token attends to its prompt so far. A member token attends to its group's prompt and to its member so
far: two attentions, merged by log-sum-exp. Both work on consecutive segments of the row.

Axes: T tokens of the row, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.model.attention.hf_interface import STANDARD, AttentionVariant, merge_sinks
from groupwise.model.attention.segment_attention import (
    Integers,
    PaddedAttention,
    VarlenAttention,
    merge,
    supports_flash,
)
from groupwise.model.device import has_kernels, to_device

Kind = type[PaddedAttention] | type[VarlenAttention]
Attention = PaddedAttention | VarlenAttention
Parts = tuple[Attention, Attention | None]


@dataclass(frozen=True, kw_only=True)
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
    _windowed: dict[tuple[Kind, int], tuple[Attention, Tensor]] = field(default_factory=dict)

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

    @cached_property
    def rows(self) -> list[Integers]:
        """Return the row indices of each member with its prompt before it; of a group without members, the
        prompt's."""
        starts = np.cumsum(self.prompts) - self.prompts
        rows, at, left = [], self.prompt_tokens, list(self.members)
        for start, prompt, followers in zip(starts, self.prompts, self.followers, strict=True):
            own = np.arange(start, start + prompt)
            if not followers:
                rows.append(own)
            while followers:
                length = left.pop(0)
                rows.append(np.concatenate([own, np.arange(at, at + length)]))
                at, followers = at + length, followers - length
        return rows

    def windowed(self, kind: Kind, window: int) -> tuple[Attention, Tensor]:
        """Return the attention with a sliding window, and the row indices of its keys.

        The window moves with the token, so members do not share their prompt: the keys of a member are the
        last tokens of its prompt, then its own. Example: [(2, [1, 2])] with a window of 2 ->
            keys 0 1, 1 2, 1 3 4
        """
        if (kind, window) not in self._windowed:
            prompts = np.split(np.arange(self.prompt_tokens), np.cumsum(self.prompts)[:-1])
            tails = [
                row[max(0, np.searchsorted(row, self.prompt_tokens) - window + 1) :]
                for row in self.rows
                if row[-1] >= self.prompt_tokens
            ]
            keys = [*prompts, *tails]
            attention = kind.build(
                np.concatenate([self.prompts, self.members]),
                np.array([len(key) for key in keys], dtype=np.int64),
                causal=True,
                device=self.device,
                window=window,
            )
            self._windowed[kind, window] = attention, to_device(np.concatenate(keys), self.device)
        return self._windowed[kind, window]

    def attend(
        self,
        q_1HTD: Tensor,
        k_1KTD: Tensor,
        v_1KTD: Tensor,
        *,
        layer: int,
        scale: float,
        variant: AttentionVariant = STANDARD,
    ) -> Tensor:
        """Return the attention output_1THD; `layer` is unused because nothing is cached."""
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (q_1HTD, k_1KTD, v_1KTD))
        window = variant.window
        if window is not None and window < max(map(len, self.rows)):
            apply: Any = _WindowedAttention.apply
        else:
            apply, window = _PackedAttention.apply, None
        output_THD: Tensor = apply(
            q_THD, k_TKD, v_TKD, variant.sinks_H, self, replace(variant, window=window), scale
        )
        return output_THD[None]


def _kind(q_THD: Tensor, variant: AttentionVariant) -> Kind:
    """Return the implementation for these queries; the flash-attention kernel has no soft cap."""
    return VarlenAttention if supports_flash(q_THD) and variant.cap is None else PaddedAttention


class _PackedAttention(torch.autograd.Function):
    """Attend within every segment and from members to their prompts, and merge both."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        sinks_H: Tensor | None,
        layout: PackedLayout,
        variant: AttentionVariant,
        scale: float,
    ) -> Tensor:
        # The outputs have the layout of the queries, and the kernel that merges them needs rows of heads.
        q_THD = q_THD.contiguous()
        options: dict[str, Any] = {"scale": scale, "cap": variant.cap}
        within, across = layout.parts(_kind(q_THD, variant))
        prompts, members = slice(layout.prompt_tokens), slice(layout.prompt_tokens, None)
        output_THD, lse_TH = within.attend(q_THD, k_TKD, v_TKD, **options)
        if across is not None:
            own = output_THD[members], lse_TH[members]
            other = across.attend(q_THD[members], k_TKD[prompts], v_TKD[prompts], **options)
            if has_kernels(q_THD):
                from groupwise.model.ops.triton_kernels import merge_into

                lse_TH[members] = merge_into(*own, *other)
            else:
                output_THD[members], lse_TH[members] = merge(own, other)
        if sinks_H is not None:
            output_THD, lse_TH = merge_sinks(output_THD, lse_TH, sinks_H)
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, output_THD, lse_TH, sinks_H)
        ctx.within, ctx.across, ctx.prompts, ctx.members, ctx.options = (
            within,
            across,
            prompts,
            members,
            options,
        )
        return output_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TKD, v_TKD, output_THD, lse_TH, sinks_H = ctx.saved_tensors
        grad_THD = grads[0].contiguous()
        dq_THD, dk_TKD, dv_TKD = ctx.within.backward(
            grad_THD, q_THD, k_TKD, v_TKD, output_THD, lse_TH, **ctx.options
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
                **ctx.options,
            )
            dq_THD[members] += dq
            dk_TKD[prompts] += dk
            dv_TKD[prompts] += dv
        dsinks_H = sinks_gradient(grad_THD, output_THD, lse_TH, sinks_H)
        return dq_THD, dk_TKD, dv_TKD, dsinks_H, None, None, None


class _WindowedAttention(torch.autograd.Function):
    """Attend within a sliding window: each segment of queries to its own copy of the keys in its reach."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        sinks_H: Tensor | None,
        layout: PackedLayout,
        variant: AttentionVariant,
        scale: float,
    ) -> Tensor:
        assert variant.window is not None
        options: dict[str, Any] = {"scale": scale, "cap": variant.cap}
        attention, keys_S = layout.windowed(_kind(q_THD, variant), variant.window)
        output_THD, lse_TH = attention.attend(
            q_THD, k_TKD.index_select(0, keys_S), v_TKD.index_select(0, keys_S), **options
        )
        if sinks_H is not None:
            output_THD, lse_TH = merge_sinks(output_THD, lse_TH, sinks_H)
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, output_THD, lse_TH, sinks_H, keys_S)
        ctx.attention, ctx.options = attention, options
        return output_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TKD, v_TKD, output_THD, lse_TH, sinks_H, keys_S = ctx.saved_tensors
        grad_THD = grads[0].contiguous()
        k_SKD, v_SKD = k_TKD.index_select(0, keys_S), v_TKD.index_select(0, keys_S)
        dq_THD, dk_SKD, dv_SKD = ctx.attention.backward(
            grad_THD, q_THD, k_SKD, v_SKD, output_THD, lse_TH, **ctx.options
        )

        def summed(grad_SKD: Tensor, like: Tensor) -> Tensor:
            """Add up the gradients of a key's copies; unlike index_add_, this is deterministic on a GPU."""
            dtype = torch.promote_types(like.dtype, torch.float32)
            total = torch.zeros(like.shape, dtype=dtype, device=like.device)
            return total.index_put_((keys_S,), grad_SKD.to(dtype), accumulate=True).to(like.dtype)

        dsinks_H = sinks_gradient(grad_THD, output_THD, lse_TH, sinks_H)
        return dq_THD, summed(dk_SKD, k_TKD), summed(dv_SKD, v_TKD), dsinks_H, None, None, None


def sinks_gradient(
    grad_THD: Tensor, output_THD: Tensor, lse_TH: Tensor, sinks_H: Tensor | None
) -> Tensor | None:
    """Return the gradient of the sinks: a larger share of a sink makes the whole output smaller."""
    if sinks_H is None:
        return None
    share_TH = (sinks_H.to(lse_TH.dtype) - lse_TH).exp()
    return -(share_TH * (grad_THD * output_THD).sum(-1, dtype=lse_TH.dtype)).sum(0).to(sinks_H.dtype)
