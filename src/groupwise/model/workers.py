"""Threads that work alone: for a small model, independent parts are faster than shared products.

One product of a small model takes microseconds. Threads that share it wait for each other almost as
long; threads with a product each wait for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from groupwise.model.policy import Policy

Item = TypeVar("Item")
Result = TypeVar("Result")

SMALL = 20_000_000
"""Parameters up to which a model is faster in parts."""
MOST = 8
"""Parts get too small to be worth a thread, and each keeps activations and gradients of its own."""


class Workers:
    """Runs a function on several items at a time, each on one thread."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        if count > 1:
            # How many threads torch uses is each thread's own affair, once it has been asked: so the caller
            # keeps its number when the workers name theirs.
            torch.get_num_threads()
            self._pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))

    @classmethod
    def suited_to(cls, policy: Policy) -> Workers:
        """As many as the CPU's threads for a small model; one for a large one, on a GPU, or with dropout.

        Dropout draws from one stream of noise, whose order would depend on who is faster.
        """
        small = sum(p.numel() for p in policy.model.parameters()) <= SMALL
        alone = policy.device.type != "cpu" or not small or policy.has_dropout
        return cls(1 if alone else min(torch.get_num_threads(), MOST))

    def map(self, work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Yield the results in the order of the items."""
        return map(work, items) if self._pool is None else self._pool.map(work, items)
