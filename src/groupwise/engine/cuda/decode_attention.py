"""The device state of a decode step, and attention over the paged cache.

The state lives in static device memory because CUDA graphs hold addresses. The host decides which sequences
run and which blocks they use; the device advances each sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.engine.cuda import attention_kernels as kernels
from groupwise.engine.cuda.attention_kernels import launch, padded
from groupwise.engine.cuda.graph_weights import FP8Cache, layer_of
from groupwise.engine.paged_attention import KVCache
from groupwise.engine.sampler import MOST_ALTERNATIVES, likeliest
from groupwise.engine.scheduler import Scheduler
from groupwise.model.attention.hf_interface import STANDARD, AttentionVariant


def bucket(rows: int) -> int:
    """Return the batch size to capture a graph for: a trade-off between graphs and idle rows."""
    step = 1 if rows <= 2 else 4 if rows <= 16 else 16 if rows <= 64 else 64
    return -(-rows // step) * step


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The sizes for which a runner has allocated memory."""

    slots: int
    blocks: int
    prompt_blocks: int
    own_blocks: int
    largest_group: int

    @classmethod
    def of(cls, scheduler: Scheduler) -> Capacity:
        """Return the capacity a scheduler needs, some sizes rounded up so that similar calls can reuse it.

        A runner of an earlier call may be larger. With deterministic kernels its size must not change the
        order of sums, because a resumed run has not made the same calls: slots are then a whole bucket, and
        tiles of prompts are as large as they can be.
        """
        groups = Counter(sequence.request for sequence in scheduler.waiting)
        slots, largest = len(scheduler.length), padded(max(groups.values()), least=1)
        if torch.are_deterministic_algorithms_enabled():
            slots, largest = bucket(slots), TILE
        return cls(
            slots=slots,
            blocks=scheduler.pool.count,
            prompt_blocks=padded(scheduler.prompt_tables.shape[1], least=1),
            own_blocks=padded(scheduler.tables.shape[1], least=1),
            largest_group=largest,
        )

    def holds(self, other: Capacity) -> bool:
        return (
            self.slots >= other.slots
            and self.blocks >= other.blocks
            and self.prompt_blocks >= other.prompt_blocks
            and self.own_blocks >= other.own_blocks
            and self.largest_group >= other.largest_group
        )


class StepState:
    """Per-slot state, with one extra slot for idle rows: marked as ended, and with a dummy block."""

    def __init__(
        self,
        *,
        slots: int,
        members: int,
        prompt_blocks: int,
        own_blocks: int,
        idle_block: int,
        device: torch.device,
        rows: int = 0,
    ) -> None:
        self.slots, self.members, self.idle_block = slots, members, idle_block
        self.rows_of_a_step = rows = max(slots, rows)
        """Most rows of a step: more than slots if a sequence may have several."""
        self.prompt_width, self.own_width = prompt_blocks, own_blocks
        every = _aligned(slots + 1)
        sizes = [
            _aligned(size)
            for size in (rows, rows * (members + 2), every, every, every * prompt_blocks, every * own_blocks)
        ]
        self._host = np.zeros(sum(sizes), dtype=np.int32)
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        ends = np.cumsum(sizes)[:-1].tolist()
        self.host_rows, tiles, self.host_prompt_length, self.host_room, prompt_tables, tables = np.split(
            self._host, ends
        )
        self.host_tiles = tiles[: rows * (members + 2)].reshape(rows, members + 2)
        self.host_prompt_table = prompt_tables[: every * prompt_blocks].reshape(every, prompt_blocks)
        self.host_table = tables[: every * own_blocks].reshape(every, own_blocks)
        self.rows, self.tiles, self.prompt_length, self.room, self.prompt_table, self.table = (
            self._device.tensor_split(ends)
        )

        self.seed = torch.zeros(every, dtype=torch.int64, device=device)
        self.adapter = torch.zeros(every, dtype=torch.int64, device=device)
        self.scale = torch.ones(every, device=device)
        """Factor on the logits: 1 / temperature."""
        self.length = torch.ones(every, dtype=torch.int32, device=device)
        """Tokens sampled so far; the key of the last one is not stored yet."""
        self.status_and_likely = torch.zeros(
            4 + 2 * MOST_ALTERNATIVES, every, dtype=torch.int32, device=device
        )
        """Results of a step for the host, in one tensor: status rows, then the most likely tokens."""
        self.status, likely = self.status_and_likely.tensor_split([4])
        self.done, self.token, logprob, entropy = self.status
        self.logprob, self.entropy = logprob.view(torch.float32), entropy.view(torch.float32)
        self.likely_tokens, likely_logprobs = likely.chunk(2)
        self.likely_logprobs = likely_logprobs.view(torch.float32)
        self.done.fill_(1)

        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        """Inputs of the current step by row: tokens, positions, cache slots and lengths."""
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.slot_mapping = torch.zeros(rows, dtype=torch.int64, device=device)
        self.row_length = torch.zeros(rows, dtype=torch.int32, device=device)

        self.host_table[slots] = idle_block
        self.idle()

    def idle(self) -> None:
        """Map every row to the idle slot."""
        self.host_rows[:] = self.slots
        self.host_tiles[:] = -1
        self.push()

    def set_rows(self, slots_R: NDArray[np.int64], request_R: NDArray[np.int64]) -> None:
        """Map rows to slots and build the prompt tiles; the members of a request must be adjacent."""
        count = len(slots_R)
        self.host_rows[:count], self.host_rows[count:] = slots_R, self.slots
        rows = np.arange(count)
        first_R = np.ones(count, dtype=np.bool_)
        first_R[1:] = request_R[1:] != request_R[:-1]
        member = rows - np.flatnonzero(first_R)[np.cumsum(first_R) - 1]
        # A group larger than a tile takes several tiles.
        lane = member % self.members
        tile, slot = np.cumsum(lane == 0) - 1, slots_R[lane == 0]
        self.host_tiles[:] = -1
        self.host_tiles[: len(slot), 0] = slot
        self.host_tiles[: len(slot), 1] = self.host_prompt_length[slot]
        self.host_tiles[tile, 2 + lane] = rows

    def push(self) -> None:
        """Copy the host arrays to the device, in stream order."""
        staged = torch.from_numpy(self._host)
        staged = staged.pin_memory() if self._device.is_cuda else staged.clone()
        self._device.copy_(staged, non_blocking=True)

    def keep_likeliest(self, logits_RV: Tensor, slots_R: Tensor, *, scaled: bool) -> None:
        """Store the most likely tokens of each row; `scaled`: logits are already divided by temperature."""
        if not scaled:
            logits_RV = logits_RV * self.scale[slots_R, None]
        tokens_RA, logprobs_RA = likeliest(logits_RV.log_softmax(-1))
        self.likely_tokens.index_copy_(1, slots_R, tokens_RA.T.int())
        self.likely_logprobs.index_copy_(1, slots_R, logprobs_RA.T)


def _aligned(count: int) -> int:
    """Round up to a multiple of 64, so that the next array is aligned for wide loads."""
    return -(-count // 64) * 64


BLOCK = 32
"""Own keys per loop iteration of a program: few, so that many programs fit on one SM."""
PROMPT_BLOCK = 64
"""Prompt keys per loop iteration; larger, because each key serves more queries."""
LEAST = 128
"""Minimum number of own keys per program."""
TILE = 64
"""Queries (members × query heads per key head) that share one read of a prompt."""
TILE_PROGRAMS = 128
"""Programs that iterate over the tiles, about one per SM."""
BUSY = 512
"""Programs that saturate a GPU."""


def own_splits(lengths_R: NDArray[np.int64], *, key_heads: int) -> int:
    """Return the number of splits for each row's own tokens: 1, 4 or 16.

    Use one when the rows saturate the GPU and no row is much longer than the others.
    """
    longest, busy = int(lengths_R.max()), len(lengths_R) * key_heads >= BUSY
    if longest <= LEAST or (busy and longest <= 1.5 * lengths_R.mean() + LEAST):
        return 1
    return 4 if busy or longest <= 4 * LEAST else 16


def prompt_splits(rows: int, *, key_heads: int, longest: int) -> int:
    """Return the number of splits for prompts of at most `longest` tokens: 1 to 16."""
    # With groups there are far fewer tiles than rows, hence the factor of 8.
    return max(1, min(BUSY * 8 // (rows * key_heads), longest // (4 * PROMPT_BLOCK), 16))


def members_of_a_tile(heads: int, key_heads: int, largest_group: int) -> int:
    """Return how many members of a group share one read of their prompt."""
    return min(largest_group, max(1, TILE // (heads // key_heads)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLayout:
    """Attention layout of one decode step over the first `rows` rows of the state."""

    cache: KVCache
    state: StepState
    rows: int
    heads: int
    splits: int
    """Number of splits of a prompt."""
    own_splits: int
    shares: Tensor
    """Partial outputs [rows, H, splits + own splits, D], then their log-sum-exps; flat, float32."""
    side: torch.cuda.Stream | None
    """Second stream that overlaps prompt attention with own-token attention where PDL is unavailable."""

    @classmethod
    def build(
        cls,
        cache: KVCache,
        state: StepState,
        *,
        rows: int,
        heads: int,
        splits: int,
        own_splits: int,
        side: torch.cuda.Stream | None,
    ) -> DecodeLayout:
        size = cache.keys.shape[-1]
        shares = torch.zeros(rows * heads * (splits + own_splits) * (size + 1), device=cache.keys.device)
        return cls(
            cache=cache,
            state=state,
            rows=rows,
            heads=heads,
            splits=splits,
            own_splits=own_splits,
            shares=shares,
            side=side,
        )

    def attend(
        self,
        q_1HRD: Tensor,
        k_1KRD: Tensor,
        v_1KRD: Tensor,
        *,
        layer: int,
        scale: float,
        variant: AttentionVariant = STANDARD,
    ) -> Tensor:
        """Store the new keys and values and return the attention output_1RHD."""
        before = q_1HRD.shape[3]
        q_1HRD, k_1KRD, v_1KRD = self.cache.fitted(q_1HRD, k_1KRD, v_1KRD)
        self.store(k_1KRD[0].transpose(0, 1), v_1KRD[0].transpose(0, 1), layer=layer)
        q_RHD = q_1HRD[0].transpose(0, 1)
        output_RHD = self.read(q_RHD, k_1KRD, v_1KRD, layer=layer, scale=scale, variant=variant)
        return output_RHD[None, ..., :before]

    @property
    def slot_mapping(self) -> Tensor:
        return self.state.slot_mapping

    @property
    def adapter_T(self) -> Tensor:
        return self.state.adapter.index_select(0, self.state.rows[: self.rows])

    def store(self, k_RKD: Tensor, v_RKD: Tensor, *, layer: int) -> None:
        _, key_heads, size = k_RKD.shape
        assert k_RKD.stride(2) == v_RKD.stride(2) == 1, "the head dimension must be contiguous"
        launch(
            kernels.store_keys,
            (self.rows,),
            k_RKD, v_RKD, self.cache.keys[layer], self.cache.values[layer], self.state.slot_mapping,
            k_RKD.stride(0), k_RKD.stride(1), v_RKD.stride(0), v_RKD.stride(1),
            KEY_HEADS=key_heads,
            SIZE=size,
            DIM=padded(size),
            PADDED=padded(key_heads, least=1),
            num_warps=1,
        )  # fmt: skip

    def read(
        self,
        q_RHD: Tensor,
        _k: Tensor,
        _v: Tensor,
        *,
        layer: int,
        scale: float,
        variant: AttentionVariant = STANDARD,
    ) -> Tensor:
        """Return the attention output_RHD over the cached keys and values."""
        assert q_RHD.stride(2) == 1, "the head dimension must be contiguous"
        output_RHD = torch.empty(q_RHD.shape, dtype=q_RHD.dtype, device=q_RHD.device)
        scale *= log2(np.e)
        if self.own_splits == 1:
            self._read_prompts(q_RHD, layer, scale, variant)
            self._read_own(q_RHD, output_RHD, layer, scale, variant)
            return output_RHD
        # Both kernels are independent until their partial outputs are merged.
        with self._on_side_stream():
            self._read_prompts(q_RHD, layer, scale, variant)
        self._read_own(q_RHD, output_RHD, layer, scale, variant)
        self._wait()
        heads, size = q_RHD.shape[1:]
        share, lse, own_share, own_lse = self._parts(size)
        launch(
            kernels.join_shares,
            (self.rows,),
            share, lse, own_share, own_lse, output_RHD,
            q_RHD if variant.sinks_H is None else variant.sinks_H,
            self.splits, self.own_splits,
            HEADS=heads,
            SIZE=size,
            DIM=padded(size),
            PADDED=padded(heads, least=1),
            SINK=variant.sinks_H is not None,
            early=self.side is None,
            num_warps=4,
        )  # fmt: skip
        return output_RHD

    def _read_prompts(self, q_RHD: Tensor, layer: int, scale: float, variant: AttentionVariant) -> None:
        state = self.state
        shape = self._shape(q_RHD, variant)
        share, lse, _, _ = self._parts(shape["SIZE"])
        launch(
            kernels.attend_prompts,
            (min(self.rows, TILE_PROGRAMS), shape["KEY_HEADS"], self.splits),
            q_RHD, *layer_of(self.cache, layer), share, lse,
            state.tiles, state.prompt_table, state.row_length,
            scale, q_RHD.stride(0), q_RHD.stride(1), state.prompt_width, self.splits, state.rows_of_a_step,
            **shape,
            BLOCK=PROMPT_BLOCK,
            MEMBERS=state.members,
            TILE=padded(state.members * (self.heads // shape["KEY_HEADS"])),
            early=self.side is None,
            num_warps=4,
            num_stages=2,
        )  # fmt: skip

    def _read_own(
        self, q_RHD: Tensor, output_RHD: Tensor, layer: int, scale: float, variant: AttentionVariant
    ) -> None:
        state = self.state
        shape = self._shape(q_RHD, variant)
        share, lse, own_share, own_lse = self._parts(shape["SIZE"])
        launch(
            kernels.attend_own,
            (self.rows, shape["KEY_HEADS"], self.own_splits),
            q_RHD, *layer_of(self.cache, layer), share, lse, output_RHD, own_share, own_lse,
            state.rows, state.row_length, state.table,
            q_RHD if variant.sinks_H is None else variant.sinks_H,
            scale, q_RHD.stride(0), q_RHD.stride(1), state.own_width, self.splits, self.own_splits,
            **shape,
            BLOCK=BLOCK,
            LEAST=LEAST,
            PADDED=padded(self.heads // shape["KEY_HEADS"]),
            WHOLE=self.own_splits == 1,
            SINK=variant.sinks_H is not None,
            early=self.side is None,
            num_warps=2,
            num_stages=2,
        )  # fmt: skip

    def _shape(self, q_RHD: Tensor, variant: AttentionVariant) -> dict[str, Any]:
        _, heads, size = q_RHD.shape
        return {
            "HEADS": heads,
            "KEY_HEADS": self.cache.keys.shape[-2],
            "SIZE": size,
            "DIM": padded(size),
            "PAGE": self.cache.block_size,
            "WINDOW": variant.window or 0,
            "CAP": (variant.cap or 0.0) * log2(np.e),
            "FP8": isinstance(self.cache, FP8Cache),
        }

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Launch on the second stream, concurrently with what follows."""
        if self.side is None:
            yield
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            yield

    def _wait(self) -> None:
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)

    def _parts(self, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        first, own = self.rows * self.heads * self.splits, self.rows * self.heads * self.own_splits
        share, own_share, lse, own_lse = torch.split(self.shares, [first * size, own * size, first, own])
        return share, lse, own_share, own_lse
