"""Kernels recorded once and launched together from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from groupwise.model.policy import Policy


def can_be_captured(policy: Policy) -> bool:
    """Whether a pass asks the device nothing: `dynamic` rotary embeddings look how long the text is."""
    rotary = getattr(policy.decoder, "rotary_emb", None)
    return bool(getattr(rotary, "rope_type", None) != "dynamic")


def captured(step: Callable[[], None], *, stream: torch.cuda.Stream, pool: Any) -> Callable[[], None]:
    """Record a step; what is returned runs it again.

    It must have run before: compiling kernels and taking workspaces must not happen while it is recorded.
    """
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        step()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay
