"""Answers for all members of a population, in one batch where the model's layers allow it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from groupwise.config.schema import EngineConfig
from groupwise.engine.cpu_runner import fused_cpu_forward
from groupwise.engine.engine import Engine
from groupwise.errors import InvariantError
from groupwise.model.adapters.lora_bank import LoRABank
from groupwise.records import Completion, Request, Sampling

Answers = list[list[Completion]]


class MultiLoRAEngine:
    """Each request is answered by the member whose number it names."""

    def __init__(self, members: LoRABank, config: EngineConfig) -> None:
        self.members = members
        self._shared = Engine(members.policy, config, members)
        self._alone = Engine(members.policy, config)

    @cached_property
    def batched(self) -> bool:
        """Whether rows of several members can share a step: plain adapters on layers of a known kind."""
        policy = self.members.policy
        if not policy.has_adapter or not policy.plain_adapter:
            return False
        if self._shared.accelerated:
            from groupwise.engine.cuda.fused_layers import fused_forward

            return fused_forward(policy, self.members) is not None
        return fused_cpu_forward(policy, self.members) is not None

    @property
    def unrepeatable(self) -> bool:
        return self._shared.unrepeatable

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Answers:
        """Return each request's completions, in the order of its seeds."""
        if self._share(requests):
            return self._mixed(requests, sampling)
        answers, broken = self._one_by_one(requests, sampling)
        if broken:
            raise InvariantError(next(iter(broken.values())))
        return answers

    def contained(self, requests: Sequence[Request], sampling: Sampling) -> tuple[Answers, dict[int, str]]:
        """The same, but a member that breaks loses its own answers only; also returns why, by its number.

        One row that is no number stops a whole batch, and 0 times its adapter is no number for the other
        rows either: then everyone is asked alone.
        """
        if self._share(requests):
            try:
                return self._mixed(requests, sampling), {}
            except InvariantError:
                self._shared.release()  # what a broken member left in the cache stays broken
        return self._one_by_one(requests, sampling)

    def _share(self, requests: Sequence[Request]) -> bool:
        """One member by itself is faster with its adapter merged."""
        return len({request.adapter for request in requests}) > 1 and self.batched

    def alone(self, number: int, requests: Sequence[Request], sampling: Sampling) -> Answers:
        """One member's answers by themselves, its adapter mergedto the weights."""
        self._make_room(self._shared)
        self.members.put_in_place(number)
        return self._alone.generate(requests, sampling)

    def _mixed(self, requests: Sequence[Request], sampling: Sampling) -> Answers:
        self._make_room(self._alone)
        return self._shared.generate(requests, sampling)

    def _make_room(self, other: Engine) -> None:
        """On a GPU a cache takes what is free, so there is one at a time."""
        if self.members.policy.device.type == "cuda":
            other.release()

    def _one_by_one(self, requests: Sequence[Request], sampling: Sampling) -> tuple[Answers, dict[int, str]]:
        answers: Answers = [[] for _ in requests]
        broken: dict[int, str] = {}
        for number in sorted({request.adapter for request in requests}):
            own = [index for index, request in enumerate(requests) if request.adapter == number]
            try:
                found = self.alone(number, [requests[index] for index in own], sampling)
            except InvariantError as error:
                self._alone.release()
                broken[number] = str(error)
                continue
            for index, completions in zip(own, found, strict=True):
                answers[index] = completions
        return answers, broken

    def release(self) -> None:
        """Give back the memory of the cache until the next call."""
        self._shared.release()
        self._alone.release()
        if self.members.policy.device.type == "cuda":
            torch.cuda.empty_cache()
