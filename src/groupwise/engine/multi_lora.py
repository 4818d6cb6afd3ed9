"""Several sets of trained weights for one policy, and generation with all of them.

A member is only the trained tensors: with LoRA, a few megabytes beside one shared base model. Activating a
member swaps pointers and copies nothing. The parameter objects stay the same, so each member's optimizer
keeps working. Rows of several members share a decoding step where layers allow it.

Axes: T rows, I inputs, O outputs, R rank, S = members × rank, P adapted layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from groupwise.config.schema import EngineConfig
from groupwise.engine.cpu_runner import (
    MakeWeight,
    OwnColumns,
    StackedWeight,
    fused_cpu_forward,
    one_rank,
    rank_of,
    rows_of,
)
from groupwise.engine.engine import CompletionSink, Engine
from groupwise.errors import InvariantError
from groupwise.model.adapters.lora import base_of, is_adapted
from groupwise.model.adapters.quantization import is_quantized
from groupwise.model.device import add_product, product
from groupwise.model.policy import Policy, place
from groupwise.records import Completion, Request, Sampling

Answers = list[list[Completion]]
Result = TypeVar("Result")
Weights = dict[str, Tensor]
"""Trained tensors by parameter name."""


class LoRABank:
    """The weights of all members by number; member 0 has the policy's initial weights."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._parameters = policy.trainable()
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self.weights: list[Weights | None] = [
            {name: parameter.data for name, parameter in self._parameters.items()}
        ]
        """None: the member was dropped and its number is free."""

    def __len__(self) -> int:
        return len(self.weights)

    def add(self, weights: Mapping[str, Tensor], *, number: int | None = None) -> int:
        """Add a copy of these weights under a free number and return the number."""
        if number is None:
            number = self.weights.index(None) if None in self.weights else len(self.weights)
        self.weights += [None] * (number + 1 - len(self.weights))
        assert self.weights[number] is None, f"member {number} already exists"
        self.weights[number] = {name: weights[name].detach().clone() for name in self._parameters}
        return number

    def drop(self, number: int) -> None:
        self.weights[number] = None

    def of(self, number: int) -> Weights:
        weights = self.weights[number]
        assert weights is not None, f"member {number} was dropped"
        return weights

    def copies(self, parameter: nn.Parameter) -> Iterator[tuple[int, Tensor]]:
        """Yield each member's number and its tensor for one parameter."""
        name = self._names[id(parameter)]
        for number, weights in enumerate(self.weights):
            if weights is not None:
                yield number, weights[name]

    def put_in_place(self, number: int) -> None:
        """Activate a member: point the policy's parameters to its weights."""
        place(self._parameters, self.of(number))

    def finite(self, number: int) -> bool:
        """Whether all weights of a member are finite."""
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.of(number).values())

    def cpu_weights(self) -> tuple[MakeWeight, OwnColumns]:
        """Return a factory of weights that batch all members, and the selector of each row's adapter.

        The selection is own_TS, with 1 in the columns of a row's own adapter and 0 elsewhere.
        """
        like = self.policy.head_weight
        numbers_S = torch.arange(len(self)).repeat_interleave(one_rank(self.policy)).to(like.device)

        def own(layout: Any) -> Tensor | None:
            adapter_T: Tensor | None = getattr(layout, "adapter_T", None)
            return None if adapter_T is None else (adapter_T[:, None] == numbers_S).to(like.dtype)

        return partial(MultiLoRAWeight, like=like, members=self), own


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
        low_TPS = product(x_TI, self._down_PSI.flatten(0, 1).T).view(len(x_TI), len(self._layers), -1)
        low_TPS *= own_TS[:, None]
        for part, rows in enumerate(self._rows):
            add_product(y_TO[:, rows], low_TPS[:, part], self._up_SO[part])
        return y_TO


def share_storage(stacked: StackedWeight, parts: list[Any]) -> None:
    """Make the layers' weights views of the stacked weight, so memory holds them once."""
    for part, rows in zip(parts, rows_of(parts), strict=True):
        part.weight.data = stacked.weight[rows]


@dataclass(frozen=True, slots=True)
class AdapterEngine:
    """An engine that generates with some members of a population: one of them, or all in one batch."""

    engine: Engine
    prepare: Callable[[], None]
    """Called before every generation."""

    @property
    def unrepeatable(self) -> bool:
        return self.engine.unrepeatable

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Answers:
        self.prepare()
        return self.engine.generate(requests, sampling)

    def converse(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        sink: CompletionSink,
        *,
        tokens: int,
        turns: int,
    ) -> None:
        self.prepare()
        self.engine.converse(requests, sampling, sink, tokens=tokens, turns=turns)


class MultiLoRAEngine:
    """Generates each request with the LoRA adapter whose index it names."""

    def __init__(self, members: LoRABank, config: EngineConfig) -> None:
        self.members = members
        self._shared = Engine(members.policy, config, members)
        self._alone = Engine(members.policy, config)

    @cached_property
    def batched(self) -> bool:
        """Whether rows of several members can share a step: plain LoRA on layers that can be fused."""
        policy = self.members.policy
        if not policy.has_adapter or not policy.plain_adapter:
            return False
        if self._shared.accelerated:
            from groupwise.engine.cuda.fused_layers import fused_forward

            return fused_forward(policy, self.members) is not None
        return fused_cpu_forward(policy, self.members) is not None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Answers:
        """Return each request's completions, in the order of its seeds."""

        def own(engine: AdapterEngine, numbers: Sequence[int]) -> dict[int, Answers]:
            indices = [index for index, request in enumerate(requests) if request.adapter in numbers]
            answers: dict[int, Answers] = {number: [] for number in numbers}
            groups = engine.generate([requests[index] for index in indices], sampling)
            for index, group in zip(indices, groups, strict=True):
                answers[requests[index].adapter].append(group)
            return answers

        answers, broken = self.contained(sorted({request.adapter for request in requests}), own)
        if broken:
            raise InvariantError(next(iter(broken.values())))
        each = {number: iter(groups) for number, groups in answers.items()}
        return [next(each[request.adapter]) for request in requests]

    def contained(
        self, numbers: Sequence[int], work: Callable[[AdapterEngine, Sequence[int]], dict[int, Result]]
    ) -> tuple[dict[int, Result], dict[int, str]]:
        """Return what `work` returns for these members, and the errors of broken members.

        `work` generates with all members in one batch where layers allow it. A NaN in one row stops the whole
        batch, and 0 times a NaN adapter is NaN in other rows too. Then it runs again with each member alone,
        so that a broken member loses only its own results. A single member is faster with its adapter merged.
        """
        if len(numbers) > 1 and self.batched:
            try:
                return work(self._together(), numbers), {}
            except InvariantError:
                self._shared.release()  # the cache may hold NaNs of the broken member
        results: dict[int, Result] = {}
        broken: dict[int, str] = {}
        for number in numbers:
            try:
                results |= work(self.alone(number), (number,))
            except InvariantError as error:
                self._alone.release()
                broken[number] = str(error)
        return results, broken

    def alone(self, number: int) -> AdapterEngine:
        """Return an engine that generates with one member, its adapter merged into the weights."""

        def prepare() -> None:
            self._make_room(self._shared)
            self.members.put_in_place(number)

        return AdapterEngine(self._alone, prepare)

    def _together(self) -> AdapterEngine:
        return AdapterEngine(self._shared, lambda: self._make_room(self._alone))

    def _make_room(self, other: Engine) -> None:
        """Release the other engine's cache on a GPU: a cache takes most of the free memory."""
        if self.members.policy.device.type == "cuda":
            other.release()

    def release(self) -> None:
        """Free the KV caches; the next call allocates them again."""
        self._shared.release()
        self._alone.release()
        if self.members.policy.device.type == "cuda":
            torch.cuda.empty_cache()
