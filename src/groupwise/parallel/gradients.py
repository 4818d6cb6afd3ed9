"""A policy that several processes train: who holds which part of it, and one gradient from everyone's."""

from __future__ import annotations

import torch

from groupwise.errors import ConfigError
from groupwise.model.noise import draws_noise
from groupwise.model.policy import Policy
from groupwise.model.sharded import Shards
from groupwise.model.zero import Zero
from groupwise.parallel.processes import Processes


def sum_gradients(processes: Processes, policy: Policy) -> None:
    """Give every process the sum of all gradients; one that no process has stays absent.

    A divided policy has added up those of its layers by itself; DeepSpeed does so for all of them.
    """
    if processes.count == 1 or policy.zero is not None:
        return
    divided = () if policy.shards is None else policy.shards.divided
    parameters = [p for name, p in policy.trainable().items() if name not in divided]
    if not parameters:
        return
    having = processes.gather([parameter.grad is not None for parameter in parameters])
    touched = [p for p, *has in zip(parameters, *having, strict=True) if any(has)]
    for parameter in touched:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    processes.sum_([parameter.grad for parameter in touched if parameter.grad is not None])


def divide(policy: Policy, layout: str) -> None:
    """Divide a policy among the processes of this run: by fsdp, zero1, zero2 or zero3."""
    if policy.unpacked_bytes:
        raise ConfigError("quantized weights cannot be divided among processes: use run.parallel=ddp")
    policy.noisy = draws_noise(policy)  # which can only be tried while the policy is whole
    if layout == "fsdp":
        policy.shards = Shards(policy.model, policy.decoder, device=policy.device)
    else:
        policy.zero = Zero(policy.model, policy.head, stage=int(layout.removeprefix("zero")))
