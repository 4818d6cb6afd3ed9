"""Which sequences run: admission, growth, preemption and release.

Sequences live in numbered slots; everything the runner needs of them is kept in arrays indexed by
slot, so a step over hundreds of sequences costs a handful of numpy operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from groupwise.engine.blocks import BlockPool, Prefix
from groupwise.errors import ConfigError
from groupwise.records import Completion, Finish, Request


@dataclass(slots=True, eq=False)
class Sequence:
    """One member of one request."""

    request: int
    member: int
    seed: int
    prefix: Prefix
    blocks: list[int] = field(default_factory=list)
    slot: int = -1


class Scheduler:
    """Continuous batching: a finished sequence's slot and blocks go to the next in line at once."""

    def __init__(self, requests: SequenceOf[Request], *, slots: int, pool: BlockPool, max_tokens: int) -> None:
        self.pool = pool
        self.max_tokens = max_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of admission, so members of a group are neighbours."""
        for r, request in enumerate(requests):
            prefix = Prefix(tokens=request.prompt, waiting=len(request.seeds))
            for m, seed in enumerate(request.seeds):
                self.waiting.append(Sequence(r, m, seed, prefix))
        self._free_slots = list(range(slots - 1, -1, -1))
        self.length = np.zeros(slots, dtype=np.int64)
        """Tokens sampled so far."""
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.tables = np.zeros((slots, pool.blocks_for(max_tokens)), dtype=np.int64)
        """Own blocks of each slot; entries past its length are stale and masked."""
        self.tokens = np.zeros((slots, max_tokens), dtype=np.int64)
        self.logprobs = np.zeros((slots, max_tokens), dtype=np.float32)
        self.entropies = np.zeros((slots, max_tokens), dtype=np.float32)

    def admit(self) -> list[Sequence]:
        """Start waiting sequences while slots and blocks last; each has room for its first block."""
        admitted: list[Sequence] = []
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            prefix = sequence.prefix
            prompt_blocks = 0 if prefix.blocks else self.pool.blocks_for(len(prefix.tokens))
            if self.pool.free < prompt_blocks + 1:
                break
            self.waiting.popleft()
            prefix.blocks = prefix.blocks or self.pool.take(prompt_blocks)
            prefix.users += 1
            prefix.waiting -= 1
            sequence.slot = self._free_slots.pop()
            self.length[sequence.slot] = 0
            self.seed[sequence.slot] = sequence.seed
            self._grow(sequence)
            self.running.append(sequence)
            admitted.append(sequence)
        if not self.running and self.waiting:
            needed = self.pool.blocks_for(len(self.waiting[0].prefix.tokens)) + 1
            raise ConfigError(
                f"the KV cache has {self.pool.count} blocks and one prompt needs {needed}; raise engine.kv_tokens"
            )
        return admitted

    def make_room(self) -> None:
        """Give every running sequence a place for its next token, preempting the newest when blocks run out.

        A preempted sequence starts over later; its noise depends on position alone, so it draws the
        same tokens again.
        """
        for sequence in list(self.running):
            if sequence.slot < 0 or self.length[sequence.slot] < len(sequence.blocks) * self.pool.block_size:
                continue
            while not self.pool.free:
                newest = self.running[-1]
                if newest is sequence and len(self.running) == 1:
                    raise ConfigError("the KV cache cannot hold even one sequence; raise engine.kv_tokens")
                self._stop(newest)
                newest.prefix.waiting += 1
                self.waiting.appendleft(newest)
                if newest is sequence:
                    break
            if sequence.slot >= 0:
                self._grow(sequence)

    def finish(self, sequence: Sequence, reason: Finish) -> Completion:
        """Release a sequence and return what it wrote."""
        slot, length = sequence.slot, int(self.length[sequence.slot])
        completion = Completion(
            tokens=tuple(self.tokens[slot, :length].tolist()),
            logprobs=tuple(self.logprobs[slot, :length].tolist()),
            entropies=tuple(self.entropies[slot, :length].tolist()),
            finish=reason,
        )
        self._stop(sequence)
        return completion

    def _grow(self, sequence: Sequence) -> None:
        (block,) = self.pool.take(1)
        self.tables[sequence.slot, len(sequence.blocks)] = block
        sequence.blocks.append(block)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.give_back(sequence.blocks)
        self._free_slots.append(sequence.slot)
        sequence.blocks, sequence.slot = [], -1
        prefix = sequence.prefix
        prefix.users -= 1
        if prefix.users == 0:
            self.pool.give_back(prefix.blocks)
            prefix.blocks, prefix.logits_V = [], None
