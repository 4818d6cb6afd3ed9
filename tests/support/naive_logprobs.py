"""Log-probabilities and entropies of full logits, as they are defined."""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.model.ops.logits import scaled_logits
from groupwise.records import Sampling

TOKENS, WIDTH, VOCABULARY = 37, 8, 50


def inputs(*, bias: bool = False, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Return leaves (hidden, weight and perhaps bias) and the chosen tokens."""
    torch.manual_seed(0)
    shapes = [(TOKENS, WIDTH), (VOCABULARY, WIDTH), *([(VOCABULARY,)] if bias else [])]
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    return leaves, torch.randint(VOCABULARY, (TOKENS,))


def naive(leaves: list[Tensor], tokens_N: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The definition, with all logits at once in double precision."""
    hidden, weight, *bias = leaves
    logits_NV = hidden @ weight.T + (bias[0] if bias else 0.0)
    possible_NV = scaled_logits(logits_NV.detach(), sampling, keep_N=tokens_N) > -torch.inf
    scaled_NV = (logits_NV / (sampling.temperature or 1.0)).masked_fill(~possible_NV, -torch.inf)
    logprobs_NV = scaled_NV.log_softmax(-1)
    chosen_N = logprobs_NV.gather(1, tokens_N[:, None])[:, 0]
    return chosen_N, -(logprobs_NV.exp() * logprobs_NV.masked_fill(~possible_NV, 0.0)).sum(-1)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.detach() - expected.detach()).norm() / expected.detach().norm())
