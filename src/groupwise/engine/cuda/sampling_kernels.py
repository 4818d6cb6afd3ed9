"""Triton kernels that gather the inputs of a decode step and sample its tokens.

Sampling reads the logits once: each program sums one chunk of the vocabulary. A second kernel, one program
per row, finds the chunk that the row's noise falls on, samples within it, and advances the sequence by one
token. The next step then needs nothing from the host.

The noise is the splitmix64 number of (seed, position) that `engine.sampler` uses, and cumulative sums are in
float64 as there: both sample the same tokens up to rounding of the logits.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from groupwise.engine.cuda.attention_kernels import launch, let_next_start, wait_for_previous
from groupwise.engine.sampler import Penalties
from groupwise.model.device import to_device

CHUNK = 4096
LOWEST = tl.constexpr(-1e30)
"""Finite stand-in for a logit of -inf."""


@triton.jit(do_not_specialize=["count"])
def begin_sequences(NEW, ROWS, SEED, ADAPTER, SCALE, LENGTH, DONE, count):
    """One program per new sequence. NEW: slots, seeds, adapters, and the bits of the inverse temperatures."""
    number = tl.program_id(0)
    slot = tl.load(NEW + number)
    tl.store(ROWS + number, slot.to(tl.int32))
    tl.store(SEED + slot, tl.load(NEW + count + number))
    tl.store(ADAPTER + slot, tl.load(NEW + 2 * count + number))
    tl.store(SCALE + slot, tl.load(NEW + 3 * count + number).to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(LENGTH + slot, 0)
    tl.store(DONE + slot, 0)


@triton.jit(do_not_specialize=["table_width"])
def open_step(
    ROWS, LENGTH, TOKEN, PROMPT_LENGTH, TABLE, TOKENS, POSITIONS, PLACES, ROW_LENGTH, table_width,
    PAGE: tl.constexpr,
):  # fmt: skip
    """One program per row: gather its last token, that token's position, and its KV cache slot."""
    row = tl.program_id(0)
    slot = tl.load(ROWS + row)
    last = tl.load(LENGTH + slot) - 1
    tl.store(ROW_LENGTH + row, last + 1)
    block = tl.load(TABLE + slot * table_width + last // PAGE).to(tl.int64)
    tl.store(TOKENS + row, tl.load(TOKEN + slot).to(tl.int64))
    tl.store(POSITIONS + row, (tl.load(PROMPT_LENGTH + slot) + last).to(tl.int64))
    tl.store(PLACES + row, block * PAGE + last % PAGE)


IN_PROMPT = tl.constexpr(1 << 30)
"""Added to the count of a token that is in the prompt."""


@triton.jit
def penalize(
    LOGITS, COUNTS, BIAS, FACTORS, ROWS, TOKEN, vocabulary, CHUNK: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """One program per (row, chunk): change the logits in place, as `engine.sampler.Penalties.apply` does.

    FACTORS: whether the slot has penalties, repetition, frequency, presence. COUNT: the last token of the
    sequence is not counted yet. Rows without penalties are left alone.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(ROWS + row).to(tl.int64)
    if tl.load(FACTORS + 4 * slot) != 0:
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = at < vocabulary
        found = tl.load(COUNTS + slot * vocabulary + at, mask=inside, other=0)
        if COUNT:
            is_last = at == tl.load(TOKEN + slot)
            found += is_last.to(tl.int32)
            tl.store(COUNTS + slot * vocabulary + at, found, mask=inside & is_last)
        x = tl.load(LOGITS + row * vocabulary + at, mask=inside, other=0.0)
        x += tl.load(BIAS + slot * vocabulary + at, mask=inside, other=0.0)
        repetition = tl.load(FACTORS + 4 * slot + 1)
        x = tl.where(found > 0, tl.where(x > 0, x / repetition, x * repetition), x)
        count = found % IN_PROMPT
        x -= count.to(tl.float32) * tl.load(FACTORS + 4 * slot + 2)
        x -= tl.where(count > 0, tl.load(FACTORS + 4 * slot + 3), 0.0)
        tl.store(LOGITS + row * vocabulary + at, x, mask=inside)


@triton.jit(do_not_specialize=["words"])
def apply_masks(LOGITS, MASKS, ROWS, vocabulary, words, CHUNK: tl.constexpr):
    """One program per (row, chunk): store -inf for each token that the mask of the row's slot excludes."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    there = at < vocabulary
    slot = tl.load(ROWS + row).to(tl.int64)
    word = tl.load(MASKS + slot * words + at // 32, mask=there, other=0)
    excluded = ((word >> (at % 32)) & 1) == 0
    tl.store(LOGITS + row.to(tl.int64) * vocabulary + at, float("-inf"), mask=there & excluded)


@triton.jit
def sum_chunks(
    LOGITS, BEST, BEST_AT, TOTAL, WEIGHTED, ROWS, SCALE, vocabulary, chunks,
    CHUNK: tl.constexpr, GREEDY: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One program per (row, chunk): the largest scaled logit (GREEDY: and its index), Σ exp, Σ exp · logit.

    SCALED: the logits are already divided by the temperature.
    """
    let_next_start()
    wait_for_previous()
    row, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(LOGITS + row.to(tl.int64) * vocabulary + at, mask=at < vocabulary, other=float("-inf"))
    x = x.to(tl.float32)
    if not SCALED:
        x = x * tl.load(SCALE + tl.load(ROWS + row))
    # A finite floor keeps weight * (x - best) at 0 for masked tokens; 0 * -inf would be NaN.
    x = tl.maximum(x, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    to = row * chunks + chunk
    if GREEDY:
        best, best_at = tl.max(x, 0, return_indices=True)
        tl.store(BEST_AT + to, chunk * CHUNK + best_at)
    else:
        best = tl.max(x, 0)
    weight = tl.exp(x - best)
    # A row without any valid token must yield NaN, so that the host detects it.
    tl.store(BEST + to, tl.where(best == LOWEST, float("-inf"), best))
    tl.store(TOTAL + to, tl.sum(weight, 0))
    tl.store(WEIGHTED + to, tl.sum(weight * (x - best), 0))


@triton.jit
def uniform(seed, position):
    """The uniform number of (seed, position): same as `engine.sampler.uniforms`."""
    x = seed.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    # 53 bits are exact in float64, so the signed conversion is safe.
    return (x >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def locate(weights, index, aim, COUNT: tl.constexpr):
    """Find the weight that `aim`, a fraction of their sum, falls on: same as `engine.sampler._locate`."""
    mass = tl.cumsum(weights, 0)
    total = tl.sum(tl.where(index == COUNT - 1, mass, 0.0), 0)
    goal = aim * total
    found = tl.sum((mass <= goal).to(tl.int32), 0)
    found = tl.minimum(found, tl.sum((mass < total).to(tl.int32), 0))
    found = tl.minimum(found, COUNT - 1)
    weight = tl.sum(tl.where(index == found, weights, 0.0), 0)
    before = tl.sum(tl.where(index == found, mass, 0.0), 0) - weight
    rest = (goal - before) / tl.where(weight > 0, weight, 1.0)
    return found, tl.minimum(tl.maximum(rest, 0.0), 1.0), total


@triton.jit(do_not_specialize=["max_tokens"])
def close_step(
    LOGITS, BEST, BEST_AT, TOTAL, WEIGHTED, ROWS, SEED, LENGTH, TOKEN, DONE, LOGPROB, ENTROPY, ENDS,
    SCALE, vocabulary, chunks, max_tokens,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PADDED_ENDS: tl.constexpr, GREEDY: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """One program per row: sample its next token and advance its sequence, unless it has ended."""
    wait_for_previous()
    row = tl.program_id(0)
    slot = tl.load(ROWS + row)
    length = tl.load(LENGTH + slot)
    done = tl.load(DONE + slot)
    inverse_temperature = 1.0 if SCALED else tl.load(SCALE + slot)

    index = tl.arange(0, CHUNKS)
    there = index < chunks
    bests = tl.load(BEST + row * chunks + index, mask=there, other=float("-inf"))
    best = tl.max(bests, 0)
    scale = tl.exp(bests - best).to(tl.float64)
    totals = tl.load(TOTAL + row * chunks + index, mask=there, other=0.0).to(tl.float64) * scale
    weighted = tl.load(WEIGHTED + row * chunks + index, mask=there, other=0.0).to(tl.float64) * scale
    # A chunk without valid tokens has a maximum of -inf, which must not enter the sum.
    lift = tl.where(totals > 0, bests - best, 0.0).to(tl.float64)
    total = tl.sum(totals, 0)
    log_total = tl.log(total.to(tl.float32))
    entropy = log_total - (tl.sum(weighted + totals * lift, 0) / total).to(tl.float32)

    if GREEDY:
        at = tl.load(BEST_AT + row * chunks + index, mask=there & (bests == best), other=2147483647)
        token = tl.minimum(tl.min(at, 0), vocabulary - 1)
    else:
        noise = uniform(tl.load(SEED + slot), length.to(tl.int64))
        chunk, rest, _ = locate(totals, index, noise, CHUNKS)
        within = tl.arange(0, CHUNK)
        x = tl.load(
            LOGITS + row.to(tl.int64) * vocabulary + chunk * CHUNK + within,
            mask=chunk * CHUNK + within < vocabulary,
            other=float("-inf"),
        )
        weight = tl.exp(x.to(tl.float32) * inverse_temperature - best).to(tl.float64)
        place, _, _ = locate(weight, within, rest, CHUNK)
        token = tl.minimum(chunk * CHUNK + place, vocabulary - 1)
    logit = tl.load(LOGITS + row.to(tl.int64) * vocabulary + token).to(tl.float32) * inverse_temperature

    is_end = tl.sum((tl.load(ENDS + tl.arange(0, PADDED_ENDS)) == token).to(tl.int32), 0)
    ended = (length + 1 >= max_tokens) | (is_end > 0)
    # Late warps may read what is stored here. That is safe: one thread does all stores, after its own loads.
    if done == 0:
        tl.store(TOKEN + slot, token)
        tl.store(LOGPROB + slot, logit - best - log_total)
        tl.store(ENTROPY + slot, entropy)
        tl.store(LENGTH + slot, length + 1)
        tl.store(DONE + slot, ended.to(tl.int32))


class PenaltyState:
    """Penalties and token counts by slot, in static device memory; one more slot for idle rows."""

    def __init__(self, *, slots: int, vocabulary: int, device: torch.device) -> None:
        self.counts = torch.zeros(slots + 1, vocabulary, dtype=torch.int32, device=device)
        self.bias = torch.zeros(slots + 1, vocabulary, device=device)
        self.factors = torch.zeros(slots + 1, 4, device=device)
        self._active: set[int] = set()

    def set(self, slot: int, penalties: Penalties | None, prompt: Sequence[int]) -> None:
        """Set the penalties of a sequence that starts in this slot."""
        if penalties is None:
            if slot in self._active:
                self.factors[slot].zero_()
                self._active.discard(slot)
            return
        self._active.add(slot)
        device = self.factors.device
        self.counts[slot].zero_()
        seen = to_device(np.unique(np.array(prompt, dtype=np.int64)), device)
        self.counts[slot].index_fill_(0, seen, IN_PROMPT.value)
        self.bias[slot].zero_()
        if penalties.bias:
            tokens, values = zip(*penalties.bias, strict=True)
            added = to_device(np.array(values, dtype=np.float32), device)
            self.bias[slot].index_copy_(0, to_device(np.array(tokens, dtype=np.int64), device), added)
        factors = [1.0, penalties.repetition, penalties.frequency, penalties.presence]
        self.factors[slot].copy_(to_device(np.array(factors, dtype=np.float32), device))

    def apply(self, logits_RV: Tensor, rows_R: Tensor, last: Tensor, *, count: bool) -> Tensor:
        """Return the logits with each row's penalties; `count`: first count the last token of its slot."""
        logits_RV = logits_RV.float().contiguous()
        rows, vocabulary = logits_RV.shape
        launch(
            penalize,
            (rows, -(-vocabulary // CHUNK)),
            logits_RV, self.counts, self.bias, self.factors, rows_R, last, vocabulary,
            CHUNK=CHUNK,
            COUNT=count,
            num_warps=4,
        )  # fmt: skip
        return logits_RV
