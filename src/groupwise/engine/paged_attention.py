"""The paged KV cache, and decode attention over it that reads a group's shared prompt once.

Axes: R running sequences, P distinct prompts among them, G most sequences on one prompt, L longest
own part (in whole blocks), S longest prompt (in whole blocks), H query heads, K key heads,
F = H / K query heads a key head, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.engine.scheduler import Scheduler
from groupwise.model.attention.hf_interface import STANDARD, AttentionVariant, merge_sinks
from groupwise.model.attention.segment_attention import attend, merge


class KVCache:
    """Keys and values of every layer, [blocks, tokens of a block, K, D] each."""

    def __init__(
        self, *, layers: int, blocks: int, block_size: int, heads: int, size: int, like: Tensor
    ) -> None:
        shape = (layers, blocks, block_size, heads, size)
        # Zeros, not uninitialized memory: masked slots are read too, and masking does not hide a NaN.
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.block_size = block_size

    def fitted(self, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same heads in the shape of the cache, for layers with fewer or smaller heads.

        Repeated key heads serve fewer query heads each; zeros at the end of a head change no product.
        """
        heads, size = self.keys.shape[-2:]
        if k_1KTD.shape[1] < heads:
            k_1KTD, v_1KTD = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k_1KTD, v_1KTD))
        if k_1KTD.shape[3] < size:
            more = (0, size - k_1KTD.shape[3])
            return tuple(torch.nn.functional.pad(x, more) for x in (q_1HTD, k_1KTD, v_1KTD))  # type: ignore[return-value]
        return q_1HTD, k_1KTD, v_1KTD

    def write(self, layer: int, k_NKD: Tensor, v_NKD: Tensor, slots_N: Tensor) -> None:
        """Store keys and values in slots counted in tokens from the start of the pool."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots_N, k_NKD)
        self.values[layer].flatten(0, 1).index_copy_(0, slots_N, v_NKD)

    def rows(self, layer: int, slots_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (k_NKD, v_NKD) in these slots."""
        keys, values = self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1)
        return keys.index_select(0, slots_N), values.index_select(0, slots_N)

    def copy(self, from_N: Tensor, to_N: Tensor) -> None:
        """Copy keys and values between slots, in every layer."""
        for stored in (self.keys, self.values):
            flat = stored.flatten(1, 2)
            flat.index_copy_(1, to_N, flat.index_select(1, from_N))

    def read(self, layer: int, table_RB: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (k_RKLD, v_RKLD) of whole blocks."""
        return _gather(self.keys[layer], table_RB), _gather(self.values[layer], table_RB)


def _gather(blocks_NBKD: Tensor, table_RB: Tensor) -> Tensor:
    rows = _take(blocks_NBKD, table_RB)
    return rows.flatten(1, 2).transpose(1, 2)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index] along the first axis; index_select copies whole rows and is faster than indexing."""
    return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayout:
    """Attention layout of one decode step: each sequence attends to its prompt and to its own tokens."""

    cache: KVCache
    slot_mapping_R: Tensor
    """Cache slot of each new token's key and value."""
    own_RB: Tensor
    own_mask_R11L: Tensor
    prompt_PB: Tensor
    prompt_mask_P11S: Tensor
    own_length_R: Tensor
    """Tokens of each sequence after its prompt, the new one included."""
    prompt_length_P: Tensor
    grid_PG: Tensor
    """Row of each member of each prompt; an arbitrary row where there is no member."""
    member_R: Tensor
    """Index of each row in the flattened grid."""
    adapter_T: Tensor
    """LoRA adapter index of each row."""

    @classmethod
    def build(cls, cache: KVCache, scheduler: Scheduler, *, like: Tensor) -> PagedLayout:
        """Build the layout of the scheduler's running sequences; the last sampled token of each is new."""
        size = cache.block_size
        slots = scheduler.slots()
        rows = np.arange(len(slots))
        new = scheduler.length[slots] - 1
        own = scheduler.tables[slots, : int(new.max()) // size + 1]
        slot_mapping = own[rows, new // size] * size + new % size

        # The members of a group are adjacent, so its rows begin where the request changes.
        request = scheduler.request[slots]
        first = np.flatnonzero(np.diff(request, prepend=-1))
        members = np.diff(first, append=len(rows))
        prompt_of = np.repeat(np.arange(len(first)), members)
        member_of = rows - first[prompt_of]
        grid = np.zeros((len(first), int(members.max())), dtype=np.int64)
        grid[prompt_of, member_of] = rows

        lengths = scheduler.prompt_length[request[first]]
        prompts = scheduler.prompt_tables[request[first], : -(-int(lengths.max()) // size)]

        def move(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).to(like.device)

        return cls(
            cache=cache,
            slot_mapping_R=move(slot_mapping),
            own_RB=move(own),
            own_mask_R11L=_mask(move(new + 1), own.shape[1] * size, like=like),
            prompt_PB=move(prompts),
            prompt_mask_P11S=_mask(move(lengths), prompts.shape[1] * size, like=like),
            own_length_R=move(new + 1),
            prompt_length_P=move(lengths),
            grid_PG=move(grid),
            member_R=move(prompt_of * grid.shape[1] + member_of),
            adapter_T=move(scheduler.adapter[slots]),
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
        _, key_heads, rows, size = k_1KRD.shape
        self.cache.write(layer, k_1KRD[0].transpose(0, 1), v_1KRD[0].transpose(0, 1), self.slot_mapping_R)
        # Query heads that share a key head become queries of that head, so each key is read once.
        q_RKFD = q_1HRD[0].transpose(0, 1).reshape(rows, key_heads, -1, size)
        k_RKLD, v_RKLD = self.cache.read(layer, self.own_RB)
        own_mask, prompt_mask = self._masks(q_RKFD.shape[2], variant.window)
        own = attend(q_RKFD, k_RKLD, v_RKLD, causal=False, mask=own_mask, scale=scale, cap=variant.cap)
        other = self._attend_prompts(q_RKFD, prompt_mask, layer, scale, variant.cap)
        output_RKFD, lse_RKF = merge(own, other)
        output_RHD = output_RKFD.flatten(1, 2)
        if variant.sinks_H is not None:
            output_RHD, _ = merge_sinks(output_RHD, lse_RKF.flatten(1), variant.sinks_H)
        return output_RHD[None, ..., :before]

    def _masks(self, per_head: int, window: int | None) -> tuple[Tensor, Tensor]:
        """Return the masks of own tokens [R, 1, 1, L] and of prompts [P, 1, 1 or G·F, S]."""
        own, prompt = self.own_mask_R11L, self.prompt_mask_P11S
        if window is None:
            return own, prompt
        # Finite: of a prompt outside of the window no key is left, and a row of -inf would give NaN.
        outside = max(-1e30, torch.finfo(own.dtype).min / 4)
        at_RL = torch.arange(own.shape[-1], device=own.device)
        far_RL = self.own_length_R[:, None] - at_RL > window
        at_S = torch.arange(prompt.shape[-1], device=own.device)
        length_PG = self.prompt_length_P[:, None] + _take(self.own_length_R, self.grid_PG)
        far_PGS = length_PG[:, :, None] - at_S > window
        own = own.masked_fill(far_RL[:, None, None], outside)
        hidden = prompt == -torch.inf
        prompt = torch.zeros_like(prompt).masked_fill(hidden | far_PGS[:, None], outside)
        return own, prompt.repeat_interleave(per_head, 2)

    def _attend_prompts(
        self, q_RKFD: Tensor, mask: Tensor, layer: int, scale: float, cap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Attend to each prompt once, with all members of its group as queries; return in row order."""
        prompts, members = self.grid_PG.shape
        _, key_heads, per_head, _ = q_RKFD.shape
        q_PKGFD = _take(q_RKFD, self.grid_PG).transpose(1, 2)
        k_PKSD, v_PKSD = self.cache.read(layer, self.prompt_PB)
        output, lse = attend(
            q_PKGFD.flatten(2, 3), k_PKSD, v_PKSD, causal=False, mask=mask, scale=scale, cap=cap
        )

        def rows(x: Tensor) -> Tensor:
            x_PKGFD = x.view(prompts, key_heads, members, per_head, -1)
            return _take(x_PKGFD.transpose(1, 2).flatten(0, 1), self.member_R)

        return rows(output), rows(lse).squeeze(-1)


def _mask(lengths_N: Tensor, width: int, *, like: Tensor) -> Tensor:
    """Return a mask [N, 1, 1, width]: 0 at the first `length` positions of each row, -inf after them."""
    hidden = torch.arange(width, device=like.device) >= lengths_N[:, None]
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(hidden, float("-inf"))[:, None, None]
