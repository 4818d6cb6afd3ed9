"""Whether training mode draws random numbers, as dropout and some experts' routers do: found by trying."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from groupwise.model.trial import compute_short_row

if TYPE_CHECKING:
    from groupwise.model.policy import Policy


def draws_noise(policy: Policy) -> bool:
    """Compute a short row, and see whether a generator of random numbers has moved."""
    device = policy.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        before = _states(device)
        compute_short_row(policy)
        after = _states(device)
    return not all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def _states(device: torch.device) -> list[Tensor]:
    on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_gpu]
