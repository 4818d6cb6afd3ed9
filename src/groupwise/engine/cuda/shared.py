"""Matrices of several members on a GPU: one product for the base and everyone's way down, one kernel up.

The first factors of all adapters are further rows of the base's own matrix, so that going down costs no
product of its own. A kernel then adds each row's way up, and looks at its own adapter only: rows of one
member are neighbours, so that a block of rows reads little more than what it needs.

Axes: T rows, I inputs, O outputs, R rank, S = members × rank.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from groupwise.engine.cuda.launch import launch, padded
from groupwise.engine.cuda.weights import Matrix
from groupwise.engine.shared import MakeMatrix, OwnColumns, one_rank, rank_of, rows_of
from groupwise.model.lora import base_of, is_adapted
from groupwise.model.members import Members
from groupwise.model.policy import Policy
from groupwise.model.quantized import plain_weight

ROWS, COLUMNS = 64, 128
"""What a program works on: rows and outputs."""


@triton.jit
def add_own(
    Y, UP, ADAPTER, PARTS, rows, y_stride, low_at, up_stride,
    SIZE: tl.constexpr, RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program a (block of rows, block of outputs, part): add what each row's own adapter gives.

    PARTS: of each part, where its outputs begin and how many there are. What adapters made of the input
    stands behind the outputs, SIZE columns a part. Rows of nobody have the adapter -1.
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


class GraphMatrix:
    """One or more linear layers of one input, under the adapters of all members."""

    def __init__(self, *parts: Any, like: Tensor, members: Members) -> None:
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
                part.weight.data = self._weight[own]  # the same numbers, held once
        self._up_SO = torch.zeros(self._size, self._outputs, **kind)
        spans = [[own.start, own.stop - own.start] for _, own in self._adapted]
        self._spans = torch.tensor(spans, dtype=torch.int32, device=like.device)
        self._widest = max((width for _, width in spans), default=0)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the members' adapters as they are now; what dropped members had is gone."""
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


def graph_matrices_for(policy: Policy, members: Members | None) -> tuple[MakeMatrix, OwnColumns]:
    """How to make a policy's matrices, and whose adapter each row of a layout takes."""
    like = policy.head_weight
    if members is None:
        return partial(Matrix, like=like), lambda layout: None
    one_rank(policy)
    return partial(GraphMatrix, like=like, members=members), lambda layout: layout.adapter_T
