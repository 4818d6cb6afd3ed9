"""Several trained forms of one policy, of which one is in place at a time.

A member is the tensors that training moves, and nothing else: under adapters, some megabytes beside a base
that exists once. Putting a member in place moves pointers, not numbers: the parameters stay the same
objects, so each member's optimizer, which knows them, goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from groupwise.model.policy import Policy, place

Weights = dict[str, Tensor]
"""What training moves, by the parameter's name."""


class LoRABank:
    """The members' weights by number; the policy's own weights are the first member's."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._parameters = policy.trainable()
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self.weights: list[Weights | None] = [
            {name: parameter.data for name, parameter in self._parameters.items()}
        ]
        """None: that member was dropped, and its number is free."""

    def __len__(self) -> int:
        return len(self.weights)

    def add(self, weights: Mapping[str, Tensor], *, number: int | None = None) -> int:
        """Take in a copy of these weights, under a free number, and return it."""
        if number is None:
            number = self.weights.index(None) if None in self.weights else len(self.weights)
        self.weights += [None] * (number + 1 - len(self.weights))
        assert self.weights[number] is None, f"there is a member {number}"
        self.weights[number] = {name: weights[name].detach().clone() for name in self._parameters}
        return number

    def drop(self, number: int) -> None:
        self.weights[number] = None

    def of(self, number: int) -> Weights:
        weights = self.weights[number]
        assert weights is not None, f"member {number} was dropped"
        return weights

    def copies(self, parameter: nn.Parameter) -> Iterator[tuple[int, Tensor]]:
        """Each member's tensor in the place of one parameter, by the member's number."""
        name = self._names[id(parameter)]
        for number, weights in enumerate(self.weights):
            if weights is not None:
                yield number, weights[name]

    def put_in_place(self, number: int) -> None:
        """Make the policy this member."""
        place(self._parameters, self.of(number))

    def finite(self, number: int) -> bool:
        """Whether every weight of a member is a number."""
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.of(number).values())
