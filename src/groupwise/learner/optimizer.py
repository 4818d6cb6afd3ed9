"""The optimizer that every kind of training shares: AdamW, with the gradient clipped."""

from __future__ import annotations

import torch

from groupwise.config.sections import OptimConfig
from groupwise.invariants import check_finite
from groupwise.model.policy import Policy


def make_optimizer(policy: Policy, optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over what the policy trains."""
    assert optim.learning_rate is not None, "the config is resolved before a run starts"
    return torch.optim.AdamW(
        policy.trainable().values(),
        lr=optim.learning_rate,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )


def clipped_step(
    policy: Policy, optimizer: torch.optim.Optimizer, *, rate: float, max_grad_norm: float
) -> float:
    """Clip, step, forget the gradient; returns its norm before clipping. A limit of 0 clips nothing."""
    limit = max_grad_norm or float("inf")
    norm = float(torch.nn.utils.clip_grad_norm_(list(policy.trainable().values()), limit))
    check_finite("the gradient norm", norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
