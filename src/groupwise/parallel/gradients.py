"""One gradient out of everyone's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from groupwise.parallel.processes import Processes


def sum_gradients(processes: Processes, parameters: Sequence[nn.Parameter]) -> None:
    """Give every process the sum of all gradients; one that no process has stays absent."""
    if processes.count == 1:
        return
    having = processes.gather([parameter.grad is not None for parameter in parameters])
    touched = [p for p, *has in zip(parameters, *having, strict=True) if any(has)]
    for parameter in touched:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    processes.sum_([parameter.grad for parameter in touched if parameter.grad is not None])
