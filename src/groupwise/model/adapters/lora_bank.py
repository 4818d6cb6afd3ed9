"""Several sets of trained weights for one policy, one of them active at a time.

A member is only the trained tensors: with LoRA, a few megabytes beside one shared base model. Activating a
member swaps pointers and copies nothing. The parameter objects stay the same, so each member's optimizer
keeps working.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from groupwise.model.policy import Policy, place

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
