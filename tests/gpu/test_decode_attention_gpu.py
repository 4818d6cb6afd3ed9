"""Decode attention over the paged cache, on the device, against softmax in float32."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from groupwise.engine.cuda import decode_attention
from groupwise.engine.cuda.decode_attention import (
    DecodeLayout,
    StepState,
    members_of_a_tile,
    prompt_splits,
)
from groupwise.engine.cuda.graph_weights import FP8Cache
from groupwise.engine.paged_attention import KVCache
from groupwise.model.attention.hf_interface import STANDARD, AttentionVariant
from tests.support.cuda_checks import DEVICE, HALF, assert_near, assert_repeatable

PAGE = 16
Groups = list[tuple[int, list[int]]]
"""(prompt length, own length of each member) of each group."""


@dataclass
class Batch:
    """Random keys, values and queries of some groups, in a cache whose blocks are in random order."""

    groups: Groups
    heads: int
    key_heads: int
    size: int
    dtype: torch.dtype
    own_splits: int
    idle_rows: int = 0
    variant: AttentionVariant = STANDARD
    fp8: bool = False

    def __post_init__(self) -> None:
        own = [length for _, members in self.groups for length in members]
        prompt_blocks = [-(-prompt // PAGE) for prompt, _ in self.groups]
        own_blocks = [-(-length // PAGE) for length in own]
        blocks = sum(prompt_blocks) + sum(own_blocks)
        slots = len(own) + self.idle_rows
        self.cache = (FP8Cache if self.fp8 else KVCache)(
            layers=1,
            blocks=blocks + 1,
            block_size=PAGE,
            heads=self.key_heads,
            size=self.size,
            like=torch.zeros(1, dtype=self.dtype, device=DEVICE),
        )
        for stored in (self.cache.keys, self.cache.values):
            stored.copy_(torch.randn(stored.shape, device=DEVICE))
        if isinstance(self.cache, FP8Cache):
            self.cache.scales.uniform_(0.5, 2.0)
        largest = max(len(members) for _, members in self.groups)
        self.state = state = StepState(
            slots=slots,
            members=members_of_a_tile(self.heads, self.key_heads, largest),
            prompt_blocks=max(prompt_blocks),
            own_blocks=max(own_blocks),
            idle_block=blocks,
            device=DEVICE,
        )
        free = list(range(blocks))
        random.Random(0).shuffle(free)
        self.tables: list[tuple[list[int], list[int]]] = []
        slot = 0
        request = []
        for number, (prompt, members) in enumerate(self.groups):
            table = [free.pop() for _ in range(prompt_blocks[number])]
            for length in members:
                mine = [free.pop() for _ in range(-(-length // PAGE))]
                state.host_prompt_length[slot] = prompt
                state.host_prompt_table[slot, : len(table)] = table
                state.host_table[slot, : len(mine)] = mine
                self.tables.append((table, mine))
                request.append(number)
                slot += 1
        state.set_rows(np.arange(slot), np.array(request))
        state.push()
        rows = len(own) + self.idle_rows
        state.row_length[: len(own)] = torch.tensor(own, dtype=torch.int32, device=DEVICE)
        state.row_length[len(own) :] = 1
        self.q_RHD = torch.randn(rows, self.heads, self.size, device=DEVICE).to(self.dtype)
        splits = prompt_splits(rows, key_heads=self.key_heads, longest=state.prompt_width * PAGE)
        self.layout = DecodeLayout.build(
            self.cache,
            state,
            rows=rows,
            heads=self.heads,
            splits=splits,
            own_splits=self.own_splits,
            side=None,
        )

    def attend(self) -> Tensor:
        self.layout.shares.fill_(torch.nan)  # what is not written must not be read
        scale = self.size**-0.5
        output_RHD = self.layout.read(
            self.q_RHD, self.q_RHD, self.q_RHD, layer=0, scale=scale, variant=self.variant
        )
        return output_RHD[: len(self.tables)]

    def expected(self) -> Tensor:
        """Softmax over the prompt and the row's own tokens, one row after the other."""
        lengths = [(prompt, own) for prompt, members in self.groups for own in members]
        keys, values = (x[0].flatten(0, 1).float() for x in (self.cache.keys, self.cache.values))
        if isinstance(self.cache, FP8Cache):
            keys, values = (
                x * scale[0].flatten(0, 1)[..., None]
                for x, scale in zip((keys, values), self.cache.scales, strict=True)
            )
        rows = []
        for q_HD, (table, mine), (prompt, own) in zip(self.q_RHD.float(), self.tables, lengths, strict=False):
            places = [table[n // PAGE] * PAGE + n % PAGE for n in range(prompt)]
            places += [mine[n // PAGE] * PAGE + n % PAGE for n in range(own)]
            shared = self.heads // self.key_heads
            k_HLD = keys[places].transpose(0, 1).repeat_interleave(shared, 0)
            v_HLD = values[places].transpose(0, 1).repeat_interleave(shared, 0)
            scores_HL = (k_HLD @ q_HD[:, :, None]).squeeze(-1) * self.size**-0.5
            if self.variant.cap is not None:
                scores_HL = self.variant.cap * torch.tanh(scores_HL / self.variant.cap)
            if self.variant.window is not None:
                scores_HL[:, : max(0, len(places) - self.variant.window)] = -torch.inf
            if self.variant.sinks_H is not None:
                scores_HL = torch.cat([scores_HL, self.variant.sinks_H.float()[:, None]], dim=1)
            weights_HL = scores_HL.softmax(-1)[:, : len(places)]
            rows.append((weights_HL[:, None] @ v_HLD).squeeze(1))
        return torch.stack(rows)


SHAPES = [
    (8, 8, 64),
    (9, 3, 64),
    (14, 2, 64),
    (8, 1, 80),
    (12, 2, 96),
    (32, 8, 128),
    (12, 2, 128),
    (28, 4, 128),
    (4, 1, 256),
    (8, 4, 256),
]
"""(query heads, key heads, head size)."""
RAGGED: Groups = [(37, [1, 16, 17, 63]), (1, [5]), (128, [33] * 9), (200, [2, 129])]


@pytest.mark.parametrize("own_splits", [1, 4])
@pytest.mark.parametrize(("heads", "key_heads", "size"), SHAPES)
def test_decode_attention_is_softmax_for_every_head_size_and_ratio(heads, key_heads, size, own_splits):
    batch = Batch(RAGGED, heads, key_heads, size, HALF, own_splits)
    assert_near(batch.attend(), batch.expected(), HALF)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("own_splits", [1, 16])
def test_decode_attention_is_softmax_in_other_precisions(dtype, own_splits):
    batch = Batch(RAGGED, 8, 2, 64, dtype, own_splits)
    assert_near(batch.attend(), batch.expected(), dtype)


@pytest.mark.parametrize("own_splits", [1, 4])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(9, 3, 64), (8, 1, 80), (12, 2, 128), (8, 4, 256)])
def test_decode_attention_is_softmax_over_keys_and_values_in_fp8(heads, key_heads, size, own_splits):
    batch = Batch(RAGGED, heads, key_heads, size, HALF, own_splits, fp8=True)
    assert_near(batch.attend(), batch.expected(), HALF)


@pytest.mark.parametrize(
    "groups",
    [
        [(1, [1])],  # one row, one key each
        [(64, [32])],  # whole blocks
        [(63, [31]), (65, [33])],  # one less, one more
        [(3, [1] * 100)],  # more members than a tile holds
        [(8192, [1, 4000])],  # a long prompt, one long answer beside a new one
        [(n, [n]) for n in range(1, 70)],  # many prompts of one member
    ],
)
@pytest.mark.parametrize("own_splits", [1, 4, 16])
def test_decode_attention_is_softmax_for_every_length(groups: Groups, own_splits: int):
    batch = Batch(groups, 12, 2, 128, HALF, own_splits)
    assert_near(batch.attend(), batch.expected(), HALF)


@pytest.mark.parametrize("own_splits", [1, 4])
@pytest.mark.parametrize(
    ("window", "cap", "sinks"),
    [
        (1, None, False),
        (50, None, False),
        (500, None, False),
        (None, 2.0, False),
        (None, None, True),
        (40, 3.0, True),
    ],
)
def test_windows_soft_caps_and_sinks_are_those_of_softmax(window, cap, sinks, own_splits):
    sinks_H = torch.linspace(-3.0, 3.0, 12, device=DEVICE) if sinks else None
    variant = AttentionVariant(window=window, cap=cap, sinks_H=sinks_H)
    batch = Batch(RAGGED, 12, 2, 64, HALF, own_splits, variant=variant)
    assert_near(batch.attend(), batch.expected(), HALF)


def test_idle_rows_change_nothing():
    alone = Batch(RAGGED, 12, 2, 128, HALF, 1)
    beside = Batch(RAGGED, 12, 2, 128, HALF, 1, idle_rows=7)
    beside.cache.keys[:, :-1].copy_(alone.cache.keys[:, :-1])
    beside.cache.values[:, :-1].copy_(alone.cache.values[:, :-1])
    beside.q_RHD[: len(alone.q_RHD)].copy_(alone.q_RHD)
    assert torch.isfinite(beside.attend()).all()
    assert_near(beside.attend(), alone.expected(), HALF)


@pytest.mark.parametrize("own_splits", [1, 4])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(9, 3, 64), (12, 2, 128), (8, 4, 256)])
@pytest.mark.parametrize("fp8", [False, True])
def test_decode_attention_gives_the_same_bits_every_time(fp8, heads, key_heads, size, own_splits):
    groups: Groups = [(300, [70] * 8), (40, [9, 90, 17])]
    batch = Batch(groups, heads, key_heads, size, HALF, own_splits, fp8=fp8)
    assert_repeatable(lambda: [batch.attend()])


def test_new_keys_are_stored_where_the_table_says():
    batch = Batch(RAGGED, 12, 4, 80, HALF, 1)
    rows = len(batch.tables)
    k_RKD, v_RKD = torch.randn(2, rows, 4, 80, device=DEVICE).to(HALF)
    places = [mine[-1] * PAGE + 3 for _, mine in batch.tables]
    batch.state.slot_mapping[:rows] = torch.tensor(places, device=DEVICE)
    before = batch.cache.keys.clone(), batch.cache.values.clone()
    batch.layout.store(k_RKD, v_RKD, layer=0)
    for now, was, new in zip((batch.cache.keys, batch.cache.values), before, (k_RKD, v_RKD), strict=True):
        expected = was[0].flatten(0, 1).clone()
        expected[places] = new
        assert torch.equal(now[0].flatten(0, 1), expected)


def test_the_suite_covers_every_tile_constant():
    assert (decode_attention.PROMPT_BLOCK, decode_attention.BLOCK, decode_attention.LEAST) == (64, 32, 128), (
        "lengths in this file are chosen around these sizes; choose them again"
    )
