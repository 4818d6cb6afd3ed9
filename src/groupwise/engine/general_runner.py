"""The runner of the general path: the model's own attention and cache, on any device.

Members of a group that start together share a cache with one row each, copied from their prompt's. They have
equal lengths, so that there is no padding. Sampling, scheduling and stopping are those of the fast path.

Axes: R running sequences, B rows of a batch, L tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from groupwise.engine.cpu_runner import Runner
from groupwise.engine.scheduler import Prefix, Scheduler
from groupwise.model.general_forward import copied_rows, kept_rows
from groupwise.model.policy import Policy

if TYPE_CHECKING:
    from groupwise.engine.multi_lora import LoRABank

Stay = tuple[int, int]
"""A slot and how many sequences have left it: a sequence's stay there."""


@dataclass(slots=True)
class DecodeBatch:
    """Sequences that decode together."""

    stays: list[Stay]
    cache: Any


class GeneralRunner:
    """Runs the policy's module as it is, with its own cache."""

    def __init__(self, policy: Policy, *, blocks: int) -> None:
        assert policy.general is not None
        self.policy, self.blocks = policy, blocks
        self.fused, self.members = None, 0
        self._caches = policy.general.caches
        self._prompts: dict[Prefix, Any] = {}
        """Caches of computed prompts."""
        self._batches: list[DecodeBatch] = []

    def ready(self) -> AbstractContextManager[None]:
        """Merge the adapters inside the returned context."""
        self._prompts.clear()
        self._batches.clear()
        return self.policy.merged_adapters()

    def prefill(self, prefixes: Sequence[Prefix]) -> None:
        """Compute prompts and store the next-token logits on each."""
        self._prompts = {p: cache for p, cache in self._prompts.items() if p.logits_V is not None}
        for prefix in prefixes:
            if prefix.history is not None:  # computed again: its cache was reduced to those that went on
                prefix.history.copied, prefix.history = True, None
            tokens_1L = torch.tensor([prefix.tokens], device=self.policy.device)
            hidden_1LM, cache = self.policy.own_hidden(tokens_1L, cache=None if self._caches else False)
            prefix.done, self._prompts[prefix] = len(prefix.tokens), cache
            if prefix.scores is not None:
                prefix.scores.add(self.policy, hidden_1LM[0, :-1], prefix.tokens[1:])
            prefix.logits_V = self.policy.logits(hidden_1LM[0, -1:])[0]

    def decode(self, scheduler: Scheduler) -> Tensor:
        """Run one decode step over all running sequences and return the next-token logits_RV."""
        if not self._caches:
            return self._recompute(scheduler)
        slots = scheduler.slots().tolist()
        row_of = {(slot, int(scheduler.tenant[slot])): row for row, slot in enumerate(slots)}
        self._drop_ended(row_of)
        self._start(scheduler, row_of)
        last = scheduler.length - 1
        logits: list[Tensor] = []
        rows: list[int] = []
        for batch in self._batches:
            own = [slot for slot, _ in batch.stays]
            tokens_B1 = torch.from_numpy(scheduler.tokens[own, last[own]][:, None]).to(self.policy.device)
            hidden_B1M, batch.cache = self.policy.own_hidden(tokens_B1, cache=batch.cache)
            logits.append(self.policy.logits(hidden_B1M[:, -1]))
            rows += [row_of[stay] for stay in batch.stays]
        return torch.cat(logits)[torch.from_numpy(np.argsort(rows)).to(self.policy.device)]

    def _drop_ended(self, row_of: dict[Stay, int]) -> None:
        """Drop the rows of sequences that have left their slots."""
        for batch in self._batches:
            kept = [index for index, stay in enumerate(batch.stays) if stay in row_of]
            if kept and len(kept) < len(batch.stays):
                batch.cache = kept_rows(batch.cache, torch.tensor(kept, device=self.policy.device))
            batch.stays = [batch.stays[index] for index in kept]
        self._batches = [batch for batch in self._batches if batch.stays]

    def _start(self, scheduler: Scheduler, row_of: dict[Stay, int]) -> None:
        """Make a batch of the new sequences of each prompt."""
        known = {stay for batch in self._batches for stay in batch.stays}
        new: dict[Prefix, list[Stay]] = defaultdict(list)
        for stay in row_of:
            if stay not in known:
                new[scheduler.in_slot[stay[0]].prefix].append(stay)
        for prefix, stays in new.items():
            first_B = torch.zeros(len(stays), dtype=torch.int64, device=self.policy.device)
            self._batches.append(DecodeBatch(stays, copied_rows(self._prompts[prefix], first_B)))

    def _recompute(self, scheduler: Scheduler) -> Tensor:
        """`decode` without a cache: compute every sequence from its first token, equal lengths together."""
        same: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        for row, sequence in enumerate(scheduler.running):
            own = scheduler.tokens[sequence.slot, : scheduler.length[sequence.slot]].tolist()
            same[len(sequence.prefix.tokens) + len(own)].append((row, [*sequence.prefix.tokens, *own]))
        logits: list[Tensor] = []
        rows: list[int] = []
        for batch in same.values():
            tokens_BL = torch.tensor([tokens for _, tokens in batch], device=self.policy.device)
            hidden_BLM, _ = self.policy.own_hidden(tokens_BL, cache=False)
            logits.append(self.policy.logits(hidden_BLM[:, -1]))
            rows += [row for row, _ in batch]
        return torch.cat(logits)[torch.from_numpy(np.argsort(rows)).to(self.policy.device)]


def runner_for(
    policy: Policy, *, blocks: int, block_size: int, members: LoRABank | None = None
) -> Runner | GeneralRunner:
    """Return the runner of the policy's path, for any device."""
    if policy.general is not None:
        return GeneralRunner(policy, blocks=blocks)
    return Runner(policy, blocks=blocks, block_size=block_size, members=members)
