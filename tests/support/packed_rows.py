"""Masked softmax attention over a packed row, written plainly."""

from __future__ import annotations

import torch
from torch import Tensor

Groups = list[tuple[int, list[int]]]
"""(prompt length, member lengths) of each group."""


def naive_attention(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, visible_TT: Tensor, scale: float) -> Tensor:
    """Return the output_THD of attention where each query sees the keys that `visible_TT` allows."""
    k_HTD, v_HTD = (x.repeat_interleave(len(q_HTD) // len(x), 0) for x in (k_KTD, v_KTD))
    scores_HTT = (q_HTD @ k_HTD.transpose(1, 2) * scale).masked_fill(~visible_TT, -torch.inf)
    return (scores_HTT.softmax(-1) @ v_HTD).transpose(0, 1)


def visible(groups: Groups) -> Tensor:
    """Return which token of the row [prompts][members] sees which."""
    owner = [(g, -1) for g, (prompt, _) in enumerate(groups) for _ in range(prompt)]
    for number, (_, members) in enumerate(groups):
        owner += [(number, member) for member, length in enumerate(members) for _ in range(length)]
    group_T, member_T = torch.tensor(owner).T
    at_T = torch.arange(len(owner))
    same_group = group_T[:, None] == group_T
    same_part = (member_T == -1) | (member_T[:, None] == member_T)
    return same_group & same_part & (at_T <= at_T[:, None])
