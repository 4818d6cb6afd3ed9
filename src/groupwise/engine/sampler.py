"""Drawing tokens, with noise that depends on who the token is for and on nothing else.

Axes: N sequences, V vocabulary, A alternatives, C chunks of the vocabulary, W tokens a chunk.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.invariants import check_finite
from groupwise.model.distribution import entropy, scaled_logits
from groupwise.records import Sampling

CHUNK = 64
MOST_ALTERNATIVES = 20
"""Of the likeliest tokens, how many can be asked for."""
Alternatives = tuple[tuple[int, float], ...]
"""Tokens that might have been drawn in a place, with their log-probabilities, the likeliest first."""


def derive_seed(*parts: int | str) -> int:
    """Return 63 bits that depend on every part: (run seed, step, example, member)."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniforms(seeds_N: NDArray[np.uint64], positions_N: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed, position): the splitmix64 sequence, entered at any point."""
    with np.errstate(over="ignore"):
        x = seeds_N + (positions_N + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    noise_N: NDArray[np.float64] = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return noise_N


def draw(logits_NV: Tensor, sampling: Sampling, noise_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (tokens_N, logprobs_N, entropies_N); `noise_N` holds one uniform float64 a row."""
    logprobs_NV = scaled_logits(logits_NV, sampling).log_softmax(-1)
    entropies_N = entropy(logprobs_NV)
    check_finite("the entropy of the policy", float(entropies_N.sum()))
    tokens_N = logprobs_NV.argmax(-1) if sampling.greedy else pick(logprobs_NV.exp(), noise_N)
    chosen_N = logprobs_NV.gather(1, tokens_N[:, None]).squeeze(1)
    return tokens_N, chosen_N, entropies_N


def likeliest(logprobs_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tokens_NA, logprobs_NA), the best first."""
    logprobs_NA, tokens_NA = logprobs_NV.topk(MOST_ALTERNATIVES, dim=-1)
    return tokens_NA, logprobs_NA


def pick(probs_NV: Tensor, noise_N: Tensor) -> Tensor:
    """Return the tokens_N at which the running sum of the probabilities passes the noise.

    First the chunk is found, then the token in it, so the running sums are short and can be in
    float64: in float32 their rounding would starve the tail of a large vocabulary.
    """
    rows, vocabulary = probs_NV.shape
    chunks_NCW = torch.nn.functional.pad(probs_NV, (0, -vocabulary % CHUNK)).view(rows, -1, CHUNK)
    chunk_N, rest_N = _locate(chunks_NCW.sum(-1), noise_N)
    place_N, _ = _locate(chunks_NCW[torch.arange(rows, device=chunk_N.device), chunk_N], rest_N)
    return chunk_N * CHUNK + place_N


def _locate(weights_NK: Tensor, noise_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return which weight each noise falls on, and how far into it, which is noise again.

    Example: weights [1, 0, 3], noise 0.5 of their sum 4 is 2, which is 1 into the last ->
        index 2, rest 1/3
    """
    mass_NK = weights_NK.double().cumsum(-1)
    total_N1 = mass_NK[:, -1:].contiguous()
    aim_N1 = noise_N[:, None] * total_N1
    index_N1 = torch.searchsorted(mass_NK, aim_N1, right=True)
    # Rounding in the product can reach the total itself: fall back to the last weight above 0.
    index_N1 = torch.minimum(index_N1, torch.searchsorted(mass_NK, total_N1))
    weight_N1 = weights_NK.double().gather(1, index_N1)
    rest_N1 = (aim_N1 - (mass_NK.gather(1, index_N1) - weight_N1)) / weight_N1
    return index_N1.squeeze(1), rest_N1.squeeze(1).clamp(0.0, 1.0)
