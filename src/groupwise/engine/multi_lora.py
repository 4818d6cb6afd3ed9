"""Multi-LoRA generation: completions of all members of a population, in one batch where layers allow it."""

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
        """Like `generate`, but a broken member loses only its own completions. Also return errors by member.

        A NaN in one row stops the whole batch, and 0 times a NaN adapter is NaN in other rows too. In that
        case, run every member alone.
        """
        if self._share(requests):
            try:
                return self._mixed(requests, sampling), {}
            except InvariantError:
                self._shared.release()  # the cache may hold NaNs of the broken member
        return self._one_by_one(requests, sampling)

    def _share(self, requests: Sequence[Request]) -> bool:
        """Whether to batch members: a single member is faster with its adapter merged."""
        return len({request.adapter for request in requests}) > 1 and self.batched

    def alone(self, number: int, requests: Sequence[Request], sampling: Sampling) -> Answers:
        """Generate with one member, its adapter merged into the weights."""
        self._make_room(self._shared)
        self.members.put_in_place(number)
        return self._alone.generate(requests, sampling)

    def _mixed(self, requests: Sequence[Request], sampling: Sampling) -> Answers:
        self._make_room(self._alone)
        return self._shared.generate(requests, sampling)

    def _make_room(self, other: Engine) -> None:
        """Release the other engine's cache on a GPU: a cache takes most of the free memory."""
        if self.members.policy.device.type == "cuda":
            other.release()

    def _one_by_one(self, requests: Sequence[Request], sampling: Sampling) -> tuple[Answers, dict[int, str]]:
        answers: Answers = [[] for _ in requests]
        broken: dict[int, str] = {}
        for number in sorted({request.adapter for request in requests}):
            own = [index for index, request in enumerate(requests) if request.adapter == number]
            try:
                groups = self.alone(number, [requests[index] for index in own], sampling)
            except InvariantError as error:
                self._alone.release()
                broken[number] = str(error)
                continue
            for index, completions in zip(own, groups, strict=True):
                answers[index] = completions
        return answers, broken

    def release(self) -> None:
        """Free the KV caches; the next call allocates them again."""
        self._shared.release()
        self._alone.release()
        if self.members.policy.device.type == "cuda":
            torch.cuda.empty_cache()
