"""Triton kernels between the matrix products of a decoder layer.

Each kernel rounds to the model's dtype exactly where the training forward pass does (`model.ops` and torch's
RMSNorm: once, at the end). Sampler and trainer then differ only in the order of sums. Rounding elsewhere
would add differences as large as bfloat16 rounding itself.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from groupwise.engine.cuda.kernel_launch import let_next_start, wait_for_previous


@triton.jit
def add_norm(
    X, DELTA, WEIGHT, OUT, eps, delta_stride,
    ADD: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One program per token: add a layer's output to the residual stream and apply RMSNorm."""
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    mask = at < SIZE
    kind = OUT.dtype.element_ty
    x = tl.load(X + token * SIZE + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(DELTA + token * delta_stride + at, mask=mask, other=0.0).to(tl.float32)
        x = x.to(kind).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    if ADD:  # after the reduction, because by then all warps have read X
        tl.store(X + token * SIZE + at, x.to(kind), mask=mask)
    weight = tl.load(WEIGHT + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(OUT + token * SIZE + at, (x * scale * weight).to(kind), mask=mask)


@triton.jit
def rotate_and_store(
    QKV, COS, SIN, Q_NORM, K_NORM, KEYS, VALUES, PLACES, turn_scale, eps, stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    PADDED: tl.constexpr, PADDED_KEYS: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """One program per token: apply RoPE to its queries and keys in place, and store keys and values.

    COS and SIN cover half a head: both halves rotate by the same angles.
    """
    let_next_start()
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(PLACES + token)
    kind = QKV.dtype.element_ty
    heads, low = tl.arange(0, PADDED), tl.arange(0, HALF)
    inside = low < SIZE // 2
    mask = (heads[:, None] < HEADS + KEY_HEADS) & inside[None, :]
    base = QKV + token * stride + heads[:, None] * SIZE + low[None, :]
    first = tl.load(base, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(base + SIZE // 2, mask=mask, other=0.0).to(tl.float32)
    is_key = heads[:, None] >= HEADS
    if NORMED:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = (1.0 / tl.sqrt(square / SIZE + eps))[:, None]
        weight_1 = tl.where(
            is_key,
            tl.load(K_NORM + low, mask=inside, other=0.0)[None, :].to(tl.float32),
            tl.load(Q_NORM + low, mask=inside, other=0.0)[None, :].to(tl.float32),
        )
        weight_2 = tl.where(
            is_key,
            tl.load(K_NORM + SIZE // 2 + low, mask=inside, other=0.0)[None, :].to(tl.float32),
            tl.load(Q_NORM + SIZE // 2 + low, mask=inside, other=0.0)[None, :].to(tl.float32),
        )
        first = (first * scale * weight_1).to(kind).to(tl.float32)
        second = (second * scale * weight_2).to(kind).to(tl.float32)
    turn = token * (SIZE // 2) + low
    cos = (tl.load(COS + turn, mask=inside, other=0.0) * turn_scale).to(kind).to(tl.float32)[None, :]
    sin = (tl.load(SIN + turn, mask=inside, other=0.0) * turn_scale).to(kind).to(tl.float32)[None, :]
    if NORMED:  # the training pass rotates these with transformers' code, which rounds every product
        turned_1 = (first * cos).to(kind).to(tl.float32) - (second * sin).to(kind).to(tl.float32)
        turned_2 = (second * cos).to(kind).to(tl.float32) + (first * sin).to(kind).to(tl.float32)
    else:
        turned_1 = first * cos - second * sin
        turned_2 = second * cos + first * sin
    tl.store(base, turned_1.to(kind), mask=mask)
    tl.store(base + SIZE // 2, turned_2.to(kind), mask=mask)
    to = KEYS + (place * KEY_HEADS + heads[:, None] - HEADS) * SIZE + low[None, :]
    tl.store(to, turned_1.to(kind), mask=mask & is_key)
    tl.store(to + SIZE // 2, turned_2.to(kind), mask=mask & is_key)

    keys, dims = tl.arange(0, PADDED_KEYS), tl.arange(0, 2 * HALF)
    kept = (keys[:, None] < KEY_HEADS) & (dims[None, :] < SIZE)
    value = QKV + token * stride + (HEADS + KEY_HEADS + keys[:, None]) * SIZE
    v = tl.load(value + dims[None, :], mask=kept, other=0.0)
    tl.store(VALUES + (place * KEY_HEADS + keys[:, None]) * SIZE + dims[None, :], v, mask=kept)


@triton.jit
def silu_and_multiply(GATE_UP, OUT, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One program per (token, segment): SiLU of the first half times the second half."""
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < SIZE
    kind = OUT.dtype.element_ty
    gate = tl.load(GATE_UP + token * stride + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + token * stride + SIZE + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(OUT + token * SIZE + at, (gate * tl.sigmoid(gate) * up).to(kind), mask=mask)
