"""Log-probabilities of chosen tokens without ever holding [tokens x vocabulary] logits.

The output layer runs on a few hundred tokens at a time; the backward pass computes each chunk's
logits again, which costs one more product with the output layer and saves its whole activation.

Axes: N trained tokens, M hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from groupwise.model.distribution import entropy, scaled_logits
from groupwise.records import Sampling

CHUNK_LOGITS = 1 << 23
"""Logits held at once: 32 MB in float32."""


def token_logprobs(
    hidden_NM: Tensor, weight_VM: Tensor, bias_V: Tensor | None, tokens_N: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """Return (logprobs_N, entropy_N) of `tokens_N` under the sampling distribution, both differentiable."""
    logprobs_N, entropy_N = _TokenLogprobs.apply(hidden_NM, weight_VM, bias_V, tokens_N, sampling)
    return logprobs_N, entropy_N


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NM: Tensor,
        weight_VM: Tensor,
        bias_V: Tensor | None,
        tokens_N: Tensor,
        sampling: Sampling,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_NM, weight_VM, bias_V, tokens_N)
        ctx.sampling = sampling
        ctx.set_materialize_grads(False)  # the entropy is often only measured: its gradient is then None
        logprobs_N = torch.empty(len(tokens_N), device=hidden_NM.device)
        entropy_N = torch.empty_like(logprobs_N)
        for part in _chunks(tokens_N, weight_VM):
            logprobs_CV = _log_distribution(hidden_NM[part], weight_VM, bias_V, tokens_N[part], sampling)
            logprobs_N[part] = logprobs_CV.gather(1, tokens_N[part, None]).squeeze(1)
            entropy_N[part] = entropy(logprobs_CV)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NM, weight_VM, bias_V, tokens_N = ctx.saved_tensors
        grad_logprobs_N, grad_entropy_N = grads
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros(len(tokens_N), device=hidden_NM.device)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        dhidden = torch.empty_like(hidden_NM) if need_hidden else None
        dweight = torch.zeros_like(weight_VM, dtype=torch.float32) if need_weight else None
        dbias = torch.zeros_like(bias_V, dtype=torch.float32) if need_bias and bias_V is not None else None
        temperature = ctx.sampling.temperature or 1.0
        for part in _chunks(tokens_N, weight_VM):
            logprobs_CV = _log_distribution(hidden_NM[part], weight_VM, bias_V, tokens_N[part], ctx.sampling)
            probs_CV = logprobs_CV.exp()
            # d logprob / d logit_j = [j is the token] - p_j;  d entropy / d logit_j = -p_j (log p_j + entropy)
            dlogits_CV = probs_CV * -grad_logprobs_N[part, None]
            if grad_entropy_N is not None:
                surprise_CV = logprobs_CV.nan_to_num(neginf=0.0) + entropy(logprobs_CV)[:, None]
                dlogits_CV -= probs_CV * surprise_CV * grad_entropy_N[part, None]
            dlogits_CV.scatter_add_(1, tokens_N[part, None], grad_logprobs_N[part, None])
            dlogits_CV = (dlogits_CV / temperature).to(weight_VM.dtype)
            if dhidden is not None:
                dhidden[part] = dlogits_CV @ weight_VM
            if dweight is not None:
                dweight += dlogits_CV.T @ hidden_NM[part]
            if dbias is not None:
                dbias += dlogits_CV.sum(0)
        return (
            dhidden,
            None if dweight is None else dweight.to(weight_VM.dtype),
            None if dbias is None or bias_V is None else dbias.to(bias_V.dtype),
            None,
            None,
        )


def _log_distribution(
    hidden_CM: Tensor, weight_VM: Tensor, bias_V: Tensor | None, tokens_C: Tensor, sampling: Sampling
) -> Tensor:
    logits_CV = torch.nn.functional.linear(hidden_CM, weight_VM, bias_V)
    return scaled_logits(logits_CV, sampling, keep_N=tokens_C).log_softmax(-1)


def _chunks(tokens_N: Tensor, weight_VM: Tensor) -> list[slice]:
    size = max(1, CHUNK_LOGITS // weight_VM.shape[0])
    return [slice(start, start + size) for start in range(0, len(tokens_N), size)]
