"""How many tokens one pass of an update takes at a time, where the settings do not say."""

from __future__ import annotations

CPU_ACTIVATIONS = 4 << 30
"""Bytes for the activations of one pass on a CPU, where larger passes are hardly faster."""
LEAST = 1024


def pass_tokens(*, gpu_memory: int | None, token_bytes: int, recomputes: bool) -> int:
    """Tokens whose activations fit into a share of memory that is the same whenever a run is resumed.

    `gpu_memory` is all of the GPU's, None on a CPU; `token_bytes` is what one token leaves behind.
    """
    if gpu_memory is None:
        share, most = CPU_ACTIVATIONS, 4096
    else:
        # The host needs as long for a small pass as for a large one; but whoever computes activations again
        # wants their memory.
        share, most = gpu_memory // 4, 8192 if recomputes else 49152
    return min(max(share // token_bytes, LEAST), most)
