"""A short row, computed as the learner computes rows, to find out how a model behaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from groupwise.model.mode import in_mode
from groupwise.model.packed import PackedLayout

if TYPE_CHECKING:
    from groupwise.model.policy import Policy

TOKENS = 8


@torch.no_grad()
def compute_short_row(policy: Policy) -> None:
    """A forward pass in training mode, through every layer."""
    places_T = torch.arange(TOKENS, device=policy.device)
    layout = PackedLayout.build([(TOKENS, ())], device=policy.device)
    with in_mode(policy.model, training=True):
        policy.hidden(places_T % len(policy.head_weight), places_T, layout)
