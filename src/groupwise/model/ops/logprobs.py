"""Log-probabilities and entropies of given tokens without [tokens x vocabulary] logits in memory.

The output layer runs on a few hundred tokens at a time. With a frozen output layer (LoRA), only the
hidden states need a gradient, and the forward pass computes and keeps it. Otherwise the backward pass
recomputes the probabilities of each chunk. That costs one more matmul with the output layer and saves
the memory of its activations.

Axes: N trained tokens, C tokens of a chunk, M hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from groupwise.model.device import add_product, has_kernels, repeatable_linear
from groupwise.model.ops.logits import capped, chunks, float_logits, masked_logits, scaled_logits
from groupwise.records import Sampling

CHUNK_LOGITS = 1 << 23
"""Logits in memory at once: 32 MB in float32."""


def token_logprobs(
    hidden_NM: Tensor,
    weight_VM: Tensor,
    bias_V: Tensor | None,
    tokens_N: Tensor,
    sampling: Sampling,
    *,
    entropy_gradient: bool,
    cap: float | None = None,
    masks_NW: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (logprobs_N, entropy_N) of `tokens_N` under the sampling distribution.

    The log-probabilities carry a gradient; the entropy carries one only with `entropy_gradient`.
    `cap`: the model's soft cap on logits. `masks_NW`: the tokens that a grammar allows (`model.grammar`).
    """
    plain = masks_NW is None and not (sampling.truncates or entropy_gradient or cap)
    if has_kernels(hidden_NM) and plain:
        from groupwise.model.ops.triton_kernels import FusedTokenLogprobs

        logprobs_N, entropy_N = FusedTokenLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden_NM, weight_VM, bias_V, tokens_N, sampling.temperature or 1.0
        )
    else:
        logprobs_N, entropy_N = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden_NM, weight_VM, bias_V, tokens_N, sampling, entropy_gradient, cap, masks_NW
        )
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
        entropy_gradient: bool,
        cap: float | None,
        masks_NW: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        frozen_head = need_hidden and not (need_weight or need_bias or entropy_gradient)
        temperature = sampling.temperature or 1.0
        logprobs_N = torch.empty(len(tokens_N), device=hidden_NM.device)
        entropy_N, normaliser_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        slope_NM = torch.empty_like(hidden_NM) if frozen_head else None
        for part in chunks(tokens_N, weight_VM, CHUNK_LOGITS):
            masks_CW = None if masks_NW is None else masks_NW[part]
            logits_CV, capped_CV = _logits(
                hidden_NM[part], weight_VM, bias_V, tokens_N[part], sampling, cap, masks_CW
            )
            largest_C1 = logits_CV.amax(-1, keepdim=True)
            logits_CV.sub_(largest_C1)
            unscaled_CV = logits_CV.exp()
            total_C1 = unscaled_CV.sum(-1, keepdim=True)
            chosen_C1 = logits_CV.gather(1, tokens_N[part, None])
            finite_CV = _finite(logits_CV, excluding=sampling.truncates or masks_NW is not None)
            mean_C = (unscaled_CV * finite_CV).sum(-1) / total_C1[:, 0]
            logprobs_N[part] = (chosen_C1 - total_C1.log())[:, 0]
            entropy_N[part] = total_C1[:, 0].log() - mean_C
            normaliser_N[part] = (largest_C1 + total_C1.log())[:, 0]
            if slope_NM is not None:
                probs_CV, chosen_CM = unscaled_CV.div_(total_C1), weight_VM[tokens_N[part]]
                if capped_CV is not None:
                    probs_CV.mul_(capped_CV)
                    chosen_CM = chosen_CM * capped_CV.gather(1, tokens_N[part, None]).to(weight_VM.dtype)
                expected_CM = repeatable_linear(probs_CV.to(weight_VM.dtype), weight_VM.T, None)
                slope_NM[part] = (chosen_CM - expected_CM) / temperature
        if slope_NM is not None:
            ctx.save_for_backward(slope_NM)
        else:
            ctx.save_for_backward(hidden_NM, weight_VM, bias_V, tokens_N, normaliser_N, entropy_N, masks_NW)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        ctx.frozen_head, ctx.sampling, ctx.entropy_gradient = frozen_head, sampling, entropy_gradient
        ctx.cap = cap
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs_N, grad_entropy_N = grads
        if ctx.frozen_head:
            (slope_NM,) = ctx.saved_tensors
            return (grad_logprobs_N[:, None] * slope_NM).to(slope_NM.dtype), *(None,) * 7
        hidden_NM, weight_VM, bias_V, tokens_N, normaliser_N, entropy_N, masks_NW = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        dhidden = torch.empty_like(hidden_NM) if need_hidden else None
        dweight = torch.zeros_like(weight_VM, dtype=torch.float32) if need_weight else None
        dbias = torch.zeros_like(bias_V, dtype=torch.float32) if need_bias else None
        for part in chunks(tokens_N, weight_VM, CHUNK_LOGITS):
            masks_CW = None if masks_NW is None else masks_NW[part]
            logits_CV, capped_CV = _logits(
                hidden_NM[part], weight_VM, bias_V, tokens_N[part], ctx.sampling, ctx.cap, masks_CW
            )
            logprobs_CV = logits_CV.sub_(normaliser_N[part, None])
            dlogits_CV = _dlogits(
                logprobs_CV,
                tokens_N[part],
                grad_logprobs_N[part],
                grad_entropy_N[part] if ctx.entropy_gradient else None,
                entropy_N[part],
                ctx.sampling,
                excluding=ctx.sampling.truncates or masks_NW is not None,
            )
            if capped_CV is not None:
                dlogits_CV.mul_(capped_CV)
            dlogits_CV = dlogits_CV.to(weight_VM.dtype)
            if dhidden is not None:
                dhidden[part] = repeatable_linear(dlogits_CV, weight_VM.T, None)
            if dweight is not None:
                add_product(dweight, dlogits_CV.T, hidden_NM[part])
            if dbias is not None:
                dbias += dlogits_CV.sum(0)
        return (
            dhidden,
            None if dweight is None else dweight.to(weight_VM.dtype),
            None if dbias is None else dbias.to(bias_V.dtype),
            *(None,) * 5,
        )


def _dlogits(
    logprobs_CV: Tensor,
    tokens_C: Tensor,
    grad_logprobs_C: Tensor,
    grad_entropy_C: Tensor | None,
    entropy_C: Tensor,
    sampling: Sampling,
    *,
    excluding: bool,
) -> Tensor:
    """Return the gradient of the logits before temperature; overwrites `logprobs_CV`.

    d logprob / d logit_j = [j is the token] - p_j;  d entropy / d logit_j = -p_j (log p_j + entropy)
    """
    temperature = sampling.temperature or 1.0
    grad_C1 = grad_logprobs_C[:, None] / temperature
    if grad_entropy_C is None:
        dlogits_CV = logprobs_CV.exp_().mul_(-grad_C1)
    else:
        probs_CV = logprobs_CV.exp()
        surprise_CV = _finite(logprobs_CV, excluding=excluding).add_(entropy_C[:, None])
        pull_CV = surprise_CV.mul_(grad_entropy_C[:, None] / -temperature).sub_(grad_C1)
        dlogits_CV = probs_CV.mul_(pull_CV)
    return dlogits_CV.scatter_add_(1, tokens_C[:, None], grad_C1)


def _logits(
    hidden_CM: Tensor,
    weight_VM: Tensor,
    bias_V: Tensor | None,
    tokens_C: Tensor,
    sampling: Sampling,
    cap: float | None,
    masks_CW: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the logits of the sampling distribution and, with a cap, the derivative of the capped logits."""
    logits_CV = float_logits(hidden_CM, weight_VM, bias_V)
    slope_CV = None
    if cap is not None:
        logits_CV = capped(logits_CV, cap)
        slope_CV = 1 - (logits_CV / cap).square()
    if masks_CW is not None:
        logits_CV = masked_logits(logits_CV, masks_CW, keep_N=tokens_C)
    return scaled_logits(logits_CV, sampling, keep_N=tokens_C), slope_CV


def _finite(logits_CV: Tensor, *, excluding: bool) -> Tensor:
    """Replace logits of -inf by 0, so that their product with a probability of 0 is 0, not NaN.

    `excluding`: whether there may be any.
    """
    return logits_CV.nan_to_num_(neginf=0.0) if excluding else logits_CV
