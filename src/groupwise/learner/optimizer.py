"""The optimizer: AdamW variants, gradient clipping and learning-rate schedules."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import torch

from groupwise.config.schema import OptimConfig
from groupwise.errors import ConfigError
from groupwise.invariants import check_finite
from groupwise.learner.cpu_adamw import CPUAdamW
from groupwise.model.policy import Policy


def make_optimizer(policy: Policy, optim: OptimConfig) -> torch.optim.Optimizer:
    """Return AdamW over the trained parameters: fused, 8-bit, CPU-offloaded, or sharded by DeepSpeed."""
    assert optim.learning_rate is not None, "the config must be resolved first"
    parameters = list(policy.owned().values())
    settings: dict[str, Any] = {
        "lr": optim.learning_rate,
        "betas": (optim.beta1, optim.beta2),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
    }
    if policy.zero is not None:
        return make_zero_optimizer(policy, optim, settings)
    if optim.offload:
        return CPUAdamW(parameters, **settings)
    if optim.kind == "adamw8bit":
        if find_spec("bitsandbytes") is None:
            raise ConfigError("optim.kind=adamw8bit requires bitsandbytes: pip install bitsandbytes")
        from bitsandbytes.optim import AdamW8bit

        optimizer: torch.optim.Optimizer = AdamW8bit(parameters, **settings)
        return optimizer
    return torch.optim.AdamW(parameters, fused=True, **settings)


def make_zero_optimizer(
    policy: Policy, optim: OptimConfig, settings: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return AdamW with its state sharded by DeepSpeed, optionally in main memory."""
    assert policy.zero is not None
    if optim.kind != "adamw":
        raise ConfigError(f"run.parallel=zero1, zero2 and zero3 require optim.kind=adamw; got {optim.kind}")
    optimizer = torch.optim.AdamW(list(policy.trainable().values()), fused=True, **settings)
    policy.zero.start(optimizer, max_grad_norm=optim.max_grad_norm, offload=optim.offload)
    return optimizer


def clipped_step(
    policy: Policy, optimizer: torch.optim.Optimizer, *, rate: float, max_grad_norm: float
) -> float:
    """Clip the gradient, step, and return its norm before clipping. A limit of 0 disables clipping."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    if policy.zero is not None:
        norm = policy.zero.step()  # clips with the limit passed to `start`
        check_finite("the gradient norm", norm)
    else:
        norm = clip(policy, max_grad_norm or float("inf"))
        check_finite("the gradient norm", norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    policy.version += 1
    return norm


def clip(policy: Policy, limit: float) -> float:
    """Clip the gradient to the norm `limit` and return its norm before clipping."""
    if policy.shards is None:
        return float(torch.nn.utils.clip_grad_norm_(list(policy.trainable().values()), limit))
    policy.shards.take_gradients()
    owned = list(policy.owned().values())
    whole = [p.grad for n, p in policy.owned().items() if n not in policy.shards.parts and p.grad is not None]
    norm = policy.shards.norm(whole)
    torch.nn.utils.clip_grads_with_norm_(owned, limit, norm)
    return float(norm)


def scheduled_rate(optim: OptimConfig, update: int, *, total: int) -> float:
    """Return the learning rate of optimizer step `update` (from 0) of `total` by the settings."""
    assert optim.learning_rate is not None, "the config must be resolved first"
    return learning_rate(
        update, peak=optim.learning_rate, kind=optim.schedule, warmup=optim.warmup_steps, total=total
    )


def learning_rate(update: int, *, peak: float, kind: str, warmup: int, total: int) -> float:
    """Return the learning rate of optimizer step `update` (from 0) of `total`.

    The first warm-up step has a rate above 0; linear and cosine reach 0 just after the last step.
    """
    if update < warmup:
        return peak * (update + 1) / warmup
    if kind == "constant":
        return peak
    done = min(1.0, (update - warmup) / max(1, total - warmup))
    return peak * (1 - done) if kind == "linear" else peak * 0.5 * (1 + math.cos(math.pi * done))
