"""Triton kernels for decode attention over the paged cache.

Every sequence attends to its group's prompt and to its own tokens. Prompts come first: a tile of members,
times the query heads of one key head, form the rows of one matrix product, so each prompt block is read once
for all of them. Each tile stores its share (partial output and base-2 log-sum-exp) in float32. Attention over
a sequence's own tokens runs concurrently and adds that share at the end. Long segments may be split over
programs; then `join_shares` merges all shares.

Names: a *slot* is a sequence's index in the state, a *row* its index in this step's batch.

All kernels of a decode step can be launched with programmatic dependent launch (PDL). A GPU idles for 1-2 µs
between two kernels, and a decode step has about 300. From compute capability 9.0 on, a kernel launched
`early` starts once every program of the previous kernel has called `let_next_start` or ended. It must call
`wait_for_previous` before it reads what that kernel writes. Every early kernel waits, so when it ends, all
earlier kernels have ended too.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

EARLY = tl.constexpr(
    torch.version.cuda is not None
    and torch.cuda.is_available()
    and not triton.knobs.runtime.interpret
    and all(torch.cuda.get_device_capability(n) >= (9, 0) for n in range(torch.cuda.device_count()))
)


@triton.jit
def wait_for_previous():
    if EARLY:
        gdc_wait()


@triton.jit
def let_next_start():
    if EARLY:
        gdc_launch_dependents()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, early: bool = False, **options: Any) -> None:
    if early and EARLY.value:
        options["launch_pdl"] = True
    kernel[grid](*args, **options)


def padded(size: int, *, least: int = 16) -> int:
    """Return the next power of two from `size` on, at least `least`: `tl.dot` needs 16."""
    return max(least, int(triton.next_power_of_2(size)))


@triton.jit
def _attend_segment(
    q, best, total, acc,
    KEYS, VALUES, KEY_SCALE, VALUE_SCALE, table, begin, end, head, scale, low,
    KEY_HEADS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Continue an online softmax over the tokens [begin, end) of a block table.

    WINDOW: a query's window begins at its `low`. CAP: soft cap on scores in base 2; 0 for none. FP8: keys and
    values have a scale for each token and head, which multiplies its score and its weight instead.
    """
    dims, offsets = tl.arange(0, DIM), tl.arange(0, BLOCK)
    for start in range(begin, end, BLOCK):
        at = start + offsets
        live = at < end
        block = tl.load(table + at // PAGE, mask=live, other=0).to(tl.int64)
        cell = (block * PAGE + at % PAGE) * KEY_HEADS + head
        where = cell[:, None] * SIZE + dims[None, :]
        mask = live[:, None] & (dims[None, :] < SIZE)
        k = tl.load(KEYS + where, mask=mask, other=0.0)
        score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        if FP8:  # no kernel of this step has read these lines before, so no L1 cache holds old scales
            score *= tl.load(KEY_SCALE + cell, mask=live, other=0.0)[None, :]
        if CAP > 0.0:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), with 2 / ln 2 = 2.885390…
            score = CAP * (1.0 - 2.0 / (tl.exp2(score * (2.8853900817779268 / CAP)) + 1.0))
        score = tl.where(live[None, :], score, float("-inf"))
        if WINDOW > 0:
            score = tl.where(at[None, :] >= low[:, None], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        safe = new_best
        if WINDOW > 0:  # all keys so far may be outside of the window: -inf minus -inf is NaN
            safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink, p = tl.exp2(best - safe), tl.exp2(score - safe[:, None])
        v = tl.load(VALUES + where, mask=mask, other=0.0)
        total = total * shrink + tl.sum(p, 1)
        if FP8:
            p *= tl.load(VALUE_SCALE + cell, mask=live, other=0.0)[None, :]
        acc = acc * shrink[:, None] + tl.dot(p.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        best = new_best
    return best, total, acc


@triton.jit(do_not_specialize=["table_width", "splits", "tiles"])
def attend_prompts(
    Q, KEYS, VALUES, KEY_SCALE, VALUE_SCALE, SHARE, LSE, TILES, PROMPT_TABLE, LENGTH,
    scale, q_row, q_head, table_width, splits, tiles,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, FP8: tl.constexpr,
    BLOCK: tl.constexpr, MEMBERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Programs iterate over the tiles (members of one prompt), each for one key head and prompt split.

    A tile holds the slot of its prompt (-1: no more tiles), the prompt's length, and the members' rows. The
    number of tiles in use is unknown when the grid is captured.
    """
    wait_for_previous()
    let_next_start()
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUPED: tl.constexpr = HEADS // KEY_HEADS
    lanes, dims = tl.arange(0, TILE), tl.arange(0, DIM)
    member = lanes // GROUPED
    query_head = head * GROUPED + lanes % GROUPED
    slot = tl.load(TILES + tile * (MEMBERS + 2))
    while slot >= 0:
        length = tl.load(TILES + tile * (MEMBERS + 2) + 1)
        row = tl.load(TILES + tile * (MEMBERS + 2) + 2 + member, mask=member < MEMBERS, other=-1)
        chunk = tl.cdiv(tl.cdiv(length, splits), BLOCK) * BLOCK
        begin = split * chunk
        end = tl.minimum(begin + chunk, length)

        used = row >= 0
        low = row
        if WINDOW > 0:
            low = length + tl.load(LENGTH + row, mask=used, other=0) - WINDOW
            begin = tl.maximum(begin, tl.min(tl.where(used, low, length), 0))
        mask = used[:, None] & (dims[None, :] < SIZE)
        where = row[:, None] * q_row + query_head[:, None] * q_head + dims[None, :]
        q = tl.load(Q + where, mask=mask, other=0.0)
        best = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        acc = tl.zeros([TILE, DIM], tl.float32)
        best, total, acc = _attend_segment(
            q, best, total, acc, KEYS, VALUES, KEY_SCALE, VALUE_SCALE,
            PROMPT_TABLE + slot * table_width, begin, end, head, scale, low,
            KEY_HEADS, SIZE, DIM, PAGE, BLOCK, WINDOW, CAP, FP8,
        )  # fmt: skip
        some = total > 0
        total = tl.where(some, total, 1.0)
        share = (row * HEADS + query_head) * splits + split
        tl.store(LSE + share, tl.where(some, best + tl.log2(total), float("-inf")), mask=used)
        tl.store(SHARE + share[:, None] * SIZE + dims[None, :], acc / total[:, None], mask=mask)
        tile += tl.num_programs(0)
        slot = tl.load(TILES + tile * (MEMBERS + 2), mask=tile < tiles, other=-1)


@triton.jit(do_not_specialize=["table_width", "splits", "own_splits"])
def attend_own(
    Q, KEYS, VALUES, KEY_SCALE, VALUE_SCALE, SHARE, LSE, OUT, OWN_SHARE, OWN_LSE, ROWS, LENGTH, TABLE, SINKS,
    scale, q_row, q_head, table_width, splits, own_splits,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, FP8: tl.constexpr,
    BLOCK: tl.constexpr, LEAST: tl.constexpr, PADDED: tl.constexpr, WHOLE: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """One program per (row, key head, split of the row's own tokens).

    WHOLE: there is one split, which adds the prompt's shares and writes the output. It overlaps with the
    prompt kernel and needs only those shares. LENGTH is by row; each split covers at least LEAST tokens.
    """
    let_next_start()
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(ROWS + row)
    length = tl.load(LENGTH + row)
    # Short rows leave some splits empty.
    chunk = tl.cdiv(tl.maximum(tl.cdiv(length, own_splits), LEAST), BLOCK) * BLOCK
    begin = split * chunk
    end = tl.minimum(begin + chunk, length)

    GROUPED: tl.constexpr = HEADS // KEY_HEADS
    lanes, dims = tl.arange(0, PADDED), tl.arange(0, DIM)
    used = lanes < GROUPED
    low = lanes
    if WINDOW > 0:
        begin = tl.maximum(begin, length - WINDOW)
        low = lanes * 0 + begin
    query_head = head * GROUPED + lanes
    mask = used[:, None] & (dims[None, :] < SIZE)
    share = (row * HEADS + query_head) * own_splits + split
    if begin >= end:
        wait_for_previous()
        tl.store(OWN_LSE + share, tl.full([PADDED], float("-inf"), tl.float32), mask=used)
        return
    # Bypass L1: no wait has happened since the previous kernels rotated the queries.
    at = Q + row * q_row + query_head[:, None] * q_head + dims[None, :]
    q = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    best = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    acc = tl.zeros([PADDED, DIM], tl.float32)
    best, total, acc = _attend_segment(
        q, best, total, acc, KEYS, VALUES, KEY_SCALE, VALUE_SCALE,
        TABLE + slot * table_width, begin, end, head, scale, low,
        KEY_HEADS, SIZE, DIM, PAGE, BLOCK, WINDOW, CAP, FP8,
    )  # fmt: skip
    wait_for_previous()
    if WHOLE:
        best, total, acc = _add_shares(
            best, total, acc, SHARE, LSE, row * HEADS + query_head, splits, used, mask, SIZE, DIM
        )
        if SINK:
            best, total, acc = _add_sinks(best, total, acc, SINKS + query_head, used)
    acc = acc / total[:, None]
    if WHOLE:
        where = (row * HEADS + query_head)[:, None] * SIZE + dims[None, :]
        tl.store(OUT + where, acc.to(OUT.dtype.element_ty), mask=mask)
    else:
        tl.store(OWN_LSE + share, best + tl.log2(total), mask=used)
        tl.store(OWN_SHARE + share[:, None] * SIZE + dims[None, :], acc, mask=mask)


@triton.jit
def _add_shares(
    best, total, acc, SHARE, LSE, first, splits, used, mask, SIZE: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """Continue an online softmax over partial outputs of other programs."""
    dims = tl.arange(0, DIM)
    for split in range(0, splits):
        share = first * splits + split
        lse = tl.load(LSE + share, mask=used, other=0.0)
        # Empty splits have no stored output.
        there = mask & (lse > float("-inf"))[:, None]
        part = tl.load(SHARE + share[:, None] * SIZE + dims[None, :], mask=there, other=0.0)
        new_best = tl.maximum(best, lse)
        # All splits so far may be empty: -inf minus -inf is NaN.
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink, weight = tl.exp2(best - safe), tl.exp2(lse - safe)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + part * weight[:, None]
        best = new_best
    return best, total, acc


@triton.jit
def _add_sinks(best, total, acc, sinks, used):
    """Continue an online softmax with the score of each head's attention sink, which has no value."""
    score = tl.load(sinks, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
    new_best = tl.maximum(best, score)
    shrink = tl.exp2(best - new_best)
    return new_best, total * shrink + tl.exp2(score - new_best), acc * shrink[:, None]


@triton.jit(do_not_specialize=["splits", "own_splits"])
def join_shares(
    SHARE, LSE, OWN_SHARE, OWN_LSE, OUT, SINKS, splits, own_splits,
    HEADS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """One program per row: merge the prompt's shares and the row's own into the output."""
    wait_for_previous()
    row = tl.program_id(0)
    heads, dims = tl.arange(0, PADDED), tl.arange(0, DIM)
    used = heads < HEADS
    mask = used[:, None] & (dims[None, :] < SIZE)
    best = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    acc = tl.zeros([PADDED, DIM], tl.float32)
    first = row * HEADS + heads
    best, total, acc = _add_shares(best, total, acc, SHARE, LSE, first, splits, used, mask, SIZE, DIM)
    best, total, acc = _add_shares(
        best, total, acc, OWN_SHARE, OWN_LSE, first, own_splits, used, mask, SIZE, DIM
    )
    if SINK:
        best, total, acc = _add_sinks(best, total, acc, SINKS + heads, used)
    output = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(OUT + first[:, None] * SIZE + dims[None, :], output.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def store_keys(
    K, V, KEYS, VALUES, PLACES, k_row, k_head, v_row, v_head,
    KEY_HEADS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One program per row: store its new key and value in the cache."""
    row = tl.program_id(0)
    place = tl.load(PLACES + row)
    heads, dims = tl.arange(0, PADDED), tl.arange(0, DIM)
    mask = (heads[:, None] < KEY_HEADS) & (dims[None, :] < SIZE)
    to = (place * KEY_HEADS + heads[:, None]) * SIZE + dims[None, :]
    k = tl.load(K + row * k_row + heads[:, None] * k_head + dims[None, :], mask=mask)
    tl.store(KEYS + to, k, mask=mask)
    v = tl.load(V + row * v_row + heads[:, None] * v_head + dims[None, :], mask=mask)
    tl.store(VALUES + to, v, mask=mask)
