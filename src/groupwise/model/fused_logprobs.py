"""Log-probabilities of chosen tokens on a GPU, with one kernel between the products with the output layer.

The same as `logprobs` computes, for distributions that leave no token out.

Axes: N trained tokens, C tokens of a chunk, M hidden size, V vocabulary.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupwise.model.head import chunks, float_logits

CHUNK_LOGITS = 1 << 26
"""Logits held at once: a quarter of a gigabyte, and half as much for their gradient in bfloat16."""


@triton.jit
def _token_rows(
    LOGITS, TOKENS, SLOPE, GRADIENT, LOGPROB, ENTROPY, vocabulary, inverse_temperature,
    WRITE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of logits: its token's log-probability and the entropy; with WRITE, also
    slope · (1 at the token - probability), the gradient of slope · log-probability."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(TOKENS + row)
    logits = LOGITS + row * vocabulary
    offsets = tl.arange(0, BLOCK)
    # Each lane keeps its own running softmax; they are joined once, at the end.
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        live = start + offsets < vocabulary
        x = (
            tl.load(logits + start + offsets, mask=live, other=-float("inf")).to(tl.float32)
            * inverse_temperature
        )
        new_best = tl.maximum(best, x)
        safe = tl.where(new_best == -float("inf"), 0.0, new_best)
        shrink, share = tl.exp(best - safe), tl.exp(x - safe)
        total = total * shrink + share
        # A token that the model rules out adds nothing, though its logit is -inf.
        weighted = weighted * shrink + tl.where(x == -float("inf"), 0.0, share * x)
        best = new_best
    largest = tl.max(best, 0)
    shrink = tl.exp(best - largest)
    whole = tl.sum(total * shrink, 0)
    normaliser = largest + tl.log(whole)
    chosen = tl.load(logits + token).to(tl.float32) * inverse_temperature
    tl.store(LOGPROB + row, chosen - normaliser)
    tl.store(ENTROPY + row, normaliser - tl.sum(weighted * shrink, 0) / whole)
    if WRITE:
        slope = tl.load(SLOPE + row)
        for start in range(0, vocabulary, BLOCK):
            at = start + offsets
            live = at < vocabulary
            x = tl.load(logits + at, mask=live, other=-float("inf")).to(tl.float32) * inverse_temperature
            gradient = slope * (tl.where(at == token, 1.0, 0.0) - tl.exp(x - normaliser))
            tl.store(GRADIENT + row * vocabulary + at, gradient.to(GRADIENT.dtype.element_ty), mask=live)


def _rows(
    logits_CV: Tensor,
    tokens_C: Tensor,
    temperature: float,
    *,
    slope_C: Tensor | None = None,
    gradient_CV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (logprob_C, entropy_C); given slopes, `gradient_CV` becomes the gradient of the logits."""
    logprob_C = torch.empty(len(tokens_C), device=logits_CV.device)
    entropy_C = torch.empty_like(logprob_C)
    _token_rows[(len(tokens_C),)](
        logits_CV, tokens_C, logprob_C if slope_C is None else slope_C,
        logits_CV if gradient_CV is None else gradient_CV, logprob_C, entropy_C,
        logits_CV.shape[1], 1 / temperature,
        WRITE=slope_C is not None, BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return logprob_C, entropy_C


class FusedTokenLogprobs(torch.autograd.Function):
    """(logprobs_N, entropy_N); the entropy carries no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NM: Tensor,
        weight_VM: Tensor,
        bias_V: Tensor | None,
        tokens_N: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        ctx.frozen_head = need_hidden and not (need_weight or need_bias)
        slope_N = torch.full((len(tokens_N),), 1 / temperature, device=hidden_NM.device)
        dhidden_NM = torch.empty_like(hidden_NM) if ctx.frozen_head else None
        logprobs_N, entropy_N = torch.empty_like(slope_N), torch.empty_like(slope_N)
        for part in chunks(tokens_N, weight_VM, CHUNK_LOGITS):
            logits_CV = float_logits(hidden_NM[part], weight_VM, bias_V)
            if dhidden_NM is None:
                logprobs_N[part], entropy_N[part] = _rows(logits_CV, tokens_N[part], temperature)
                continue
            dlogits_CV = torch.empty_like(logits_CV, dtype=weight_VM.dtype)
            logprobs_N[part], entropy_N[part] = _rows(
                logits_CV, tokens_N[part], temperature, slope_C=slope_N[part], gradient_CV=dlogits_CV
            )
            torch.mm(dlogits_CV, weight_VM, out=dhidden_NM[part])
            del logits_CV, dlogits_CV  # or they would stay beside the next chunk
        kept = (dhidden_NM,) if ctx.frozen_head else (hidden_NM, weight_VM, bias_V, tokens_N)
        ctx.save_for_backward(*kept)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_N = grads[0]
        if ctx.frozen_head:
            (dhidden_NM,) = ctx.saved_tensors
            return dhidden_NM * grad_N[:, None].to(dhidden_NM.dtype), None, None, None, None
        hidden_NM, weight_VM, bias_V, tokens_N = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        dhidden = torch.empty_like(hidden_NM) if need_hidden else None
        dweight = torch.zeros_like(weight_VM, dtype=torch.float32) if need_weight else None
        dbias = torch.zeros_like(bias_V, dtype=torch.float32) if need_bias else None
        for part in chunks(tokens_N, weight_VM, CHUNK_LOGITS):
            logits_CV = float_logits(hidden_NM[part], weight_VM, bias_V)
            dlogits_CV = torch.empty_like(logits_CV, dtype=weight_VM.dtype)
            slope_C = grad_N[part] / ctx.temperature
            _rows(logits_CV, tokens_N[part], ctx.temperature, slope_C=slope_C, gradient_CV=dlogits_CV)
            if dhidden is not None:
                torch.mm(dlogits_CV, weight_VM, out=dhidden[part])
            if dweight is not None:
                dweight += dlogits_CV.T @ hidden_NM[part]
            if dbias is not None:
                dbias += dlogits_CV.sum(0)
            del logits_CV, dlogits_CV
        return (
            dhidden,
            None if dweight is None else dweight.to(weight_VM.dtype),
            None if dbias is None else dbias.to(bias_V.dtype),
            None,
            None,
        )
