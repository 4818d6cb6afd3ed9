"""Weights for generation: projections that share an input as one matmul, with LoRA merged or batched.

Stacking, merging an adapter and dequantizing each need a copy. The copies keep their addresses (CUDA graphs
depend on them) and are refreshed before each call. The values of the policy's weights never change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from groupwise.model.adapters.lora import base_of, effective_weight, is_adapted
from groupwise.model.adapters.lora_bank import LoRABank
from groupwise.model.adapters.quantization import is_quantized
from groupwise.model.policy import Policy


class StackedWeight:
    """One or more linear layers that share an input, as one matmul with adapters merged."""

    def __init__(self, *parts: Any, like: Tensor) -> None:
        self._parts = parts
        base = [base_of(part) for part in parts]
        quantized = [is_quantized(part) for part in base]
        assert all(type(part) is nn.Linear for part in base) or all(quantized), (
            "only plain linear layers can be stacked"
        )
        self._copied = len(parts) > 1 or any(is_adapted(part) for part in parts) or any(quantized)
        self.weight: Tensor = base[0].weight
        self.bias: Tensor | None = base[0].bias
        if self._copied:
            rows = sum(part.out_features for part in base)
            self.weight = torch.empty(rows, base[0].in_features, dtype=like.dtype, device=like.device)
            if self.bias is not None:
                self.bias = torch.empty(rows, dtype=like.dtype, device=like.device)
        self.refresh()

    def refresh(self) -> None:
        """Copy the policy's current weights."""
        if not self._copied:
            return
        start = 0
        for part in self._parts:
            base = base_of(part)
            rows = slice(start, start + base.out_features)
            self.weight[rows].copy_(effective_weight(part))
            if self.bias is not None:
                self.bias[rows].copy_(base.bias)
            start = rows.stop

    def __call__(self, x_TN: Tensor, _own: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x_TN, self.weight, self.bias)


class MultiLoRAWeight:
    """One or more linear layers that share an input; each row applies its own LoRA adapter."""

    def __init__(self, *parts: Any, like: Tensor, members: LoRABank) -> None:
        base = [base_of(part) for part in parts]
        plain = all(type(part) is nn.Linear and not part.weight.requires_grad for part in base)
        self._base = StackedWeight(*base, like=like)
        self._unpacked = any(is_quantized(part) for part in base)
        if plain and len(base) > 1:
            share_storage(self._base, base)
        self._members = members
        adapted = [(part, rows) for part, rows in zip(parts, rows_of(base), strict=True) if is_adapted(part)]
        self._layers = [layer for layer, _ in adapted]
        self._rows = [rows for _, rows in adapted]
        size = len(members) * rank_of(self._layers[0]) if adapted else 0
        inputs = base[0].in_features
        self._down_PSI = torch.zeros(len(adapted), size, inputs, dtype=like.dtype, device=like.device)
        self._up_SO = [
            torch.zeros(size, rows.stop - rows.start, dtype=like.dtype, device=like.device)
            for rows in self._rows
        ]
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the members' current adapters; base weights are shared unless quantized."""
        if self._unpacked:
            self._base.refresh()
        for down_SI, up_SO, layer in zip(self._down_PSI, self._up_SO, self._layers, strict=True):
            (name,) = layer.active_adapters
            rank = rank_of(layer)
            # Clear dropped members: 0 times NaN is NaN.
            down_SI.zero_()
            up_SO.zero_()
            for number, a_RI in self._members.copies(layer.lora_A[name].weight):
                down_SI[number * rank : (number + 1) * rank].copy_(a_RI)
            for number, b_OR in self._members.copies(layer.lora_B[name].weight):
                up_SO[number * rank : (number + 1) * rank].copy_(b_OR.T * layer.scaling[name])

    def __call__(self, x_TI: Tensor, own_TS: Tensor | None = None) -> Tensor:
        y_TO = self._base(x_TI)
        if own_TS is None or not self._layers:
            return y_TO
        low_TPS = (x_TI @ self._down_PSI.flatten(0, 1).T).view(len(x_TI), len(self._layers), -1)
        low_TPS *= own_TS[:, None]
        for part, rows in enumerate(self._rows):
            y_TO[:, rows].addmm_(low_TPS[:, part], self._up_SO[part])
        return y_TO


def share_storage(stacked: StackedWeight, parts: list[Any]) -> None:
    """Make the layers' weights views of the stacked weight, so memory holds them once."""
    for part, rows in zip(parts, rows_of(parts), strict=True):
        part.weight.data = stacked.weight[rows]


def rows_of(parts: list[Any]) -> list[slice]:
    """Return the row range of each layer in the stacked weight."""
    rows, start = [], 0
    for part in parts:
        rows.append(slice(start, start + part.out_features))
        start += part.out_features
    return rows


def rank_of(layer: Any) -> int:
    (name,) = layer.active_adapters
    return int(layer.r[name])


def one_rank(policy: Policy) -> int:
    """Return the LoRA rank, which must be the same in every layer."""
    ranks = {rank_of(layer) for layer in policy.model.modules() if is_adapted(layer)}
    assert len(ranks) == 1, "all layers must have the same LoRA rank"
    return ranks.pop()


class Product(Protocol):
    """Linear layers that share an input, as one matmul; `own` selects the adapter of each row."""

    def __call__(self, x_TI: Tensor, own: Tensor | None = None, /) -> Tensor: ...

    def refresh(self) -> None: ...


class MakeWeight(Protocol):
    """Builds a `Product` from linear layers that share an input."""

    def __call__(self, *parts: Any) -> Product: ...


OwnColumns = Callable[[Any], Tensor | None]
"""Maps a layout to the adapter selection of its rows; None: no adapters. In this module the selection is
own_TS, with 1 in the columns of a row's own adapter and 0 elsewhere."""


def weights_for(policy: Policy, members: LoRABank | None) -> tuple[MakeWeight, OwnColumns]:
    """Return the weight factory of a policy (adapter merged, or all members batched) and the row selector."""
    like = policy.head_weight
    if members is None:
        return partial(StackedWeight, like=like), lambda layout: None
    numbers_S = torch.arange(len(members)).repeat_interleave(one_rank(policy)).to(like.device)

    def own(layout: Any) -> Tensor | None:
        adapter_T: Tensor | None = getattr(layout, "adapter_T", None)
        return None if adapter_T is None else (adapter_T[:, None] == numbers_S).to(like.dtype)

    return partial(MultiLoRAWeight, like=like, members=members), own
