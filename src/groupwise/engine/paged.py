"""Attention for generation: keys and values live in blocks, a group's prompt is read once.

Axes: R running sequences, P distinct prompts among them, G most sequences on one prompt, L longest
own part (in whole blocks), S longest prompt (in whole blocks), H query heads, K key heads,
F = H / K query heads a key head, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.engine.blocks import Prefix
from groupwise.engine.scheduler import Scheduler
from groupwise.model.attend import attend, merge
from groupwise.model.packed import PackedLayout


class KVCache:
    """Keys and values of every layer, [blocks, tokens of a block, K, D] each."""

    def __init__(
        self, *, layers: int, blocks: int, block_size: int, heads: int, size: int, like: Tensor
    ) -> None:
        shape = (layers, blocks, block_size, heads, size)
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.block_size = block_size

    def write(self, layer: int, k_NKD: Tensor, v_NKD: Tensor, places_N: Tensor) -> None:
        """Store at places counted in tokens from the start of the pool."""
        self.keys[layer].flatten(0, 1).index_copy_(0, places_N, k_NKD)
        self.values[layer].flatten(0, 1).index_copy_(0, places_N, v_NKD)

    def read(self, layer: int, table_RB: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (k_RKLD, v_RKLD) of whole blocks."""
        rows, per_row = table_RB.shape
        return tuple(  # type: ignore[return-value]
            pool[layer].index_select(0, table_RB.flatten()).unflatten(0, (rows, per_row)).flatten(1, 2).transpose(1, 2)
            for pool in (self.keys, self.values)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayout:
    """One decoding step: each running sequence adds one token and sees its prompt and itself."""

    cache: KVCache
    places_R: Tensor
    """Where each new token's key and value go."""
    own_RB: Tensor
    own_mask_R11L: Tensor
    prompt_PB: Tensor
    prompt_mask_P11S: Tensor
    grid_PG: Tensor
    """Which row is which member of which prompt; R where there is none."""
    member_R: Tensor
    """Each row's place in the flattened grid."""

    @classmethod
    def build(cls, cache: KVCache, scheduler: Scheduler, *, like: Tensor) -> PagedLayout:
        """Lay out the scheduler's running sequences; each one's last sampled token is the new one."""
        size = cache.block_size
        slots = np.array([sequence.slot for sequence in scheduler.running])
        new = scheduler.length[slots] - 1
        own = scheduler.tables[slots, : int(new.max()) // size + 1]
        places = own[np.arange(len(slots)), new // size] * size + new % size
        own_mask = _mask(new + 1, own.shape[1] * size)
        prefixes = list(dict.fromkeys(sequence.prefix for sequence in scheduler.running))
        number = {id(prefix): p for p, prefix in enumerate(prefixes)}
        prompt_of = np.array([number[id(sequence.prefix)] for sequence in scheduler.running])
        order = np.argsort(prompt_of, kind="stable")
        counts = np.bincount(prompt_of)
        member = np.empty(len(slots), dtype=np.int64)
        member[order] = np.arange(len(slots)) - np.repeat(np.cumsum(counts) - counts, counts)
        grid = np.full((len(prefixes), int(counts.max())), len(slots))
        grid[prompt_of, member] = np.arange(len(slots))
        prompts, prompt_mask = _prompt_tables(prefixes, size)

        def move(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).to(like.device)

        def additive(mask: NDArray[np.bool_]) -> Tensor:
            hidden = torch.from_numpy(~mask).to(like.device)
            return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(
                hidden, float("-inf")
            )[:, None, None]

        return cls(
            cache=cache,
            places_R=move(places),
            own_RB=move(own),
            own_mask_R11L=additive(own_mask),
            prompt_PB=move(prompts),
            prompt_mask_P11S=additive(prompt_mask),
            grid_PG=move(grid),
            member_R=move(prompt_of * grid.shape[1] + member),
        )

    def attend(self, q_1HRD: Tensor, k_1KRD: Tensor, v_1KRD: Tensor, *, layer: int, scale: float) -> Tensor:
        """Store the new keys and values and return the attention output_1RHD."""
        key_heads = k_1KRD.shape[1]
        self.cache.write(layer, k_1KRD[0].transpose(0, 1), v_1KRD[0].transpose(0, 1), self.places_R)
        # Query heads that share a key head become queries of it: no key is read twice.
        q_RKFD = q_1HRD[0].transpose(0, 1).unflatten(1, (key_heads, -1))
        own = attend(q_RKFD, *self.cache.read(layer, self.own_RB), causal=False, mask=self.own_mask_R11L, scale=scale)
        shared = self._attend_prompts(q_RKFD, layer, scale)
        output_RKFD, _ = merge(own, shared)
        return output_RKFD.flatten(1, 2)[None]

    def _attend_prompts(self, q_RKFD: Tensor, layer: int, scale: float) -> tuple[Tensor, Tensor]:
        """All members of a group as queries of its one prompt; back in row order."""
        (prompts, members), per_head = self.grid_PG.shape, q_RKFD.shape[2]
        padded = torch.cat([q_RKFD, q_RKFD.new_zeros(1, *q_RKFD.shape[1:])])
        q_PKGFD = padded[self.grid_PG].transpose(1, 2)
        output, lse = attend(
            q_PKGFD.flatten(2, 3),
            *self.cache.read(layer, self.prompt_PB),
            causal=False,
            mask=self.prompt_mask_P11S,
            scale=scale,
        )

        def rows(x: Tensor) -> Tensor:
            return x.unflatten(2, (members, per_head)).transpose(1, 2).flatten(0, 1)[self.member_R]

        return rows(output), rows(lse)


def _prompt_tables(prefixes: list[Prefix], size: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    table = np.zeros((len(prefixes), max(len(prefix.blocks) for prefix in prefixes)), dtype=np.int64)
    for p, prefix in enumerate(prefixes):
        table[p, : len(prefix.blocks)] = prefix.blocks
    lengths = np.array([len(prefix.tokens) for prefix in prefixes])
    return table, _mask(lengths, table.shape[1] * size)


def _mask(lengths: NDArray[np.int64], width: int) -> NDArray[np.bool_]:
    """True on the first `length` places of each row."""
    visible: NDArray[np.bool_] = np.arange(width)[None] < lengths[:, None]
    return visible


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLayout:
    """Prompts computed as one packed row, their keys and values stored on the way."""

    packed: PackedLayout
    cache: KVCache
    places_T: Tensor

    @classmethod
    def build(cls, cache: KVCache, prefixes: Sequence[Prefix], *, like: Tensor) -> PrefillLayout:
        size = cache.block_size
        places = [
            np.array(prefix.blocks)[np.arange(len(prefix.tokens)) // size] * size
            + np.arange(len(prefix.tokens)) % size
            for prefix in prefixes
        ]
        return cls(
            packed=PackedLayout.build([(len(prefix.tokens), ()) for prefix in prefixes], device=like.device),
            cache=cache,
            places_T=torch.from_numpy(np.concatenate(places)).to(like.device),
        )

    def attend(self, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, *, layer: int, scale: float) -> Tensor:
        self.cache.write(layer, k_1KTD[0].transpose(0, 1), v_1KTD[0].transpose(0, 1), self.places_T)
        return self.packed.attend(q_1HTD, k_1KTD, v_1KTD, layer=layer, scale=scale)
