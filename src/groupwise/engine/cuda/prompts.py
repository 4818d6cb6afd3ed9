"""Short prompts of a server as CUDA graphs: kernel by kernel, launching a pass takes longer than the pass.

Whole prompts are laid into a row of one of a few sizes, and what is left of it is filled up with a stretch
that nobody reads. All other passes (long prompts, what continues a conversation, scores) run as ever.

Axes: T places of a row, P prompts it may hold, M hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.engine.cuda.graphs import can_be_captured, captured
from groupwise.engine.paged import KVCache
from groupwise.engine.prefill import Forward, PrefillLayout, Prompts, Stretch, places
from groupwise.model.packed import Kind, Parts
from groupwise.model.policy import Policy
from groupwise.model.varlen import VarlenAttention, fits

SIZES = (64, 128, 256, 512, 1024)
PROMPTS = 16


class Row:
    """A pass of one size, in device memory that never moves."""

    def __init__(self, policy: Policy, cache: KVCache, size: int, *, idle_block: int) -> None:
        self.size = size
        self._policy, self._cache = policy, cache
        self._idle = idle_block * cache.block_size
        device = policy.device
        self._whole = torch.zeros(3 * size + PROMPTS, dtype=torch.int64, device=device)
        self._starts = torch.zeros(PROMPTS + 2, dtype=torch.int32, device=device)
        self._logits_PV: Tensor | None = None
        self._run: Callable[[], None] | None = None

    def compute(self, stretches: SequenceOf[Stretch], forward: Forward, pool: Any) -> Tensor:
        """Return the logits after each of these prompts."""
        lengths = self._fill(stretches)
        if self._run is not None:
            self._run()
        else:
            self._pass(lengths, forward)
            if self._whole.is_cuda:
                stream = torch.cuda.current_stream()
                self._run = captured(lambda: self._pass(lengths, forward), stream=stream, pool=pool)
                self._run()
        assert self._logits_PV is not None
        return self._logits_PV[: len(stretches)].clone()  # the next pass writes over them

    def _fill(self, stretches: SequenceOf[Stretch]) -> NDArray[np.int64]:
        """Lay prompts into the row; returns the lengths of all its stretches, the filling last."""
        host = np.zeros(3 * self.size + PROMPTS, dtype=np.int64)
        tokens, positions, at, ends = np.split(host, [self.size, 2 * self.size, 3 * self.size])
        at[:] = self._idle
        lengths = np.zeros(PROMPTS + 1, dtype=np.int64)
        start = 0
        for number, stretch in enumerate(stretches):
            own = slice(start, start + stretch.length)
            tokens[own], positions[own] = stretch.prefix.tokens, np.arange(stretch.length)
            at[own] = places(stretch.prefix.blocks, self._cache.block_size)[: stretch.length]
            lengths[number], start = stretch.length, own.stop
            ends[number] = own.stop - 1
        lengths[-1] = self.size - start
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        for to, array in ((self._whole, host), (self._starts, starts)):
            staged = torch.from_numpy(array)
            to.copy_(staged.pin_memory() if to.is_cuda else staged, non_blocking=True)
        return lengths

    def _pass(self, lengths: NDArray[np.int64], forward: Forward) -> None:
        tokens_T, positions_T, places_T, ends_P = torch.split(
            self._whole, [self.size, self.size, self.size, PROMPTS]
        )
        # A graph reads where stretches begin from the device, each time anew.
        varlen = VarlenAttention(
            starts_q=self._starts,
            starts_k=self._starts,
            longest_q=self.size,
            longest_k=self.size,
            causal=True,
        )
        parts: dict[Kind, Parts] = {VarlenAttention: (varlen, None)}
        nothing = np.zeros(0, dtype=np.int64)
        layout = PrefillLayout(
            cache=self._cache,
            places=places_T,
            lengths=lengths,
            before=nothing,
            before_places=places_T[:0],
            device=self._whole.device,
            _parts=parts,
        )
        hidden_TM = forward(tokens_T, positions_T, layout)
        self._logits_PV = self._policy.logits(hidden_TM[ends_P])


class PromptGraphs(Prompts):
    """Computes prompts; a few short ones at once."""

    def __init__(self, policy: Policy, cache: KVCache, *, idle_block: int) -> None:
        super().__init__(policy, cache)
        self._idle_block = idle_block
        query_THD = policy.head_weight.new_empty(0, policy.heads, policy.head_size)
        self._possible = (fits(query_THD) or not query_THD.is_cuda) and can_be_captured(policy)
        """Where prompts are padded instead, the host must know their lengths."""
        self._rows: dict[int, Row] = {}
        self._pool: Any = None

    def _pass(self, stretches: SequenceOf[Stretch], forward: Forward) -> None:
        total = sum(stretch.length for stretch in stretches)
        size = next((size for size in SIZES if total <= size), None)
        plain = all(s.start == 0 and s.complete and s.prefix.scores is None for s in stretches)
        if size is None or not (self._possible and plain) or len(stretches) > PROMPTS:
            super()._pass(stretches, forward)
            return
        if size not in self._rows:
            self._rows[size] = Row(self.policy, self.cache, size, idle_block=self._idle_block)
        if self.policy.device.type == "cuda":
            self._pool = self._pool or torch.cuda.graph_pool_handle()
        logits_PV = self._rows[size].compute(stretches, forward, self._pool)
        for stretch, logits_V in zip(stretches, logits_PV, strict=True):
            stretch.prefix.done, stretch.prefix.logits_V = stretch.end, logits_V
