"""Which sequences run: admission, growth, preemption and release.

Sequences live in numbered slots; everything the runner needs of them is kept in arrays indexed by
slot, so a step over hundreds of sequences costs a handful of numpy operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from groupwise.engine.kv_cache import BlockPool, History, Prefix
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
    """-1: not running."""
    temperature: float | None = None
    """Its own, in place of the call's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FutureRequests:
    """What may be added while sequences run: how many requests, and how long a prompt."""

    requests: int = 0
    longest: int = 0


NONE = FutureRequests()


class Scheduler:
    """Continuous batching: a finished sequence's slot and blocks go to the next in line at once.

    The pool must hold the longest prompt and `max_tokens` behind it: then the oldest sequence always
    gets on, and everyone is the oldest some day.
    """

    def __init__(
        self,
        requests: SequenceOf[Request],
        *,
        slots: int,
        pool: BlockPool,
        max_tokens: int,
        more: FutureRequests = NONE,
    ) -> None:
        self.pool = pool
        self.running: list[Sequence] = []
        """Ordered by request and member, always: who joins comes after, who is preempted is the last."""
        self.in_slot: dict[int, Sequence] = {}
        """The same by slot."""
        self._slots: NDArray[np.int64] | None = None
        """Those slots in order, until someone starts or leaves."""
        self.waiting: deque[Sequence] = deque()
        self._requests = 0
        """Added so far."""
        self.preempted = 0
        """How often a sequence had to start over."""
        self.tenant = np.zeros(slots, dtype=np.int64)
        """How many sequences have left each slot: tells whose a late result is."""
        self._crowded = False
        self._keeps = more.requests > 0
        self._histories: dict[tuple[int, int], History] = {}
        """What finished sequences left in their blocks, by request and member, the oldest first."""
        self._prepared: list[Prefix] = []
        """Prompts that got blocks before any member runs."""
        self._free_slots = list(range(slots - 1, -1, -1))
        self.request = np.zeros(slots, dtype=np.int64)
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.adapter = np.zeros(slots, dtype=np.int64)
        self.temperature = np.full(slots, np.nan, dtype=np.float32)
        """Of its own; nan: the call's."""
        self.length = np.zeros(slots, dtype=np.int64)
        """Tokens sampled so far."""
        self.room = np.zeros(slots, dtype=np.int64)
        """Tokens that fit in its own blocks."""
        self.tables = np.zeros((slots, pool.blocks_for(max_tokens)), dtype=np.int64)
        """Own blocks of each slot; entries past its length are stale and masked."""
        self.tokens = np.zeros((slots, max_tokens), dtype=np.int64)
        self.logprobs = np.zeros((slots, max_tokens), dtype=np.float32)
        self.entropies = np.zeros((slots, max_tokens), dtype=np.float32)
        longest = max(more.longest, *(len(request.prompt) for request in requests), 0)
        self.prompt_length = np.zeros(len(requests) + more.requests, dtype=np.int64)
        """By request, as are the blocks of its prompt."""
        self.prompt_tables = np.zeros((len(self.prompt_length), pool.blocks_for(longest)), dtype=np.int64)
        self.add(requests)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, requests: SequenceOf[Request]) -> None:
        """Let more requests wait; they are numbered on."""
        for r, request in enumerate(requests, start=self._requests):
            self.prompt_length[r] = len(request.prompt)
            history, temperature = self._history_of(request), request.temperature
            prefix = Prefix(tokens=request.prompt, history=history, adapter=request.adapter)
            members = (
                Sequence(r, m, seed, prefix, temperature=temperature) for m, seed in enumerate(request.seeds)
            )
            self.waiting.extend(members)
        self._requests += len(requests)

    def _history_of(self, request: Request) -> History | None:
        history = self._histories.get(request.continues) if request.continues else None
        assert history is None or history.prefix.tokens == request.prompt[: len(history.prefix.tokens)]
        return history

    def temperatures(self, slots_N: NDArray[np.int64], usual: float) -> NDArray[np.float32]:
        """Of the sequences in these slots."""
        own_N = self.temperature[slots_N]
        return np.where(np.isnan(own_N), np.float32(usual), own_N)

    def slots(self) -> NDArray[np.int64]:
        """The slot of every running sequence, in order."""
        if self._slots is None:
            self._slots = np.array([sequence.slot for sequence in self.running], dtype=np.int64)
        return self._slots

    @property
    def vacant(self) -> int:
        """Slots that nobody has."""
        return len(self._free_slots)

    def admit(self) -> list[Sequence]:
        """Start waiting sequences while slots and blocks last; each has room for its first block.

        After a preemption nobody starts until somebody finishes: the others need the room to grow.
        """
        self._sweep()
        already = len(self.running)
        while self.waiting and self._free_slots and not (self._crowded and self.running):
            prefix = self.waiting[0].prefix
            if prefix.blocks and prefix.logits_V is None and not prefix.users:
                return self.running[already:]  # it is being computed
            needed = 1 + (0 if prefix.blocks else self.pool.blocks_for(len(prefix.tokens)))
            while self.pool.free < needed and self._reclaim(but=prefix):
                pass
            if self.pool.free < needed:
                break
            self._start(self.waiting.popleft())
        assert self.running or not self.waiting, "the pool cannot hold one sequence"
        return self.running[already:]

    def prepare(self, tokens: int) -> list[Prefix]:
        """Give blocks to prompts next in line, `tokens` of them or one prompt, to be computed together.

        A quarter of the pool is left to those who run.
        """
        self._sweep()
        prepared: list[Prefix] = []
        for prefix in dict.fromkeys(sequence.prefix for sequence in self.waiting):
            if prefix.blocks:
                continue
            blocks, tokens = self.pool.blocks_for(len(prefix.tokens)), tokens - len(prefix.tokens)
            if (prepared and tokens < 0) or self.pool.free - blocks < self.pool.count // 4:
                break
            prefix.blocks = self.pool.take(blocks)
            prepared.append(prefix)
        self._prepared += prepared
        return prepared

    def make_room(self) -> None:
        """Give every running sequence a place for its last token, preempting the newest when blocks run out.

        A preempted sequence starts over later; its noise depends on position alone, so it draws the
        same tokens again.
        """
        slots = self.slots()
        full = np.flatnonzero(self.length[slots] > self.room[slots])
        for sequence in [self.running[row] for row in full]:
            while sequence.slot >= 0 and not self.pool.free:
                if not self._reclaim():
                    self._preempt(self.running[-1])
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
        self._vacate(sequence)
        if self._keeps:
            key, blocks = (sequence.request, sequence.member), sequence.blocks
            self._histories[key] = History(sequence.prefix, blocks, length - 1)
            sequence.blocks = []
        else:
            self._give_back(sequence)
        self._crowded = False
        return completion

    def drop_histories(self) -> None:
        """Nothing will be continued any more: give back what finished sequences left."""
        for key in list(self._histories):
            self._drop(key)

    def _start(self, sequence: Sequence) -> None:
        prefix, slot = sequence.prefix, self._free_slots.pop()
        if not prefix.blocks:
            prefix.blocks = self.pool.take(self.pool.blocks_for(len(prefix.tokens)))
        elif prefix in self._prepared:
            self._prepared.remove(prefix)
        if not prefix.users:
            self.prompt_tables[sequence.request, : len(prefix.blocks)] = prefix.blocks
        prefix.users += 1
        sequence.slot = slot
        self.request[slot], self.seed[slot] = sequence.request, sequence.seed
        self.adapter[slot] = prefix.adapter
        self.temperature[slot] = np.nan if sequence.temperature is None else sequence.temperature
        self.length[slot] = self.room[slot] = 0
        self._grow(sequence)
        self.running.append(sequence)
        self.in_slot[slot], self._slots = sequence, None

    def _grow(self, sequence: Sequence) -> None:
        (block,) = self.pool.take(1)
        self.tables[sequence.slot, len(sequence.blocks)] = block
        sequence.blocks.append(block)
        self.room[sequence.slot] += self.pool.block_size

    def _preempt(self, sequence: Sequence) -> None:
        self._vacate(sequence)
        self._give_back(sequence)
        self.waiting.appendleft(sequence)
        self.preempted += 1
        self._crowded = True

    def _reclaim(self, *, but: Prefix | None = None) -> bool:
        """Take back blocks that can be computed again; False if there are none.

        First what the oldest sequence left, then a prepared prompt, the last in line.
        """
        for key, history in self._histories.items():
            if but is None or history is not but.history:
                self._drop(key)
                return True
        for prefix in reversed(self._prepared):
            if prefix is not but:
                self._prepared.remove(prefix)
                self.pool.give_back(prefix.clear())
                return True
        return False

    def _sweep(self) -> None:
        """Give back what has been taken over."""
        for key in [key for key, history in self._histories.items() if history.taken]:
            self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        history = self._histories.pop(key)
        self.pool.give_back(history.blocks)
        history.gone = True
        self._part_from(history.prefix)

    def _vacate(self, sequence: Sequence) -> None:
        self.tenant[sequence.slot] += 1
        self.running.remove(sequence)
        del self.in_slot[sequence.slot]
        self._slots = None
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []
        self._part_from(sequence.prefix)

    def _part_from(self, prefix: Prefix) -> None:
        prefix.users -= 1
        if not prefix.users:
            self.pool.give_back(prefix.clear())
