"""Drawing tokens, with noise that depends on who the token is for and on nothing else.

Axes: N sequences, V vocabulary.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.model.distribution import entropy, scaled_logits
from groupwise.records import Sampling


def derive_seed(*parts: int | str) -> int:
    """Return 63 bits that depend on every part: (run seed, step, example, member)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniforms(seeds_N: NDArray[np.uint64], positions_N: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position): the splitmix64 sequence, entered at any point."""
    with np.errstate(over="ignore"):
        x = seeds_N + (positions_N + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(logits_NV: Tensor, sampling: Sampling, noise_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (tokens_N, logprobs_N, entropies_N); `noise_N` holds one uniform number a row.

    The token is the first whose cumulative probability exceeds the noise. The running sum is in
    float64: in float32 its rounding would starve the tail of a large vocabulary.
    """
    logprobs_NV = scaled_logits(logits_NV, sampling).log_softmax(-1)
    if sampling.greedy:
        tokens_N = logprobs_NV.argmax(-1)
    else:
        mass_NV = logprobs_NV.exp().cumsum(-1, dtype=torch.float64)
        aim_N1 = (noise_N.to(mass_NV) * mass_NV[:, -1])[:, None]
        tokens_N = torch.searchsorted(mass_NV, aim_N1, right=True).squeeze(1)
        # Rounding in the product can reach the total itself: fall back to the last possible token.
        last_N = torch.searchsorted(mass_NV, mass_NV[:, -1:].contiguous()).squeeze(1)
        tokens_N = torch.minimum(tokens_N, last_N)
    chosen_N = logprobs_NV.gather(1, tokens_N[:, None]).squeeze(1)
    return tokens_N, chosen_N, entropy(logprobs_NV)
