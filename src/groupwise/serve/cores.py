"""How many threads compute while another process talks to clients."""

from __future__ import annotations

import os

import torch

from groupwise.model.policy import Policy

NARROW = 256
"""Hidden size up to which a model is small."""


def leave_a_core(policy: Policy) -> None:
    """Let one thread fewer compute where a small model runs on a CPU.

    All threads of a product wait for the slowest one, and whoever talks to clients stops one of them with
    every token. A small model writes many tokens and gains little from its last core; a larger one
    writes few, and needs it. Who says OMP_NUM_THREADS decides.
    """
    small = policy.head_weight.shape[1] <= NARROW
    if policy.device.type == "cpu" and small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
