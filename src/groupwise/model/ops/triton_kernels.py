"""Triton kernels of the training pass: SwiGLU, rotary embeddings, attention merging, token log-probabilities.

Each takes one launch and one pass over memory. Sums are in float32 and rounded once.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupwise.model.ops.logits import chunks, float_logits

BLOCK = 1024


@triton.jit
def _gated_silu(GATE, UP, OUT, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    gate = tl.load(GATE + at, mask=live).to(tl.float32)
    up = tl.load(UP + at, mask=live).to(tl.float32)
    tl.store(OUT + at, (gate * tl.sigmoid(gate) * up).to(OUT.dtype.element_ty), mask=live)


@triton.jit
def _gated_silu_backward(GRAD, GATE, UP, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    grad = tl.load(GRAD + at, mask=live).to(tl.float32)
    gate = tl.load(GATE + at, mask=live).to(tl.float32)
    up = tl.load(UP + at, mask=live).to(tl.float32)
    open_share = tl.sigmoid(gate)
    slope = open_share * (1 + gate * (1 - open_share))
    tl.store(GATE + at, (grad * up * slope).to(GATE.dtype.element_ty), mask=live)
    tl.store(UP + at, (grad * gate * open_share).to(UP.dtype.element_ty), mask=live)
    tl.store(GRAD + at, (gate * open_share * up).to(GRAD.dtype.element_ty), mask=live)


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up; the tensors must be contiguous."""
    out = torch.empty_like(gate)
    _gated_silu[(triton.cdiv(out.numel(), BLOCK),)](gate, up, out, out.numel(), BLOCK=BLOCK)
    return out


def gated_silu_backward_(grad: Tensor, gate: Tensor, up: Tensor) -> None:
    """Overwrite gate and up with their gradients, and grad with silu(gate) · up."""
    _gated_silu_backward[(triton.cdiv(gate.numel(), BLOCK),)](grad, gate, up, gate.numel(), BLOCK=BLOCK)


@triton.jit
def _turn(
    X, COS, SIN, OUT, HEADS: tl.constexpr, HALF: tl.constexpr,
    PADDED_HEADS: tl.constexpr, PADDED_HALF: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """One program per token: rotate every head by the token's angles, or back."""
    token = tl.program_id(0).to(tl.int64)
    heads, place = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED_HALF)
    inside = place < HALF
    angle = token * 2 * HALF + place
    cos_first = tl.load(COS + angle, mask=inside).to(tl.float32)
    cos_second = tl.load(COS + angle + HALF, mask=inside).to(tl.float32)
    sin_first = tl.load(SIN + angle, mask=inside).to(tl.float32)
    sin_second = tl.load(SIN + angle + HALF, mask=inside).to(tl.float32)
    # The inverse rotation is the transpose: the sines swap and change sign.
    to_first = sin_second if BACK else -sin_first
    to_second = -sin_first if BACK else sin_second
    at = token * HEADS * 2 * HALF + heads[:, None] * 2 * HALF + place[None, :]
    live = (heads[:, None] < HEADS) & inside[None, :]
    first = tl.load(X + at, mask=live).to(tl.float32)
    second = tl.load(X + at + HALF, mask=live).to(tl.float32)
    turned_first = first * cos_first[None, :] + second * to_first[None, :]
    turned_second = second * cos_second[None, :] + first * to_second[None, :]
    tl.store(OUT + at, turned_first.to(OUT.dtype.element_ty), mask=live)
    tl.store(OUT + at + HALF, turned_second.to(OUT.dtype.element_ty), mask=live)


def rotate_heads(x_TND: Tensor, cos_TD: Tensor, sin_TD: Tensor, *, back: bool) -> Tensor:
    """Rotate every head by its token's angles; `back`: by the transpose."""
    x_TND, cos_TD, sin_TD = x_TND.contiguous(), cos_TD.contiguous(), sin_TD.contiguous()
    tokens, heads, size = x_TND.shape
    assert cos_TD.shape[-1] == sin_TD.shape[-1] == size, "partial rotary embeddings are not supported"
    out_TND = torch.empty_like(x_TND)
    _turn[(tokens,)](
        x_TND, cos_TD, sin_TD, out_TND,
        HEADS=heads,
        HALF=size // 2,
        PADDED_HEADS=triton.next_power_of_2(heads),
        PADDED_HALF=triton.next_power_of_2(size // 2),
        BACK=back,
    )  # fmt: skip
    return out_TND


@triton.jit
def _merge(
    OUT, LSE, OTHER, OTHER_LSE, MERGED_LSE, lse_token, lse_head, other_token, other_head,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED_HEADS: tl.constexpr, PADDED_SIZE: tl.constexpr,
):  # fmt: skip
    """One program per token: merge attention over other keys into its output.

    Every warp reads the log-sum-exps itself. They must not be overwritten in place: a late warp would read
    merged values.
    """
    token = tl.program_id(0).to(tl.int64)
    heads, place = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED_SIZE)
    head_live = heads < HEADS
    one = tl.load(LSE + token * lse_token + heads * lse_head, mask=head_live, other=0.0)
    two = tl.load(OTHER_LSE + token * other_token + heads * other_head, mask=head_live, other=0.0)
    share = tl.sigmoid(two - one)
    largest = tl.maximum(one, two)
    merged_lse = largest + tl.log(tl.exp(one - largest) + tl.exp(two - largest))
    tl.store(MERGED_LSE + token * HEADS + heads, merged_lse, mask=head_live)
    at = token * HEADS * SIZE + heads[:, None] * SIZE + place[None, :]
    live = head_live[:, None] & (place[None, :] < SIZE)
    mine = tl.load(OUT + at, mask=live).to(tl.float32)
    theirs = tl.load(OTHER + at, mask=live).to(tl.float32)
    merged = mine + share[:, None] * (theirs - mine)
    tl.store(OUT + at, merged.to(OUT.dtype.element_ty), mask=live)


def merge_into(output_THD: Tensor, lse_TH: Tensor, other_THD: Tensor, other_lse_TH: Tensor) -> Tensor:
    """`segment_attention.merge` in place of the first output; return the merged lse_TH."""
    tokens, heads, size = output_THD.shape
    assert output_THD.is_contiguous(), "outputs must be contiguous"
    assert other_THD.is_contiguous(), "outputs must be contiguous"
    merged_lse_TH = torch.empty(tokens, heads, device=lse_TH.device)
    _merge[(tokens,)](
        output_THD, lse_TH, other_THD, other_lse_TH, merged_lse_TH,
        *lse_TH.stride(), *other_lse_TH.stride(),
        HEADS=heads,
        SIZE=size,
        PADDED_HEADS=triton.next_power_of_2(heads),
        PADDED_SIZE=triton.next_power_of_2(size),
        num_warps=4,
    )  # fmt: skip
    return merged_lse_TH


CHUNK_LOGITS = 1 << 26
"""Logits in memory at once: 256 MB in float32, and half as much for their gradient in bfloat16."""


@triton.jit
def _token_rows(
    LOGITS, TOKENS, SLOPE, GRADIENT, LOGPROB, ENTROPY, vocabulary, inverse_temperature,
    WRITE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row of logits: its token's log-probability and the entropy; with WRITE, also
    slope · (1 at the token - probability), the gradient of slope · log-probability."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(TOKENS + row)
    logits = LOGITS + row * vocabulary
    offsets = tl.arange(0, BLOCK)
    # Each lane keeps its own online softmax; they are merged once, at the end.
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
        # A token with a logit of -inf adds nothing; 0 * -inf would be NaN.
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
    """Return (logprob_C, entropy_C); with slopes, write the gradient of the logits to `gradient_CV`."""
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
    """Fused `token_logprobs`: (logprobs_N, entropy_N); the entropy carries no gradient."""

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
            del logits_CV, dlogits_CV  # free them before the next chunk is allocated
        saved = (dhidden_NM,) if ctx.frozen_head else (hidden_NM, weight_VM, bias_V, tokens_N)
        ctx.save_for_backward(*saved)
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
