"""The fused forward pass on a GPU: four matrix products and four kernels per layer.

`fused_forward` falls back to the model's own layers where results differ.

Each kernel between the matrix products rounds to the model's dtype exactly where the training forward pass
does (`model.ops` and torch's RMSNorm: once, at the end). Sampler and trainer then differ only in the order of
sums. Rounding elsewhere would add differences as large as bfloat16 rounding itself. With FP8, these kernels
store the inputs of the products in FP8, from the numbers before they are rounded.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from groupwise.engine.cpu_runner import MakeWeight
from groupwise.engine.cuda.attention_kernels import launch, let_next_start, padded, wait_for_previous
from groupwise.engine.cuda.decode_attention import DecodeLayout
from groupwise.engine.cuda.graph_weights import (
    FP8Cache,
    FP8Rows,
    graph_weights_for,
    layer_of,
    store_fp8,
    store_scale,
)
from groupwise.engine.paged_attention import KVCache
from groupwise.engine.prefill import PrefillLayout, Segment
from groupwise.engine.scheduler import Prefix
from groupwise.errors import ConfigError
from groupwise.model.attention.hf_interface import AttentionVariant
from groupwise.model.device import raise_device_error
from groupwise.model.ops.equivalence import float32_excerpt
from groupwise.model.ops.rotary import rotate, sine_halves
from groupwise.model.policy import Policy
from groupwise.tracking.run_folder import LOGGER

if TYPE_CHECKING:
    from groupwise.engine.multi_lora import LoRABank


@triton.jit
def add_norm(
    X, DELTA, WEIGHT, OUT, ROW_SCALE, eps, delta_stride,
    ADD: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One program per token: add a layer's output to the residual stream and apply RMSNorm."""
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    mask = at < SIZE
    kind = X.dtype.element_ty
    x = tl.load(X + token * SIZE + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(DELTA + token * delta_stride + at, mask=mask, other=0.0).to(tl.float32)
        x = x.to(kind).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    if ADD:  # after the reduction, because by then all warps have read X
        tl.store(X + token * SIZE + at, x.to(kind), mask=mask)
    weight = tl.load(WEIGHT + at, mask=mask, other=0.0).to(tl.float32)
    x = x * scale * weight
    if FP8:
        store_fp8(OUT, ROW_SCALE, token, at, mask, x, tl.max(tl.abs(x), 0), SIZE)
    else:
        tl.store(OUT + token * SIZE + at, x.to(kind), mask=mask)


@triton.jit
def rotate_and_store(
    QKV, COS, SIN, Q_NORM, K_NORM, KEYS, VALUES, KEY_SCALE, VALUE_SCALE, PLACES, turn_scale, eps, stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    PADDED: tl.constexpr, PADDED_KEYS: tl.constexpr, NORMED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One program per token: apply RoPE to its queries and keys in place, and store keys and values.

    COS and SIN cover half a head: both halves rotate by the same angles. FP8: every stored head has a scale.
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
    if FP8:
        largest = tl.maximum(tl.max(tl.abs(turned_1), 1), tl.max(tl.abs(turned_2), 1))
        at = KEY_SCALE + place * KEY_HEADS + heads - HEADS
        factor = store_scale(at, largest, (heads >= HEADS) & (heads < HEADS + KEY_HEADS))
        turned_1, turned_2 = turned_1 * factor[:, None], turned_2 * factor[:, None]
    stored = KEYS.dtype.element_ty
    to = KEYS + (place * KEY_HEADS + heads[:, None] - HEADS) * SIZE + low[None, :]
    tl.store(to, turned_1.to(stored), mask=mask & is_key)
    tl.store(to + SIZE // 2, turned_2.to(stored), mask=mask & is_key)

    value = QKV + token * stride + (HEADS + KEY_HEADS) * SIZE
    _store_values(value, VALUES, VALUE_SCALE, place, KEY_HEADS, SIZE, 2 * HALF, PADDED_KEYS, FP8)


@triton.jit
def _store_values(
    V, VALUES, VALUE_SCALE, place,
    KEY_HEADS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    heads, dims = tl.arange(0, PADDED), tl.arange(0, DIM)
    mask = (heads[:, None] < KEY_HEADS) & (dims[None, :] < SIZE)
    v = tl.load(V + heads[:, None] * SIZE + dims[None, :], mask=mask, other=0.0)
    if FP8:
        v = v.to(tl.float32)
        factor = store_scale(VALUE_SCALE + place * KEY_HEADS + heads, tl.max(tl.abs(v), 1), heads < KEY_HEADS)
        v *= factor[:, None]
    to = VALUES + (place * KEY_HEADS + heads[:, None]) * SIZE + dims[None, :]
    tl.store(to, v.to(VALUES.dtype.element_ty), mask=mask)


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


@triton.jit
def silu_and_multiply_fp8(GATE_UP, OUT, ROW_SCALE, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Like `silu_and_multiply`, with one program per token and FP8: the scale needs the whole row first."""
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, SIZE, BLOCK):
        largest = tl.maximum(largest, tl.abs(_gated(GATE_UP + token * stride, start, SIZE, BLOCK)))
    top = tl.max(largest, 0)
    for start in tl.static_range(0, SIZE, BLOCK):  # the numbers are in the cache
        at = start + tl.arange(0, BLOCK)
        x = _gated(GATE_UP + token * stride, start, SIZE, BLOCK)
        store_fp8(OUT, ROW_SCALE, token, at, at < SIZE, x, top, SIZE)


@triton.jit
def _gated(ROW, start, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    gate = tl.load(ROW + at, mask=at < SIZE, other=0.0).to(tl.float32)
    up = tl.load(ROW + SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    return gate * tl.sigmoid(gate) * up


CHECKED_TOKENS = 24
FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embedding types whose frequencies do not depend on the sequence length."""
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 1e-2}
"""Relative tolerances: well above rounding errors in a deep random model, well below a real difference."""


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        return cls(module.weight, float(module.variance_epsilon))


class FusedLayer:
    """The weights of one decoder layer, in the order in which they are used."""

    def __init__(self, layer: Any, matrix: MakeWeight) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        assert _is_silu(mlp.act_fn), "only SiLU activations can be fused"
        assert _rotates_halves(attention), "interleaved rotary embeddings cannot be fused"
        self.before_attention = Norm.of(layer.input_layernorm)
        self.qkv = matrix(attention.q_proj, attention.k_proj, attention.v_proj)
        normed = hasattr(attention, "q_norm")
        self.q_norm = Norm.of(attention.q_norm) if normed else None
        self.k_norm = Norm.of(attention.k_norm) if normed else None
        self.output = matrix(attention.o_proj)
        self.before_mlp = Norm.of(layer.post_attention_layernorm)
        self.gate_up = matrix(mlp.gate_proj, mlp.up_proj)
        self.down = matrix(mlp.down_proj)
        self.scale = float(attention.scaling)

    def refresh(self) -> None:
        for matrix in (self.qkv, self.output, self.gate_up, self.down):
            matrix.refresh()


class FusedForward:
    """`Policy.hidden` without gradients, in fewer and larger kernels."""

    def __init__(self, policy: Policy, members: LoRABank | None = None, *, fp8: bool = False) -> None:
        assert policy.unpacks, "dequantized weights do not fit in memory"
        matrix, self._own = graph_weights_for(policy, members, fp8=fp8)
        assert not (fp8 and policy.is_sharded), "the layers of a sharded policy are not converted to FP8"
        self.fp8 = fp8
        decoder: Any = policy.decoder
        self._embedding: Tensor = decoder.embed_tokens.weight
        rotary = decoder.rotary_emb
        assert rotary.rope_type in FIXED_ROPE_TYPES, (
            f"rotary embeddings of type {rotary.rope_type} cannot be fused"
        )
        self._frequencies_C = rotary.inv_freq.to(self._embedding.device, torch.float32)
        self._turn_scale = float(rotary.attention_scaling)
        assert 2 * len(self._frequencies_C) == policy.head_size, "partial rotary embeddings cannot be fused"
        self._layers = [FusedLayer(layer, matrix) for layer in decoder.layers]
        self._norm = Norm.of(decoder.norm)
        self._key_heads, self._size = policy.key_heads, policy.head_size
        assert all(call.plain for call in policy.attention), "soft caps and sinks cannot be fused"
        assert len({(call.key_heads, call.size) for call in policy.attention}) == 1, (
            "layers with different heads cannot be fused"
        )
        self._variants = [AttentionVariant(window=call.window) for call in policy.attention]

    def refresh(self) -> None:
        """Copy the policy's current weights."""
        for layer in self._layers:
            layer.refresh()

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, layout: DecodeLayout | PrefillLayout) -> Tensor:
        own_T = self._own(layout)
        x_TM = nn.functional.embedding(tokens_T, self._embedding)
        angles_TC = positions_T[:, None] * self._frequencies_C
        cos_TC, sin_TC = angles_TC.cos(), angles_TC.sin()
        delta_TM: Tensor | None = None
        for number, layer in enumerate(self._layers):
            qkv_TN = layer.qkv(_add_norm(x_TM, delta_TM, layer.before_attention, fp8=self.fp8), own_T)
            self._rotate_and_store(qkv_TN, cos_TC, sin_TC, layer, layout, number)
            heads = qkv_TN.shape[1] // self._size - 2 * self._key_heads
            qkv_TND = qkv_TN.view(len(qkv_TN), -1, self._size)
            parts = torch.split(qkv_TND, [heads, self._key_heads, self._key_heads], dim=1)
            variant = self._variants[number]
            mixed_THD = layout.read(*parts, layer=number, scale=layer.scale, variant=variant)
            delta_TM = layer.output(mixed_THD.flatten(1), own_T)
            gate_up_TN = layer.gate_up(_add_norm(x_TM, delta_TM, layer.before_mlp, fp8=self.fp8), own_T)
            delta_TM = layer.down(_silu_and_multiply(gate_up_TN, fp8=self.fp8), own_T)
        hidden_TM = _add_norm(x_TM, delta_TM, self._norm)
        assert isinstance(hidden_TM, Tensor)
        return hidden_TM

    def _rotate_and_store(
        self,
        qkv_TN: Tensor,
        cos_TC: Tensor,
        sin_TC: Tensor,
        layer: FusedLayer,
        layout: DecodeLayout | PrefillLayout,
        number: int,
    ) -> None:
        heads = qkv_TN.shape[1] // self._size - 2 * self._key_heads
        q_norm, k_norm = layer.q_norm or layer.before_mlp, layer.k_norm or layer.before_mlp
        launch(
            rotate_and_store,
            (len(qkv_TN),),
            qkv_TN, cos_TC, sin_TC, q_norm.weight, k_norm.weight,
            *layer_of(layout.cache, number), layout.slot_mapping,
            self._turn_scale, q_norm.eps, qkv_TN.stride(0),
            HEADS=heads,
            KEY_HEADS=self._key_heads,
            SIZE=self._size,
            HALF=padded(self._size // 2, least=1),
            PADDED=padded(heads + self._key_heads, least=1),
            PADDED_KEYS=padded(self._key_heads, least=1),
            NORMED=layer.q_norm is not None,
            FP8=isinstance(layout.cache, FP8Cache),
            early=True,
            num_warps=4,
        )  # fmt: skip


def _add_norm(x_TM: Tensor, delta_TM: Tensor | None, norm: Norm, *, fp8: bool = False) -> Tensor | FP8Rows:
    """Add `delta` to the residual stream in place and return the stream normalized."""
    rows, size = x_TM.shape
    out = FP8Rows.empty(rows, size, x_TM.device) if fp8 else torch.empty_like(x_TM)
    launch(
        add_norm,
        (rows,),
        x_TM, x_TM if delta_TM is None else delta_TM, norm.weight, *_both(out), norm.eps,
        size if delta_TM is None else delta_TM.stride(0),
        ADD=delta_TM is not None,
        SIZE=size,
        PADDED=padded(size, least=1),
        FP8=fp8,
        early=True,
        num_warps=4 if size <= 4096 else 8,
    )  # fmt: skip
    return out


def _silu_and_multiply(gate_up_TN: Tensor, *, fp8: bool = False) -> Tensor | FP8Rows:
    rows, size = len(gate_up_TN), gate_up_TN.shape[1] // 2
    if fp8:
        out = FP8Rows.empty(rows, size, gate_up_TN.device)
        launch(
            silu_and_multiply_fp8,
            (rows,),
            gate_up_TN, *out, gate_up_TN.stride(0),
            SIZE=size,
            BLOCK=min(padded(size), 4096),
            early=True,
            num_warps=8,
        )  # fmt: skip
        return out
    block = 1024
    out_TN = torch.empty(rows, size, dtype=gate_up_TN.dtype, device=gate_up_TN.device)
    launch(
        silu_and_multiply,
        (rows, -(-size // block)),
        gate_up_TN, out_TN, gate_up_TN.stride(0),
        SIZE=size,
        BLOCK=block,
        early=True,
        num_warps=4,
    )  # fmt: skip
    return out_TN


def _both(out: Tensor | FP8Rows) -> tuple[Tensor, Tensor]:
    """Return the numbers and the scales that a kernel writes; without FP8, there are no scales."""
    return (out, out) if isinstance(out, Tensor) else out


def _is_silu(function: Any) -> bool:
    x = torch.linspace(-8.0, 8.0, 65)
    return torch.allclose(function(x), nn.functional.silu(x), atol=1e-6)


def _rotates_halves(attention: Any) -> bool:
    """Whether the model's rotary embedding pairs the halves of a head, not adjacent elements."""
    own = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if own is None:
        return True
    heads = torch.linspace(-1.0, 1.0, 2 * 8).view(1, 1, 2, 8)
    angles = torch.linspace(0.0, 3.0, 2 * 4).view(1, 2, 4).repeat(1, 1, 2)
    rotated, _ = own(heads, heads, angles.cos(), angles.sin())
    by_halves = rotate(heads[0, 0][:, None], angles[0][:, None].cos(), *sine_halves(angles[0][:, None].sin()))
    return torch.allclose(rotated[0, 0], by_halves[:, 0], atol=1e-6)


NOT_FUSED = (AttributeError, AssertionError, TypeError, ValueError, RuntimeError)
"""What `FusedForward` raises for layers of another kind."""


def fused_forward(policy: Policy, members: LoRABank | None = None) -> FusedForward | None:
    """Return the fused forward pass of this policy, or None if it does not match the model's own layers."""
    try:
        fused = matching_forward(policy, members)
    except NOT_FUSED as error:
        raise_device_error(error)
        LOGGER.info("generating with the model's own layers, which cannot be fused: %s", error)
        return None
    detail = f", {len(members)} adapters batched" if members else ", adapters merged"
    LOGGER.info("generating with fused layers%s", detail if policy.has_adapter else "")
    return fused


def fp8_forward(policy: Policy, *, products: bool) -> FusedForward:
    """Return the fused forward pass, with products in FP8 or not; raise ConfigError if there is none."""
    try:
        return matching_forward(policy, fp8=products)
    except NOT_FUSED as error:
        raise_device_error(error)
        raise ConfigError(
            f"the layers of this model cannot be fused, which FP8 requires ({error}); leave out "
            "engine.quantization and engine.kv_cache_dtype"
        ) from None


@torch.no_grad()
def matching_forward(policy: Policy, members: LoRABank | None = None, *, fp8: bool = False) -> FusedForward:
    """Return the fused forward pass after a comparison with the model's own layers.

    With `members`, the comparison runs without adapters; with FP8, in float32.
    """
    assert policy.general is None, "the model computes attention in its own way"
    fused = FusedForward(policy, members, fp8=fp8)
    difference = _difference(policy, fused, members)
    limit = LIMITS[policy.head_weight.dtype] if policy.is_sharded else LIMITS[torch.float32]
    assert difference <= limit, f"fused layers differ by {difference:.1e}"
    return fused


def _difference(policy: Policy, fused: FusedForward, members: LoRABank | None) -> float:
    """Return the relative difference between fused and original hidden states on a short prompt.

    In half precision, compare a float32 excerpt of the model, so that rounding neither hides nor causes a
    difference. A sharded policy cannot be copied and is compared in its own dtype.
    """
    if fused.fp8 or (policy.head_weight.dtype != torch.float32 and not policy.is_sharded):
        policy = Policy(float32_excerpt(policy.model, tokens=CHECKED_TOKENS), policy.tokenizer)
        fused, members = FusedForward(policy), None
    weight = policy.head_weight
    cache = KVCache(
        layers=policy.layers,
        blocks=1,
        block_size=CHECKED_TOKENS,
        heads=policy.key_heads,
        size=policy.head_size,
        like=weight,
    )
    prefix = Prefix(tokens=tuple(range(CHECKED_TOKENS)), blocks=[0])
    layout = PrefillLayout.build(cache, [Segment(prefix, 0, CHECKED_TOKENS)], device=weight.device)
    tokens_T = torch.arange(CHECKED_TOKENS, device=weight.device) % weight.shape[0]
    positions_T = torch.arange(CHECKED_TOKENS, device=weight.device)
    with policy.without_adapter() if members else nullcontext():
        reference_TM = policy.hidden(tokens_T, positions_T, layout).float()
    fused_TM = fused.hidden(tokens_T, positions_T, layout).float()
    return float((reference_TM - fused_TM).norm() / reference_TM.norm())
