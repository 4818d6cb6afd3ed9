"""What one forward and backward pass of an update works on, and how it is divided when memory runs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from groupwise.algo.packing import MicroBatch, pack
from groupwise.invariants import check_targets
from groupwise.model.transfer import to_device
from groupwise.records import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one pass found, left on its device: a GPU is given the next pass before this one has ended."""

    loss: Tensor
    metrics: dict[str, Tensor]
    logprobs_N: Tensor


@dataclass(frozen=True, slots=True)
class Done:
    """What a mini-batch's passes found: the loss, and sums over tokens."""

    loss: float
    metrics: dict[str, Tensor]

    def on_cpu(self) -> Done:
        """The same, ready to travel to other processes."""
        return replace(self, metrics={name: value.cpu() for name, value in self.metrics.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A micro-batch with what the loss needs besides."""

    members: Sequence[Sample]
    weights: Sequence[float]
    """Of each member's tokens."""
    batch: MicroBatch
    old_N: Tensor | None = None
    reference_N: Tensor | None = None
    idle: bool = False
    """Computed only because others compute meanwhile: it weighs nothing and is not counted."""

    @classmethod
    def build(cls, members: Sequence[Sample], weights: Sequence[float], *, device: torch.device) -> Part:
        batch = pack(members, device=device)
        check_targets(members, batch.targets_N.tolist())
        return cls(members=members, weights=weights, batch=batch)

    @property
    def weights_N(self) -> Tensor:
        weights_S = to_device(np.asarray(self.weights, dtype=np.float32), self.batch.targets_N.device)
        return weights_S[self.batch.sequence_N]

    def halves(self) -> list[Part]:
        """The same work as two parts; one member cannot be divided."""
        middle = len(self.members) // 2
        trained = sum(sample.length for sample in self.members[:middle])
        device = self.batch.targets_N.device

        def half(members: slice, tokens: slice) -> Part:
            part = Part.build(self.members[members], self.weights[members], device=device)
            old_N = None if self.old_N is None else self.old_N[tokens]
            return replace(
                part, old_N=old_N, reference_N=None if self.reference_N is None else self.reference_N[tokens]
            )

        if not middle:
            return [self]
        return [half(slice(middle), slice(trained)), half(slice(middle, None), slice(trained, None))]
