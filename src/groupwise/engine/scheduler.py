"""Which sequences run, and which blocks of the KV cache they hold.

A `BlockPool` holds the free blocks. The members of a group share those of their prompt (`Prefix`); a finished
turn keeps its own for the next turn (`History`). The `Scheduler` admits, grows, preempts and releases.

Sequences occupy numbered slots. Arrays indexed by slot hold everything the runner needs, so a step
over hundreds of sequences costs a handful of numpy operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.engine.sampler import PromptLogprobs, TokenMasks
from groupwise.model.token_grammar import TokenGrammar
from groupwise.records import Completion, Finish, Request


class BlockPool:
    """A fixed number of blocks; allocation is deterministic."""

    def __init__(self, count: int, *, block_size: int) -> None:
        self.count = count
        self.block_size = block_size
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        assert count <= len(self._free), "the scheduler must check for free blocks before it takes them"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        self._free.extend(reversed(blocks))
        assert len(self._free) <= self.count, "a block was given back twice"


@dataclass(slots=True, eq=False)
class Prefix:
    """A prompt in the cache, shared by every running member of its group.

    Members append to blocks of their own, so a shared block is written only once. Blocks and logits
    are allocated with the first member and freed with the last.
    """

    tokens: tuple[int, ...]
    blocks: list[int] = field(default_factory=list)
    users: int = 0
    """Reference count: running members and histories."""
    done: int = 0
    """Tokens whose keys and values are in the blocks."""
    logits_V: Tensor | None = None
    """Logits of the token after the prompt; None: prefill is incomplete."""
    history: History | None = None
    """A finished sequence whose cached keys and values begin this prompt."""
    adapter: int = 0
    """Index of the LoRA adapter that computes it."""
    scores: PromptLogprobs | None = None
    """Receives the prompt's log-probabilities, if requested."""

    def clear(self) -> list[int]:
        """Discard the computed state and return its blocks."""
        blocks, self.blocks = self.blocks, []
        self.done, self.logits_V, self.history = 0, None, None
        return blocks


@dataclass(slots=True, eq=False)
class History:
    """A finished sequence whose keys and values stay cached for a prompt that continues it."""

    prefix: Prefix
    blocks: list[int]
    length: int
    """Tokens after the prompt whose keys and values were computed: all but the last."""
    copied: bool = False
    """Whether its continuation has copied the keys and values."""
    evicted: bool = False
    """Whether its blocks have been freed."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion of a request in progress; `member` is its index in the request's group."""

    request: int
    member: int
    seed: int
    prefix: Prefix
    blocks: list[int] = field(default_factory=list)
    slot: int = -1
    """-1: not running."""
    temperature: float | None = None
    """Overrides the call's sampling temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FutureRequests:
    """Upper bounds on the requests that may be added during a call."""

    requests: int = 0
    longest: int = 0
    """Tokens in the longest prompt."""


NONE = FutureRequests()


class Scheduler:
    """Continuous batching: a finished sequence's slot and blocks go to the next waiting one at once.

    The pool must hold the longest prompt plus `max_tokens`. Then the oldest sequence can always
    proceed, so every sequence finishes eventually.
    """

    def __init__(
        self,
        requests: SequenceOf[Request],
        *,
        slots: int,
        pool: BlockPool,
        max_tokens: int,
        future: FutureRequests = NONE,
        grammar: TokenGrammar | None = None,
    ) -> None:
        self.pool = pool
        self._grammar = grammar
        self.masks = TokenMasks(slots, pinned=torch.cuda.is_available())
        """The tokens that each sequence may sample next."""
        self.running: list[Sequence] = []
        """Always ordered by request and member: admission appends, preemption removes the last."""
        self.in_slot: dict[int, Sequence] = {}
        """Running sequences by slot."""
        self._slots: NDArray[np.int64] | None = None
        """Cached result of `slots()`; None after a sequence starts or leaves."""
        self.waiting: deque[Sequence] = deque()
        self._requests = 0
        """Requests added so far."""
        self.preempted = 0
        """Number of preemptions."""
        self.tenant = np.zeros(slots, dtype=np.int64)
        """Sequences that have left each slot: identifies the sequence that a late result belongs to."""
        self._crowded = False
        self._keep_histories = future.requests > 0
        self._histories: dict[tuple[int, int], History] = {}
        """KV blocks of finished sequences, by request and member, oldest first."""
        self._prepared: list[Prefix] = []
        """Prompts that hold blocks but have no running member yet."""
        self._free_slots = list(range(slots - 1, -1, -1))
        self.request = np.zeros(slots, dtype=np.int64)
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.adapter = np.zeros(slots, dtype=np.int64)
        self.temperature = np.full(slots, np.nan, dtype=np.float32)
        """Per-sequence temperature; NaN: use the call's."""
        self.length = np.zeros(slots, dtype=np.int64)
        """Tokens sampled so far."""
        self.limit = np.full(slots, max_tokens, dtype=np.int64)
        """Maximum completion length of each slot's sequence."""
        self.room = np.zeros(slots, dtype=np.int64)
        """Tokens that fit in the sequence's own blocks."""
        self.tables = np.zeros((slots, pool.blocks_for(max_tokens)), dtype=np.int64)
        """Block table of each slot's own tokens; entries past its length are stale and masked."""
        self.tokens = np.zeros((slots, max_tokens), dtype=np.int64)
        self.logprobs = np.zeros((slots, max_tokens), dtype=np.float32)
        self.entropies = np.zeros((slots, max_tokens), dtype=np.float32)
        longest = max(future.longest, *(len(request.prompt) for request in requests), 0)
        self.prompt_length = np.zeros(len(requests) + future.requests, dtype=np.int64)
        """Indexed by request, like `prompt_tables`."""
        self.prompt_tables = np.zeros((len(self.prompt_length), pool.blocks_for(longest)), dtype=np.int64)
        self.add(requests)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, requests: SequenceOf[Request]) -> None:
        """Append requests to the waiting queue; numbering continues."""
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

    def grammar_of(self, sequence: Sequence) -> TokenGrammar | None:
        """Return the grammar that a sequence must match."""
        return self._grammar

    def temperatures(self, slots_N: NDArray[np.int64], usual: float) -> NDArray[np.float32]:
        """Return the temperature of the sequence in each slot; `usual` is the call's."""
        own_N = self.temperature[slots_N]
        return np.where(np.isnan(own_N), np.float32(usual), own_N)

    def slots(self) -> NDArray[np.int64]:
        """Return the slot of every running sequence, in order."""
        if self._slots is None:
            self._slots = np.array([sequence.slot for sequence in self.running], dtype=np.int64)
        return self._slots

    def contexts(self, slots_N: NDArray[np.int64]) -> Iterator[list[int]]:
        """Yield the tokens so far of the sequence in each slot, prompt included."""
        for slot in slots_N.tolist():
            yield [*self.in_slot[slot].prefix.tokens, *self.tokens[slot, : self.length[slot]].tolist()]

    @property
    def vacant(self) -> int:
        """Number of free slots."""
        return len(self._free_slots)

    def admit(self) -> list[Sequence]:
        """Start waiting sequences while slots and blocks last; each gets its prompt and one block.

        After a preemption, admit none until a sequence finishes: running ones need the free blocks.
        """
        self._sweep()
        already = len(self.running)
        while self.waiting and self._free_slots and not (self._crowded and self.running):
            prefix = self.waiting[0].prefix
            if prefix.blocks and prefix.logits_V is None and not prefix.users:
                return self.running[already:]  # its prefill is in progress
            needed = 1 + (0 if prefix.blocks else self.pool.blocks_for(len(prefix.tokens)))
            while self.pool.free < needed and self._reclaim(but=prefix):
                pass
            if self.pool.free < needed:
                break
            self._start(self.waiting.popleft())
        assert self.running or not self.waiting, "the pool cannot hold one sequence"
        return self.running[already:]

    def prepare(self, tokens: int) -> list[Prefix]:
        """Allocate blocks to the next prompts, up to `tokens` in total or one prompt, for one prefill.

        Leave a quarter of the pool to running sequences.
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

    def blocks_to_add(self, extra: int = 0) -> NDArray[np.int64]:
        """Return how many blocks each running sequence lacks for its last token and `extra` drafts."""
        slots = self.slots()
        needed = np.minimum(self.length[slots] + extra, self.limit[slots]) - self.room[slots]
        return -(-np.maximum(needed, 0) // self.pool.block_size)

    def make_room(self, extra: int = 0) -> None:
        """Add the blocks that running sequences lack; preempt the newest sequences if necessary.

        A preempted sequence restarts later. Its noise depends only on seed and position, so it samples
        the same tokens again.
        """
        blocks = self.blocks_to_add(extra)
        for sequence, count in [(self.running[row], int(blocks[row])) for row in np.flatnonzero(blocks)]:
            while sequence.slot >= 0 and count:
                if self.pool.free:
                    self._grow(sequence)
                    count -= 1
                elif not self._reclaim():
                    self._preempt(self.running[-1])

    def finish(self, sequence: Sequence, reason: Finish) -> Completion:
        """Release a sequence and return its completion."""
        slot, length = sequence.slot, int(self.length[sequence.slot])
        completion = Completion(
            tokens=tuple(self.tokens[slot, :length].tolist()),
            logprobs=tuple(self.logprobs[slot, :length].tolist()),
            entropies=tuple(self.entropies[slot, :length].tolist()),
            finish=reason,
        )
        self._vacate(sequence)
        if self._keep_histories:
            key, blocks = (sequence.request, sequence.member), sequence.blocks
            self._histories[key] = History(sequence.prefix, blocks, length - 1)
            sequence.blocks = []
        else:
            self._give_back(sequence)
        self._crowded = False
        return completion

    def drop_histories(self) -> None:
        """Free the blocks of finished sequences; no request will continue them."""
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
        self.masks.start(slot, self.grammar_of(sequence))
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
        """Free blocks that can be recomputed; return False if there are none.

        Prefer the oldest history, then the prepared prompt that is last in the queue.
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
        """Free histories that a continuation has copied."""
        for key in [key for key, history in self._histories.items() if history.copied]:
            self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        history = self._histories.pop(key)
        self.pool.give_back(history.blocks)
        history.evicted = True
        self._release_prefix(history.prefix)

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
        self._release_prefix(sequence.prefix)

    def _release_prefix(self, prefix: Prefix) -> None:
        prefix.users -= 1
        if not prefix.users:
            self.pool.give_back(prefix.clear())
