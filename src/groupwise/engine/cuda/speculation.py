"""Speculative decoding without a draft model: several tokens of a sequence in one step.

Every sampled token is remembered under the tokens before it. Where few sequences run, a step takes about as
long for several tokens of each as for one. Then the tokens that followed the same context before, in this
sequence, its group or elsewhere, are drafted. *Lane* 0 of a sequence computes its last token, lane 1 the
first draft, and so on. The lanes are rows of the batch that share the sequence's KV blocks, so attention
needs no other kernels. Each lane samples the token after its own with the noise of that position. This is the
token that a plain step would sample. A lane counts if its draft is what the lane before has sampled.

The drafts of a step never change which tokens are sampled, only how many, up to the rounding of the logits.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from groupwise.engine.cuda.attention_kernels import launch
from groupwise.engine.cuda.decode_attention import StepState
from groupwise.model.device import to_device
from groupwise.model.policy import Policy
from groupwise.model.resolve import has_experts

WIDEST = 8
"""Most lanes of a sequence."""
LANES = 192
"""Most lanes of a step."""
CONTEXT = 3
"""Tokens of the longest context."""
ENTRIES = 1 << 22
"""Entries of the memory; of two tokens in the same entry, the one at the later position is kept."""
# An entry holds a position, a tag of the context, and the token.
TAG_BITS, TOKEN_BITS = tl.constexpr(20), tl.constexpr(20)
LAST_ENTRY = tl.constexpr(ENTRIES - 1)
LAST_TAG, LAST_TOKEN = tl.constexpr((1 << 20) - 1), tl.constexpr((1 << 20) - 1)


@triton.jit
def hashed(group, a, b, c):
    """Return the entry of a context and its tag, which tells most contexts with the same entry apart."""
    x = group.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    x = (x ^ a.to(tl.uint64)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 31) ^ b.to(tl.uint64)) * 0x94D049BB133111EB
    x = (x ^ (x >> 29) ^ c.to(tl.uint64)) * 0xD6E8FEB86659FD93
    x = x ^ (x >> 32)
    return (x & LAST_ENTRY).to(tl.int64), ((x >> 40) & LAST_TAG).to(tl.int64)


@triton.jit
def remember_one(MEMORY, position, group, a, b, c, token, live):
    entry, tag = hashed(group, a, b, c)
    value = (((position.to(tl.int64) << TAG_BITS) | tag) << TOKEN_BITS) | token.to(tl.int64)
    # Later kernels read it. The default order of memory would make every store wait for the one before.
    tl.atomic_max(MEMORY + entry, value, mask=live, sem="relaxed")


@triton.jit
def remember(MEMORY, position, group, a, b, c, token, live):
    """Store the token that followed a, b, c: for the group under both lengths of context, and for all.

    `position` is its place in the answer, from 1. Of several tokens after the same context, the one at the
    later position is kept, then the larger one: which one does not depend on the order of the programs.
    """
    remember_one(MEMORY, position, group, a, b, c, token, live)
    remember_one(MEMORY, position, group, a * 0 - 1, b, c, token, live)
    remember_one(MEMORY, position, group * 0, a, b, c, token, live)


@triton.jit
def recall_one(MEMORY, group, a, b, c, otherwise):
    entry, tag = hashed(group, a, b, c)
    found = tl.load(MEMORY + entry)
    same = (found > 0) & (((found >> TOKEN_BITS) & LAST_TAG) == tag)
    return tl.where(same, (found & LAST_TOKEN).to(tl.int32), otherwise)


@triton.jit
def recall(MEMORY, group, a, b, c):
    """Return what followed a, b, c in the group; else b, c there; else a, b, c anywhere; else -1."""
    token = recall_one(MEMORY, group * 0, a, b, c, tl.full([], -1, tl.int32))
    token = recall_one(MEMORY, group, a * 0 - 1, b, c, token)
    return recall_one(MEMORY, group, a, b, c, token)


@triton.jit(do_not_specialize=["count", "every"])
def begin_contexts(NEW, RECENT, GROUP, KNOWN, count, every):
    """One program per new sequence. NEW: slots, groups, and the last three tokens of the prompts."""
    number = tl.program_id(0)
    slot = tl.load(NEW + number)
    tl.store(GROUP + slot, tl.load(NEW + count + number))
    tl.store(RECENT + slot, tl.load(NEW + 2 * count + number).to(tl.int32))
    tl.store(RECENT + every + slot, tl.load(NEW + 3 * count + number).to(tl.int32))
    tl.store(RECENT + 2 * every + slot, tl.load(NEW + 4 * count + number).to(tl.int32))
    tl.store(KNOWN + slot, 0)


@triton.jit(do_not_specialize=["group"])
def remember_prompt(TOKENS, MEMORY, group):
    """One program per token of a prompt after its third."""
    at = tl.program_id(0)
    a, b, c = tl.load(TOKENS + at), tl.load(TOKENS + at + 1), tl.load(TOKENS + at + 2)
    group = group.to(tl.int64)
    remember(MEMORY, at * 0 + 1, group, a, b, c, tl.load(TOKENS + at + 3), at >= 0)


@triton.jit(do_not_specialize=["every"])
def remember_last(ROWS, LENGTH, TOKEN, RECENT, GROUP, KNOWN, MEMORY, every):
    """One program per row of a plain step: remember the token that it has sampled, if it has sampled one."""
    row = tl.program_id(0)
    slot = tl.load(ROWS + row)
    length, known = tl.load(LENGTH + slot), tl.load(KNOWN + slot)
    if length > known:
        a, b = tl.load(RECENT + slot), tl.load(RECENT + every + slot)
        c, token = tl.load(RECENT + 2 * every + slot), tl.load(TOKEN + slot)
        remember(MEMORY, length, tl.load(GROUP + slot), a, b, c, token, length > known)
        tl.store(RECENT + slot, b)
        tl.store(RECENT + every + slot, c)
        tl.store(RECENT + 2 * every + slot, token)
        tl.store(KNOWN + slot, length)


@triton.jit(do_not_specialize=["table_width", "every", "idle_block"])
def open_lanes(
    ROWS, LENGTH, TOKEN, DONE, SEED, SCALE, PROMPT_LENGTH, TABLE, ROOM, RECENT, GROUP, MEMORY,
    TOKENS, POSITIONS, PLACES, ROW_LENGTH,
    DRAFT, LANE_SEED, LANE_LENGTH, LANE_DONE, LANE_SCALE,
    table_width, every, idle_block,
    PAGE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per sequence: draft its next tokens, and gather the inputs of its lanes.

    A lane without a draft or without room in the sequence's blocks is done: it writes to the idle block.
    """
    row = tl.program_id(0) * WIDTH
    slot = tl.load(ROWS + row)
    length, done = tl.load(LENGTH + slot), tl.load(DONE + slot)
    seed, scale, room = tl.load(SEED + slot), tl.load(SCALE + slot), tl.load(ROOM + slot)
    group, prompt_length = tl.load(GROUP + slot), tl.load(PROMPT_LENGTH + slot)
    a, b, c = tl.load(RECENT + slot), tl.load(RECENT + every + slot), tl.load(RECENT + 2 * every + slot)
    token, live = tl.load(TOKEN + slot), done == 0
    last = length - 1
    for lane in tl.static_range(WIDTH):
        if lane > 0:
            token = recall(MEMORY, group, a, b, c)
            live = live & (token >= 0) & (last + lane < room)
            a, b, c = b, c, token
        at = tl.where(live, last + lane, last)
        inside = live | (lane == 0)
        block = tl.load(TABLE + slot * table_width + at // PAGE).to(tl.int64)
        place = tl.where(inside, block * PAGE + at % PAGE, idle_block.to(tl.int64) * PAGE + lane % PAGE)
        tl.store(TOKENS + row + lane, tl.where(inside, token, 0).to(tl.int64))
        tl.store(POSITIONS + row + lane, (prompt_length + at).to(tl.int64))
        tl.store(PLACES + row + lane, place)
        tl.store(ROW_LENGTH + row + lane, tl.where(inside, at + 1, 1))
        tl.store(DRAFT + row + lane, tl.where(live, token, -1))
        tl.store(LANE_SEED + row + lane, seed)
        tl.store(LANE_SCALE + row + lane, scale)
        tl.store(LANE_LENGTH + row + lane, length + lane)
        tl.store(LANE_DONE + row + lane, tl.where(live, 0, 1))


@triton.jit(do_not_specialize=["every", "lanes"])
def close_lanes(
    ROWS, LENGTH, TOKEN, DONE, RECENT, GROUP, KNOWN, MEMORY,
    DRAFT, LANE_TOKEN, LANE_DONE, LANE_LOGPROB, LANE_ENTROPY,
    OUT_DONE, OUT_COUNT, OUT_TOKEN, OUT_LOGPROB, OUT_ENTROPY,
    every, lanes,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per sequence: advance it by its lanes' tokens, up to the first wrong draft or the end."""
    number = tl.program_id(0)
    row = number * WIDTH
    slot = tl.load(ROWS + row)
    done, length, token = tl.load(DONE + slot), tl.load(LENGTH + slot), tl.load(TOKEN + slot)
    a, b, c = tl.load(RECENT + slot), tl.load(RECENT + every + slot), tl.load(RECENT + 2 * every + slot)
    group = tl.load(GROUP + slot)
    live, count = done == 0, done * 0
    for lane in tl.static_range(WIDTH):
        ended = tl.load(LANE_DONE + row + lane)
        drawn = tl.load(LANE_TOKEN + row + lane)
        tl.store(OUT_TOKEN + lane * lanes + number, drawn, mask=live)
        tl.store(OUT_LOGPROB + lane * lanes + number, tl.load(LANE_LOGPROB + row + lane), mask=live)
        tl.store(OUT_ENTROPY + lane * lanes + number, tl.load(LANE_ENTROPY + row + lane), mask=live)
        count += live.to(tl.int32)
        token = tl.where(live, drawn, token)
        remember(MEMORY, length + count, group, a, b, c, drawn, live)
        a, b, c = tl.where(live, b, a), tl.where(live, c, b), tl.where(live, drawn, c)
        done = tl.where(live, ended, done)
        if lane + 1 < WIDTH:
            live = live & (ended == 0) & (tl.load(DRAFT + row + lane + 1) == drawn)
    tl.store(TOKEN + slot, token)
    tl.store(LENGTH + slot, length + count)
    tl.store(KNOWN + slot, length + count)
    tl.store(DONE + slot, done)
    tl.store(RECENT + slot, a)
    tl.store(RECENT + every + slot, b)
    tl.store(RECENT + 2 * every + slot, c)
    tl.store(OUT_DONE + number, done)
    tl.store(OUT_COUNT + number, count)


class Speculation:
    """What tokens followed which, on the device, and the lanes of a step."""

    def __init__(self, *, slots: int, device: torch.device) -> None:
        self.device = device
        every = slots + 1
        self.memory = torch.zeros(ENTRIES, dtype=torch.int64, device=device)
        self.recent = torch.zeros(CONTEXT, every, dtype=torch.int32, device=device)
        """The last tokens of each sequence, prompt included."""
        self.group = torch.zeros(every, dtype=torch.int64, device=device)
        """Identifies the prompt of each sequence."""
        self.known = torch.zeros(every, dtype=torch.int32, device=device)
        """Tokens of each sequence that are remembered."""
        self.known[slots] = 1  # of the idle slot, none ever is

        def lanes(dtype: torch.dtype) -> Tensor:
            return torch.zeros(LANES, dtype=dtype, device=device)

        self.draft = lanes(torch.int32)
        # Named as in `StepState`: to the sampling kernels, a lane is a sequence.
        self.seed, self.length, self.scale = lanes(torch.int64), lanes(torch.int32), lanes(torch.float32)
        self.token, self.done = lanes(torch.int32), lanes(torch.int32)
        self.logprob, self.entropy = lanes(torch.float32), lanes(torch.float32)
        self.own = torch.arange(LANES, dtype=torch.int32, device=device)
        """The index of each lane."""
        self.results = torch.zeros(2 + 3 * WIDEST, LANES, dtype=torch.int32, device=device)
        """For the host, by sequence: whether it has ended, how many tokens it gained; tokens by lane, then
        log-probabilities, then entropies."""
        tokens, logprobs, entropies = self.results[2:].chunk(3)
        self.parts = (
            *(self.results[0], self.results[1], tokens),
            *(logprobs.view(torch.float32), entropies.view(torch.float32)),
        )

        self.remembered = 0
        """Tokens since everything was forgotten, as far as the host has counted them."""
        self._prompts: set[int] = set()

    def forget(self) -> None:
        """Forget every token. The rounding of a call's logits must not depend on the calls before it."""
        self.memory.zero_()
        self.remembered = 0
        self._prompts.clear()

    def begin(self, slots_J: NDArray[np.int64], prompts: Sequence[tuple[int, ...]]) -> None:
        """Start sequences in these slots, and remember their prompts."""
        # A group has one prompt, and hashing a long one takes its time.
        groups = {
            id(prompt): group_of(prompt) for prompt in {id(prompt): prompt for prompt in prompts}.values()
        }
        last = [(*(-1,) * CONTEXT, *prompt[-CONTEXT:])[-CONTEXT:] for prompt in prompts]
        new_5J = np.stack([slots_J, [groups[id(prompt)] for prompt in prompts], *np.transpose(last)])
        for prompt in prompts:
            if groups[id(prompt)] not in self._prompts:
                self._prompts.add(groups[id(prompt)])
                self.read_prompt(prompt)
        launch(
            begin_contexts,
            (len(slots_J),),
            to_device(new_5J, self.device),
            self.recent, self.group, self.known, len(slots_J), self.recent.shape[1],
            num_warps=1,
        )  # fmt: skip

    def read_prompt(self, prompt: tuple[int, ...]) -> None:
        """Remember the tokens of a prompt."""
        self.remembered += len(prompt)
        if len(prompt) > CONTEXT:
            tokens = to_device(np.array(prompt, dtype=np.int32), self.device)
            grid = (len(prompt) - CONTEXT,)
            launch(remember_prompt, grid, tokens, self.memory, group_of(prompt), num_warps=1)

    def remember(self, state: StepState, rows_R: Tensor, rows: int) -> None:
        """Remember the tokens that a plain step has sampled."""
        launch(
            remember_last,
            (rows,),
            rows_R, state.length, state.token, self.recent, self.group, self.known, self.memory,
            self.recent.shape[1],
            num_warps=1,
        )  # fmt: skip

    def open(self, state: StepState, sequences: int, *, width: int, page: int) -> None:
        """Draft tokens for a step, and set its inputs."""
        launch(
            open_lanes,
            (sequences,),
            state.rows, state.length, state.token, state.done, state.seed, state.scale,
            state.prompt_length, state.table, state.room, self.recent, self.group, self.memory,
            state.tokens, state.positions, state.slot_mapping, state.row_length,
            self.draft, self.seed, self.length, self.done, self.scale,
            state.own_width, self.recent.shape[1], state.idle_block,
            PAGE=page,
            WIDTH=width,
            num_warps=1,
        )  # fmt: skip

    def close(self, state: StepState, sequences: int, *, width: int) -> None:
        """Advance the sequences by the tokens that their lanes have sampled."""
        launch(
            close_lanes,
            (sequences,),
            state.rows, state.length, state.token, state.done, self.recent, self.group, self.known,
            self.memory,
            self.draft, self.token, self.done, self.logprob, self.entropy,
            *self.parts, self.recent.shape[1], self.results.shape[1],
            WIDTH=width,
            num_warps=1,
        )  # fmt: skip

    def unpack(self, results: Tensor, sequences: int) -> tuple[NDArray[np.int32], ...]:
        """Return (done_N, count_N, tokens_WN, logprobs_WN, entropies_WN) from a copy of `results`."""
        numbers = results.numpy()[:, :sequences]
        tokens, logprobs, entropies = np.split(numbers[2:], 3)
        return numbers[0], numbers[1], tokens, logprobs.view(np.float32), entropies.view(np.float32)


def group_of(prompt: tuple[int, ...]) -> int:
    """Return a number other than 0 that identifies a prompt."""
    return hash(prompt) or 1


def drafts_may_pay(policy: Policy) -> bool:
    """Whether a step with a few more rows takes about as long. With more rows, more experts are read."""
    return not has_experts(policy.model.config.get_text_config())


def sequences_of_a_step(sequences: int) -> int:
    """Return for how many sequences to capture the graph of a step with drafts."""
    steps = (1, 4, 8, 16)
    return next((count for count in steps if count >= sequences), -(-sequences // 32) * 32)


class Pace:
    """Chooses how many tokens of each sequence a step tries, from how many drafts were right lately."""

    WIDTHS = (2, 4, 8)
    REST = 64
    """Plain steps after drafts did not pay."""
    ROWS_TO_DOUBLE = 220
    """A step with so many rows takes twice as long as one with few, on an H200 with a model of 1.5B."""

    FIRST = (1.2, 0.8)
    """Right and wrong drafts that are assumed before any are known."""

    def __init__(self) -> None:
        self._right, self._wrong = self.FIRST
        self._resting = 0

    def width(self, sequences: int) -> int:
        """Return how many lanes each of so many sequences gets in the next step."""
        if self._resting:
            self._resting -= 1
            if not self._resting:  # not before: results of earlier steps arrive while it rests
                self._right, self._wrong = self.FIRST
            return 1
        count = sequences_of_a_step(sequences)
        widths = [1, *(width for width in self.WIDTHS if width * count <= LANES)]
        best = max(widths, key=lambda width: self.tokens(width) / (1 + width * count / self.ROWS_TO_DOUBLE))
        if best == 1 and len(widths) > 1:
            self._resting = self.REST - 1
        return best

    def tokens(self, width: int) -> float:
        """Return how many tokens a sequence should gain: 1 + p + p² + …, with p the share of right drafts."""
        share = self._right / (self._right + self._wrong)
        return sum(share**lane for lane in range(width))

    def gained(self, counts: NDArray[np.int32], width: int) -> None:
        """Note how many tokens each sequence gained in a step. The last steps count most."""
        self._right = 0.8 * self._right + float((counts - 1).clip(0).mean())
        self._wrong = 0.8 * self._wrong + float((counts < width).mean())
