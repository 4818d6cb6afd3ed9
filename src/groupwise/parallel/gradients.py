"""One gradient out of everyone's."""

from __future__ import annotations

import torch

from groupwise.model.policy import Policy
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
