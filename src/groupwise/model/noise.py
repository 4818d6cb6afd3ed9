"""Whether training mode draws random numbers, as dropout and some experts' routers do: found by trying."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from groupwise.model.mode import in_mode
from groupwise.model.packed import PackedLayout

if TYPE_CHECKING:
    from groupwise.model.policy import Policy

TOKENS = 8


@torch.no_grad()
def draws_noise(policy: Policy) -> bool:
    """Compute a short row as the learner does, and see whether a generator of random numbers has moved."""
    device = policy.device
    tokens_T = torch.arange(TOKENS, device=device) % len(policy.head_weight)
    layout = PackedLayout.build([(TOKENS, ())], device=device)
    forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with forked, in_mode(policy.model, training=True):
        before = _states(device)
        policy.hidden(tokens_T, torch.arange(TOKENS, device=device), layout)
        after = _states(device)
    return not all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def _states(device: torch.device) -> list[Tensor]:
    on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_gpu]
