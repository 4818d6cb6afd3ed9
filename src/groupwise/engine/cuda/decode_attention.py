"""What a decoding step reads and writes, in device memory that never moves: a CUDA graph keeps addresses.

The host decides who runs and where their blocks are; the device moves each sequence on by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import log2

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.engine.cuda import attention_kernels as kernels
from groupwise.engine.cuda.kernel_launch import launch, padded
from groupwise.engine.paged_attention import KVCache
from groupwise.engine.sampler import MOST_ALTERNATIVES, likeliest


class StepState:
    """Slots of sequences, and one more that idle rows stand for: ended, with a block that nobody reads."""

    def __init__(
        self,
        *,
        slots: int,
        members: int,
        prompt_blocks: int,
        own_blocks: int,
        idle_block: int,
        device: torch.device,
    ) -> None:
        self.slots, self.members = slots, members
        self.prompt_width, self.own_width = prompt_blocks, own_blocks
        every = _aligned(slots + 1)
        sizes = [
            _aligned(size)
            for size in (slots, slots * (members + 2), every, every * prompt_blocks, every * own_blocks)
        ]
        self._host = np.zeros(sum(sizes), dtype=np.int32)
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        ends = np.cumsum(sizes)[:-1].tolist()
        rows, tiles, prompt_lengths, prompt_tables, tables = np.split(self._host, ends)
        self.host_rows = rows
        self.host_tiles = tiles[: slots * (members + 2)].reshape(slots, members + 2)
        self.host_prompt_length = prompt_lengths
        self.host_prompt_table = prompt_tables[: every * prompt_blocks].reshape(every, prompt_blocks)
        self.host_table = tables[: every * own_blocks].reshape(every, own_blocks)
        self.rows, self.tiles, self.prompt_length, self.prompt_table, self.table = self._device.tensor_split(
            ends
        )

        self.seed = torch.zeros(every, dtype=torch.int64, device=device)
        self.adapter = torch.zeros(every, dtype=torch.int64, device=device)
        self.scale = torch.ones(every, device=device)
        """What logits are multiplied by: 1 over the temperature."""
        self.length = torch.ones(every, dtype=torch.int32, device=device)
        """Tokens sampled so far; the last one's key is not stored yet."""
        self.status_and_likely = torch.zeros(
            4 + 2 * MOST_ALTERNATIVES, every, dtype=torch.int32, device=device
        )
        """What the host wants to know after each step, in one copy; the likeliest tokens if someone asks."""
        self.status, likely = self.status_and_likely.tensor_split([4])
        self.done, self.token, logprob, entropy = self.status
        self.logprob, self.entropy = logprob.view(torch.float32), entropy.view(torch.float32)
        self.likely_tokens, likely_logprobs = likely.chunk(2)
        self.likely_logprobs = likely_logprobs.view(torch.float32)
        self.done.fill_(1)

        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        """By row, for the step under way: what is fed, where it stands, where its key and value go."""
        self.positions = torch.zeros(slots, dtype=torch.int64, device=device)
        self.slot_mapping = torch.zeros(slots, dtype=torch.int64, device=device)
        self.row_length = torch.zeros(slots, dtype=torch.int32, device=device)

        self.host_table[slots] = idle_block
        self.idle()

    def idle(self) -> None:
        """Let no row stand for any sequence."""
        self.host_rows[:] = self.slots
        self.host_tiles[:] = -1
        self.push()

    def set_rows(self, slots_R: NDArray[np.int64], request_R: NDArray[np.int64]) -> None:
        """Say which slots the rows stand for; members of a request are neighbours."""
        count = len(slots_R)
        self.host_rows[:count], self.host_rows[count:] = slots_R, self.slots
        rows = np.arange(count)
        first_R = np.ones(count, dtype=np.bool_)
        first_R[1:] = request_R[1:] != request_R[:-1]
        member = rows - np.flatnonzero(first_R)[np.cumsum(first_R) - 1]
        # A group larger than a tile takes several.
        place = member % self.members
        tile, slot = np.cumsum(place == 0) - 1, slots_R[place == 0]
        self.host_tiles[:] = -1
        self.host_tiles[: len(slot), 0] = slot
        self.host_tiles[: len(slot), 1] = self.host_prompt_length[slot]
        self.host_tiles[tile, 2 + place] = rows

    def push(self) -> None:
        """Send the host's side to the device, in the order of the stream."""
        staged = torch.from_numpy(self._host)
        staged = staged.pin_memory() if self._device.is_cuda else staged.clone()
        self._device.copy_(staged, non_blocking=True)

    def keep_likeliest(self, logits_RV: Tensor, slots_R: Tensor, *, scaled: bool) -> None:
        """Leave the likeliest tokens of each row for the host; `scaled`: the temperature is in the logits."""
        if not scaled:
            logits_RV = logits_RV * self.scale[slots_R, None]
        tokens_RA, logprobs_RA = likeliest(logits_RV.log_softmax(-1))
        self.likely_tokens.index_copy_(1, slots_R, tokens_RA.T.int())
        self.likely_logprobs.index_copy_(1, slots_R, logprobs_RA.T)


def _aligned(count: int) -> int:
    """Round up, so that what follows starts where wide loads may."""
    return -(-count // 64) * 64


BLOCK = 32
"""Own keys that a program looks at in one go: few, so that many programs share a processor."""
PROMPT_BLOCK = 64
"""The same of a prompt, where there is more to do with each key."""
LEAST = 128
"""Own keys that are worth a program."""
TILE = 64
"""Queries (members × query heads of a key head) that share one read of a prompt."""
TILE_PROGRAMS = 128
"""Programs that go through the tiles, about one a processor."""
BUSY = 512
"""Programs that keep a GPU busy."""


def own_splits(lengths_R: NDArray[np.int64], *, key_heads: int) -> int:
    """In how many parts to read each row's own tokens: 1, 4 or 16.

    One when rows keep the GPU busy and none takes much longer than the others.
    """
    longest, busy = int(lengths_R.max()), len(lengths_R) * key_heads >= BUSY
    if longest <= LEAST or (busy and longest <= 1.5 * lengths_R.mean() + LEAST):
        return 1
    return 4 if busy or longest <= 4 * LEAST else 16


def members_of_a_tile(heads: int, key_heads: int, largest_group: int) -> int:
    """How many members of a group share a read of their prompt."""
    return min(largest_group, max(1, TILE // (heads // key_heads)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLayout:
    """One decoding step of the first `rows` rows of the state."""

    cache: KVCache
    state: StepState
    rows: int
    heads: int
    splits: int
    """Parts that a prompt is read in."""
    own_splits: int
    shares: Tensor
    """[rows, H, splits + own splits, D] and the log-sum-exps behind them, flat, float32."""
    side: torch.cuda.Stream | None
    """Where prompts are read beside own tokens that are read in parts, if kernels cannot start early."""

    @classmethod
    def build(
        cls,
        cache: KVCache,
        state: StepState,
        *,
        rows: int,
        heads: int,
        own_splits: int,
        side: torch.cuda.Stream | None,
    ) -> DecodeLayout:
        key_heads, size = cache.keys.shape[-2:]
        longest = state.prompt_width * cache.block_size
        # Groups make for far fewer tiles than rows.
        splits = max(1, min(BUSY * 8 // (rows * key_heads), longest // (4 * PROMPT_BLOCK), 16))
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

    def attend(self, q_1HRD: Tensor, k_1KRD: Tensor, v_1KRD: Tensor, *, layer: int, scale: float) -> Tensor:
        """Store the new keys and values and return the attention output_1RHD."""
        self.store(k_1KRD[0].transpose(0, 1), v_1KRD[0].transpose(0, 1), layer=layer)
        q_RHD = q_1HRD[0].transpose(0, 1)
        return self.read(q_RHD, k_1KRD, v_1KRD, layer=layer, scale=scale)[None]

    @property
    def slot_mapping(self) -> Tensor:
        return self.state.slot_mapping

    @property
    def adapter_T(self) -> Tensor:
        return self.state.adapter.index_select(0, self.state.rows[: self.rows])

    def store(self, k_RKD: Tensor, v_RKD: Tensor, *, layer: int) -> None:
        _, key_heads, size = k_RKD.shape
        assert k_RKD.stride(2) == v_RKD.stride(2) == 1, "heads lie in one piece"
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

    def read(self, q_RHD: Tensor, _k: Tensor, _v: Tensor, *, layer: int, scale: float) -> Tensor:
        """Return the attention output_RHD over what is stored."""
        assert q_RHD.stride(2) == 1, "heads lie in one piece"
        output_RHD = torch.empty(q_RHD.shape, dtype=q_RHD.dtype, device=q_RHD.device)
        scale *= log2(np.e)
        if self.own_splits == 1:
            self._read_prompts(q_RHD, layer, scale)
            self._read_own(q_RHD, output_RHD, layer, scale)
            return output_RHD
        # Nobody waits for anybody until the shares are added up.
        with self._beside():
            self._read_prompts(q_RHD, layer, scale)
        self._read_own(q_RHD, output_RHD, layer, scale)
        self._wait()
        heads, size = q_RHD.shape[1:]
        share, lse, own_share, own_lse = self._parts(size)
        launch(
            kernels.join_shares,
            (self.rows,),
            share, lse, own_share, own_lse, output_RHD, self.splits, self.own_splits,
            HEADS=heads,
            SIZE=size,
            DIM=padded(size),
            PADDED=padded(heads, least=1),
            early=self.side is None,
            num_warps=4,
        )  # fmt: skip
        return output_RHD

    def _read_prompts(self, q_RHD: Tensor, layer: int, scale: float) -> None:
        state, keys, values = self.state, self.cache.keys[layer], self.cache.values[layer]
        shape = self._shape(q_RHD)
        share, lse, _, _ = self._parts(shape["SIZE"])
        launch(
            kernels.attend_prompts,
            (min(self.rows, TILE_PROGRAMS), shape["KEY_HEADS"], self.splits),
            q_RHD, keys, values, share, lse, state.tiles, state.prompt_table,
            scale, q_RHD.stride(0), q_RHD.stride(1), state.prompt_width, self.splits, state.slots,
            **shape,
            BLOCK=PROMPT_BLOCK,
            MEMBERS=state.members,
            TILE=padded(state.members * (self.heads // shape["KEY_HEADS"])),
            early=self.side is None,
            num_warps=4,
            num_stages=2,
        )  # fmt: skip

    def _read_own(self, q_RHD: Tensor, output_RHD: Tensor, layer: int, scale: float) -> None:
        state, keys, values = self.state, self.cache.keys[layer], self.cache.values[layer]
        shape = self._shape(q_RHD)
        share, lse, own_share, own_lse = self._parts(shape["SIZE"])
        launch(
            kernels.attend_own,
            (self.rows, shape["KEY_HEADS"], self.own_splits),
            q_RHD, keys, values, share, lse, output_RHD, own_share, own_lse,
            state.rows, state.row_length, state.table,
            scale, q_RHD.stride(0), q_RHD.stride(1), state.own_width, self.splits, self.own_splits,
            **shape,
            BLOCK=BLOCK,
            LEAST=LEAST,
            PADDED=padded(self.heads // shape["KEY_HEADS"]),
            WHOLE=self.own_splits == 1,
            early=self.side is None,
            num_warps=2,
            num_stages=2,
        )  # fmt: skip

    def _shape(self, q_RHD: Tensor) -> dict[str, int]:
        _, heads, size = q_RHD.shape
        return {
            "HEADS": heads,
            "KEY_HEADS": self.cache.keys.shape[-2],
            "SIZE": size,
            "DIM": padded(size),
            "PAGE": self.cache.block_size,
        }

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Launch on a second stream, next to what follows."""
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
