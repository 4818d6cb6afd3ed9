"""The policy's forward pass over the cache: prompts in, then one token a sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.engine.blocks import Prefix
from groupwise.engine.lean import lean_forward
from groupwise.engine.paged import KVCache, PagedLayout
from groupwise.engine.prefill import Prompts
from groupwise.engine.scheduler import Scheduler
from groupwise.model.members import Members
from groupwise.model.policy import Policy


class Runner:
    """Runs the policy module itself, or a lean form of it, so what generates is what is trained."""

    def __init__(
        self, policy: Policy, *, blocks: int, block_size: int, members: Members | None = None
    ) -> None:
        self.policy = policy
        self.blocks = blocks
        self.lean = lean_forward(policy, members)
        self.members = 0 if members is None else len(members)
        """Adapters that rows may have of their own; 0: the policy's."""
        self._hidden = policy.hidden if self.lean is None else self.lean.hidden
        self.cache = KVCache(
            layers=policy.layers,
            blocks=blocks,
            block_size=block_size,
            heads=policy.key_heads,
            size=policy.head_size,
            like=policy.head_weight,
        )
        self._prompts = Prompts(policy, self.cache, shared=bool(self.members))

    def ready(self) -> AbstractContextManager[None]:
        """Take over the policy's weights, with its adapters folded in, for as long as the block lasts."""
        if self.lean is None:
            return self.policy.folded()
        self.lean.refresh()
        return nullcontext()

    def prefill(self, prefixes: Sequence[Prefix]) -> None:
        """Compute prompts into their blocks and leave the next token's logits on each."""
        self._prompts.compute(prefixes, self._hidden)

    def decode(self, scheduler: Scheduler) -> Tensor:
        """Feed every running sequence its last token and return the logits_RV of the next."""
        slots = scheduler.slots()
        prompt = scheduler.prompt_length[scheduler.request[slots]]
        last = scheduler.length[slots] - 1
        layout = PagedLayout.build(self.cache, scheduler, like=self.policy.head_weight)
        hidden_RM = self._hidden(self._move(scheduler.tokens[slots, last]), self._move(prompt + last), layout)
        return self.policy.logits(hidden_RM)

    def _move(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.policy.device)
