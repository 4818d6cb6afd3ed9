"""What the fused layers read: weights and KV cache in FP8, or weights with the adapters of several members.

FP8 (e4m3): a weight has a scale for each output, its input one for each row. Both multiply the result.

Several adapters: their A matrices are appended as rows to the base weight, so x·A needs no matmul of its
own. A kernel then adds (x·A)·B with each row's own adapter. Rows of one adapter are adjacent, so a block of
rows reads few adapters.

Axes: T rows, I inputs, O outputs, R rank, S = members × rank.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from groupwise.engine.cpu_runner import MakeWeight, OwnColumns, StackedWeight, one_rank, rank_of, rows_of
from groupwise.engine.cuda.attention_kernels import launch, padded, wait_for_previous
from groupwise.engine.paged_attention import KVCache
from groupwise.model.adapters.lora import base_of, effective_weight, is_adapted
from groupwise.model.adapters.quantization import is_quantized, plain_weight
from groupwise.model.policy import Policy

if TYPE_CHECKING:
    from groupwise.engine.multi_lora import LoRABank

FP8 = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)
"""The largest number in FP8."""
SMALLEST = tl.constexpr(1e-12)
"""Stands for the largest element of a row of zeros."""


class FP8Rows(NamedTuple):
    """Rows in FP8, and the scale of each."""

    values_TI: Tensor
    scale_T1: Tensor

    @classmethod
    def empty(cls, rows: int, size: int, device: torch.device) -> FP8Rows:
        return cls(torch.empty(rows, size, dtype=FP8, device=device), torch.empty(rows, 1, device=device))


@triton.jit
def store_scale(SCALE, largest, mask):
    """Store the scales of rows whose largest absolute elements these are; return the inverse scales."""
    largest = tl.maximum(largest, SMALLEST)
    tl.store(SCALE, largest / LARGEST, mask=mask)
    return LARGEST / largest


@triton.jit
def store_fp8(OUT, SCALE, row, at, mask, x, largest, SIZE: tl.constexpr):
    """Store a part of a row in FP8, and the scale of the row; `largest`: its largest absolute element."""
    x *= store_scale(SCALE + row, largest, True)
    tl.store(OUT + row * SIZE + at, x.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def quantize_rows(X, OUT, SCALE, stride, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """One program per row."""
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    mask = at < SIZE
    x = tl.load(X + row * stride + at, mask=mask, other=0.0).to(tl.float32)
    store_fp8(OUT, SCALE, row, at, mask, x, tl.max(tl.abs(x), 0), SIZE)


def in_fp8(x_TI: Tensor) -> FP8Rows:
    """Return rows of float numbers in FP8."""
    rows, size = x_TI.shape
    fp8 = FP8Rows.empty(rows, size, x_TI.device)
    launch(
        quantize_rows,
        (rows,),
        x_TI, *fp8, x_TI.stride(0),
        SIZE=size,
        PADDED=padded(size),
        early=True,
        num_warps=4 if size <= 4096 else 8,
    )  # fmt: skip
    return fp8


class FP8Cache(KVCache):
    """Keys and values in FP8, written by `rotate_and_store` with a scale for each token and head."""

    def __init__(self, *, like: Tensor, **shape: int) -> None:
        super().__init__(like=like.new_empty(0, dtype=FP8), **shape)
        self.scales = torch.zeros(2, *self.keys.shape[:-1], device=like.device)
        """Of the keys, then of the values."""
        self._dtype = like.dtype

    def rows(self, layer: int, slots_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (k_NKD, v_NKD) in these slots, in the dtype of the model."""
        k_NKD, v_NKD = (
            stored[layer].view(torch.uint8).flatten(0, 1).index_select(0, slots_N).view(FP8)
            for stored in (self.keys, self.values)
        )
        k_scale, v_scale = self.scales[:, layer].flatten(1, 2).index_select(1, slots_N)[..., None]
        return (k_NKD.float() * k_scale).to(self._dtype), (v_NKD.float() * v_scale).to(self._dtype)

    def copy(self, from_N: Tensor, to_N: Tensor) -> None:
        for stored in (self.keys.view(torch.uint8), self.values.view(torch.uint8), *self.scales):
            flat = stored.flatten(1, 2)
            flat.index_copy_(1, to_N, flat.index_select(1, from_N))


def layer_of(cache: KVCache, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the keys and values of a layer and their scales; without scales, the former again."""
    keys, values = cache.keys[layer], cache.values[layer]
    scales = cache.scales[:, layer] if isinstance(cache, FP8Cache) else (keys, values)
    return keys, values, scales[0], scales[1]


class FP8Weight:
    """One or more linear layers that share an input, as one FP8 matmul with adapters merged."""

    def __init__(self, *parts: Any, like: Tensor) -> None:
        base = [base_of(part) for part in parts]
        assert all(type(part) is nn.Linear or is_quantized(part) for part in base), (
            "only plain linear layers can be multiplied in FP8"
        )
        rows, inputs = rows_of(base), base[0].in_features
        assert inputs % 16 == rows[-1].stop % 16 == 0, (
            "FP8 needs layers with multiples of 16 inputs and outputs"
        )
        self._parts = list(zip(parts, rows, strict=True))
        self._dtype = like.dtype
        self._weight_OI = torch.empty(rows[-1].stop, inputs, dtype=FP8, device=like.device)
        self._scale_1O = torch.empty(1, rows[-1].stop, device=like.device)
        self._bias_O = None if base[0].bias is None else torch.empty_like(self._scale_1O[0], dtype=like.dtype)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Convert the policy's current weights."""
        for part, own in self._parts:
            weight_OI = effective_weight(part).float()
            scale_O1 = weight_OI.abs().amax(1, keepdim=True).clamp_min(SMALLEST.value) / LARGEST.value
            self._weight_OI[own].copy_(weight_OI / scale_O1)
            self._scale_1O[0, own].copy_(scale_O1[:, 0])
            if self._bias_O is not None:
                self._bias_O[own].copy_(base_of(part).bias)

    def __call__(self, x: Tensor | FP8Rows, _own: Tensor | None = None) -> Tensor:
        rows = in_fp8(x) if isinstance(x, Tensor) else x
        return torch._scaled_mm(
            rows.values_TI,
            self._weight_OI.T,
            scale_a=rows.scale_T1,
            scale_b=self._scale_1O,
            bias=self._bias_O,
            out_dtype=self._dtype,
            use_fast_accum=True,
        )


ROWS, COLUMNS = 64, 128
"""Tile of one program: rows and outputs."""


@triton.jit
def add_own(
    Y, UP, ADAPTER, PARTS, rows, y_stride, low_at, up_stride,
    SIZE: tl.constexpr, RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program per (block of rows, block of outputs, part): add the output of each row's own adapter.

    PARTS holds the start and the width of each part's outputs. The products x·A are stored after the outputs,
    SIZE columns per part. Rows without an adapter have the index -1.
    """
    part = tl.program_id(2)
    start, width = tl.load(PARTS + 2 * part), tl.load(PARTS + 2 * part + 1)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if tl.program_id(1) * COLUMNS < width:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        rank = tl.arange(0, PADDED)
        line = Y + row[:, None].to(tl.int64) * y_stride
        mask = (row < rows)[:, None] & (column < width)[None, :]
        to = line + start + column[None, :]
        adapter = tl.load(ADAPTER + row, mask=row < rows, other=-1)
        total = tl.load(to, mask=mask, other=0.0).to(tl.float32)
        last = tl.max(adapter, 0)
        first = tl.maximum(tl.min(tl.where(adapter < 0, last, adapter), 0), 0)
        for number in range(first, last + 1):
            own = (adapter == number)[:, None] & (rank < RANK)[None, :]
            low = tl.load(line + low_at + part * SIZE + number * RANK + rank[None, :], mask=own, other=0.0)
            there = (rank < RANK)[:, None] & (column < width)[None, :]
            at = (number * RANK + rank)[:, None] * up_stride + start + column[None, :]
            total += tl.dot(low, tl.load(UP + at, mask=there, other=0.0), input_precision="ieee")
        tl.store(to, total.to(Y.dtype.element_ty), mask=mask)


class MultiLoRAGraphWeight:
    """One or more linear layers that share an input, with the LoRA adapters of all members."""

    def __init__(self, *parts: Any, like: Tensor, members: LoRABank) -> None:
        base = [base_of(part) for part in parts]
        rows = rows_of(base)
        self._members, self._outputs = members, rows[-1].stop
        self._adapted = [(part, own) for part, own in zip(parts, rows, strict=True) if is_adapted(part)]
        self._rank = rank_of(self._adapted[0][0]) if self._adapted else 1
        self._size = len(members) * self._rank
        total = self._outputs + len(self._adapted) * self._size
        kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        self._weight = torch.zeros(total, base[0].in_features, **kind)
        self._bias = None if base[0].bias is None else torch.zeros(total, **kind)
        for part, own in zip(base, rows, strict=True):
            self._weight[own].copy_(plain_weight(part))
            if self._bias is not None:
                self._bias[own].copy_(part.bias)
            if type(part) is nn.Linear and not part.weight.requires_grad:
                part.weight.data = self._weight[own]  # share the storage
        self._up_SO = torch.zeros(self._size, self._outputs, **kind)
        spans = [[own.start, own.stop - own.start] for _, own in self._adapted]
        self._spans = torch.tensor(spans, dtype=torch.int32, device=like.device)
        self._widest = max((width for _, width in spans), default=0)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the members' current adapters and zero those of dropped members."""
        self._weight[self._outputs :].zero_()
        self._up_SO.zero_()
        rank = self._rank
        for part, (layer, own) in enumerate(self._adapted):
            (name,) = layer.active_adapters
            below = self._weight[self._outputs + part * self._size :]
            for number, a_RI in self._members.copies(layer.lora_A[name].weight):
                below[number * rank : (number + 1) * rank].copy_(a_RI)
            for number, b_OR in self._members.copies(layer.lora_B[name].weight):
                self._up_SO[number * rank : (number + 1) * rank, own].copy_(b_OR.T * layer.scaling[name])

    def __call__(self, x_TI: Tensor, adapter_T: Tensor | None = None) -> Tensor:
        y_TN = nn.functional.linear(x_TI, self._weight, self._bias)
        if adapter_T is not None and self._adapted:
            blocks = (-(-len(y_TN) // ROWS), -(-self._widest // COLUMNS), len(self._adapted))
            launch(
                add_own,
                blocks,
                y_TN, self._up_SO, adapter_T, self._spans,
                len(y_TN), y_TN.stride(0), self._outputs, self._up_SO.stride(0),
                SIZE=self._size,
                RANK=self._rank,
                PADDED=padded(self._rank),
                ROWS=ROWS,
                COLUMNS=COLUMNS,
                num_warps=4,
            )  # fmt: skip
        return y_TN[:, : self._outputs]


def graph_weights_for(
    policy: Policy, members: LoRABank | None, *, fp8: bool = False
) -> tuple[MakeWeight, OwnColumns]:
    """Return the weight factory of a policy and the function that gives each row's adapter index."""
    like = policy.head_weight
    assert members is None or not fp8, "the adapters of several members are not multiplied in FP8"
    if members is None:
        return partial(FP8Weight if fp8 else StackedWeight, like=like), lambda layout: None
    one_rank(policy)
    return partial(MultiLoRAGraphWeight, like=like, members=members), lambda layout: layout.adapter_T
