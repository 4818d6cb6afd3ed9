"""Attention for training: one row without padding, each group's prompt computed once.

A packed row holds, for every group, the prompt and then what follows it in each member:

    [prompt 0][member 0.0][member 0.1]…[prompt 1][member 1.0]…

A member's token sees its group's prompt and the member's own earlier tokens. Linear layers run on
the row as it is; only attention lays the tokens out on a grid, where padding costs little.

Axes: T tokens of the row, P groups, S longest prompt, G most members of a group, C longest member,
H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.model.attend import attend, attend_backward, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Which token of the row sits where on the grids; `T` stands for an empty place."""

    prompts_PS: Tensor
    members_PGC: Tensor
    place_T: Tensor
    """Index of each token in [all prompt places, then all member places]."""
    prompt_mask_P11S: Tensor
    """0 on prompt tokens, -inf on the empty places behind them."""

    @classmethod
    def build(cls, groups: Sequence[tuple[int, Sequence[int]]], *, device: torch.device) -> PackedLayout:
        """Lay out groups given as (prompt length, member lengths), in the order of the row.

        Example: [(2, [1, 2])] is the row p0 p1 a0 b0 b1 ->
            prompts_PS=[[0, 1]], members_PGC=[[[2, 5], [3, 4]]], place_T=[0, 1, 2, 4, 5]
        """
        longest_prompt = max(prompt for prompt, _ in groups)
        most_members = max(len(members) for _, members in groups)
        longest_member = max((length for _, members in groups for length in members), default=0)
        total = sum(prompt + sum(members) for prompt, members in groups)
        prompts = torch.full((len(groups), longest_prompt), total)
        members_grid = torch.full((len(groups), most_members, longest_member), total)
        start = 0
        for p, (prompt, members) in enumerate(groups):
            prompts[p, :prompt] = torch.arange(start, start + prompt)
            start += prompt
            for g, length in enumerate(members):
                members_grid[p, g, :length] = torch.arange(start, start + length)
                start += length
        places = torch.cat([prompts.flatten(), members_grid.flatten()])
        filled = (places < total).nonzero().squeeze(1)
        place = torch.empty(total, dtype=torch.long)
        place[places[filled]] = filled
        mask = torch.zeros(prompts.shape).masked_fill(prompts == total, float("-inf"))
        return cls(
            prompts_PS=prompts.to(device),
            members_PGC=members_grid.to(device),
            place_T=place.to(device),
            prompt_mask_P11S=mask[:, None, None].to(device),
        )

    def attend(self, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, *, layer: int, scale: float) -> Tensor:
        """Return the attention output_1THD; `layer` is not needed, nothing is cached."""
        output: Tensor = _SharedPromptAttention.apply(q_1HTD[0], k_1KTD[0], v_1KTD[0], self, scale)
        return output[None]


class _SharedPromptAttention(torch.autograd.Function):
    """Gather the grids, attend in three parts, scatter back; every token has exactly one place."""

    @staticmethod
    def forward(
        ctx: Any, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, layout: PackedLayout, scale: float
    ) -> Tensor:
        q, k, v = (_Grids(x, layout) for x in (q_HTD, k_KTD, v_KTD))
        mask = layout.prompt_mask_P11S.to(q_HTD.dtype)
        prompt_out, prompt_lse = attend(q.prompts, k.prompts, v.prompts, causal=True, mask=None, scale=scale)
        if layout.members_PGC.numel():
            own = attend(q.members, k.members, v.members, causal=True, mask=None, scale=scale)
            shared = attend(q.folded, k.prompts, v.prompts, causal=False, mask=mask, scale=scale)
            member_out, member_lse = merge(own, (_unfold(shared[0], layout), _unfold(shared[1], layout)))
        else:
            member_out, member_lse = q.members, q.members[..., 0]
        output_THD = _scatter(prompt_out, member_out, layout)
        ctx.save_for_backward(q_HTD, k_KTD, v_KTD, prompt_out, prompt_lse, member_out, member_lse)
        ctx.layout, ctx.scale = layout, scale
        return output_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_HTD, k_KTD, v_KTD, prompt_out, prompt_lse, member_out, member_lse = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        mask = layout.prompt_mask_P11S.to(q_HTD.dtype)
        q, k, v = (_Grids(x, layout) for x in (q_HTD, k_KTD, v_KTD))
        grad = _Grids(grads[0].transpose(0, 1), layout)
        dq_prompt, dk_prompt, dv_prompt = attend_backward(
            grad.prompts, q.prompts, k.prompts, v.prompts, prompt_out, prompt_lse,
            causal=True, mask=None, scale=scale,
        )  # fmt: skip
        if not layout.members_PGC.numel():
            empty = (q.members, k.members, v.members)
            parts = zip((dq_prompt, dk_prompt, dv_prompt), empty, strict=True)
            return *(_scatter(p, m, layout).transpose(0, 1) for p, m in parts), None, None
        dq_own, dk_own, dv_own = attend_backward(
            grad.members, q.members, k.members, v.members, member_out, member_lse,
            causal=True, mask=None, scale=scale,
        )  # fmt: skip
        dq_shared, dk_shared, dv_shared = attend_backward(
            grad.folded, q.folded, k.prompts, v.prompts, _fold(member_out, layout), _fold(member_lse, layout),
            causal=False, mask=mask, scale=scale,
        )  # fmt: skip
        prompts = (dq_prompt, dk_prompt + dk_shared, dv_prompt + dv_shared)
        members = (dq_own + _unfold(dq_shared, layout), dk_own, dv_own)
        parts = zip(prompts, members, strict=True)
        return *(_scatter(p, m, layout).transpose(0, 1) for p, m in parts), None, None


class _Grids:
    """One tensor of the row, laid out on the prompt and member grids (heads before tokens)."""

    def __init__(self, x_HTD: Tensor, layout: PackedLayout) -> None:
        padded_THD = torch.nn.functional.pad(x_HTD.transpose(0, 1), (0, 0, 0, 0, 0, 1))
        self.layout = layout
        self.prompts = padded_THD[layout.prompts_PS].transpose(1, 2)  # [P, H, S, D]
        self.members = padded_THD[layout.members_PGC].flatten(0, 1).transpose(1, 2)  # [P*G, H, C, D]

    @property
    def folded(self) -> Tensor:
        return _fold(self.members, self.layout)


def _fold(x: Tensor, layout: PackedLayout) -> Tensor:
    """[P*G, H, C, …] -> [P, H, G*C, …]: all members of a group as queries of one prompt."""
    groups = layout.members_PGC.shape[0]
    return x.unflatten(0, (groups, -1)).transpose(1, 2).flatten(2, 3)


def _unfold(x: Tensor, layout: PackedLayout) -> Tensor:
    """Undo `_fold`."""
    _, most_members, longest = layout.members_PGC.shape
    return x.unflatten(2, (most_members, longest)).transpose(1, 2).flatten(0, 1)


def _scatter(prompts: Tensor, members: Tensor, layout: PackedLayout) -> Tensor:
    """From the grids back to the row: [T, H, D]."""
    places = torch.cat([prompts.transpose(1, 2).flatten(0, 1), members.transpose(1, 2).flatten(0, 1)])
    return places[layout.place_T]
