"""The optimizer that every kind of training shares: AdamW, with the gradient clipped."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from groupwise.config.sections import OptimConfig
from groupwise.errors import ConfigError
from groupwise.invariants import check_finite
from groupwise.learner.offload import OffloadedAdamW
from groupwise.model.policy import Policy


def make_optimizer(policy: Policy, optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over what the policy trains: fused, with its state in eight bits, or in main memory."""
    assert optim.learning_rate is not None, "the config is resolved before a run starts"
    parameters = list(policy.owned().values())
    settings: dict[str, Any] = {
        "lr": optim.learning_rate,
        "betas": (optim.beta1, optim.beta2),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
    }
    if policy.zero is not None:
        return make_divided(policy, optim, settings)
    if optim.offload:
        return OffloadedAdamW(parameters, **settings)
    if optim.kind == "adamw8bit":
        if find_spec("bitsandbytes") is None:
            raise ConfigError("optim.kind=adamw8bit takes a package: pip install bitsandbytes")
        from bitsandbytes.optim import AdamW8bit

        optimizer: torch.optim.Optimizer = AdamW8bit(parameters, **settings)
        return optimizer
    return torch.optim.AdamW(parameters, fused=True, **settings)


def make_divided(policy: Policy, optim: OptimConfig, settings: dict[str, Any]) -> torch.optim.Optimizer:
    """AdamW as DeepSpeed divides it among processes, in main memory or not."""
    assert policy.zero is not None
    if optim.kind != "adamw":
        raise ConfigError(f"run.parallel=zero… goes with optim.kind=adamw; got {optim.kind}")
    optimizer = torch.optim.AdamW(list(policy.trainable().values()), fused=True, **settings)
    policy.zero.start(optimizer, max_grad_norm=optim.max_grad_norm, offload=optim.offload)
    return optimizer


def clipped_step(
    policy: Policy, optimizer: torch.optim.Optimizer, *, rate: float, max_grad_norm: float
) -> float:
    """Clip, step, forget the gradient; returns its norm before clipping. A limit of 0 clips nothing."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    if policy.zero is not None:
        norm = policy.zero.step()  # clips as it was told when it was made
        check_finite("the gradient norm", norm)
    else:
        norm = clip(policy, max_grad_norm or float("inf"))
        check_finite("the gradient norm", norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    policy.version += 1
    return norm


def clip(policy: Policy, limit: float) -> float:
    """Scale the gradient down to `limit` where it is larger; returns its norm before."""
    if policy.shards is None:
        return float(torch.nn.utils.clip_grad_norm_(list(policy.trainable().values()), limit))
    policy.shards.take_gradients()
    owned = list(policy.owned().values())
    whole = [p.grad for n, p in policy.owned().items() if n not in policy.shards.parts and p.grad is not None]
    norm = policy.shards.norm(whole)
    torch.nn.utils.clip_grads_with_norm_(owned, limit, norm)
    return float(norm)
