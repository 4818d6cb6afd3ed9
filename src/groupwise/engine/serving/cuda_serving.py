"""GPU steps of the serving engine, and short prompts prefilled as CUDA graphs.

For short prompts, launching the kernels of a pass takes longer than running them. Whole prompts are packed
into a row of one of a few sizes, and a dummy segment pads the row. All other passes (long prompts,
continuations, prompt log-probabilities) run without a graph.

Axes: T tokens of a row, P prompts it may hold, M hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.engine.cuda.attention_kernels import padded
from groupwise.engine.cuda.decode_attention import Capacity
from groupwise.engine.cuda.decode_loop import InFlightStep
from groupwise.engine.cuda.graph_runner import (
    GraphRunner,
    can_be_captured,
    captured,
    new_stream,
    runs_without_sync,
)
from groupwise.engine.cuda.speculation import ENTRIES, Pace
from groupwise.engine.paged_attention import KVCache
from groupwise.engine.prefill import Forward, Prefill, PrefillLayout, Segment, slot_mapping
from groupwise.engine.scheduler import Sequence
from groupwise.engine.serving.serving_scheduler import FinishCheck, ServingScheduler, nothing
from groupwise.invariants import check_finite
from groupwise.model.attention.packed import Kind, Parts
from groupwise.model.attention.segment_attention import VarlenAttention, supports_flash
from groupwise.model.policy import Policy
from groupwise.records import Completion

SIZES = (64, 128, 256, 512, 1024)
PROMPTS = 16


class StaticRow:
    """A prefill pass of one size, in static device memory."""

    def __init__(self, policy: Policy, cache: KVCache, size: int, *, idle_block: int) -> None:
        self.size = size
        self._policy, self._cache = policy, cache
        self._idle = idle_block * cache.block_size
        device = policy.device
        self._whole = torch.zeros(3 * size + PROMPTS, dtype=torch.int64, device=device)
        self._starts = torch.zeros(PROMPTS + 2, dtype=torch.int32, device=device)
        self._logits_PV: Tensor | None = None
        self._run: Callable[[], None] | None = None
        self._capture = device.type == "cuda"

    def compute(self, segments: SequenceOf[Segment], forward: Forward, pool: Any) -> Tensor:
        """Return the next-token logits of each prompt."""
        lengths = self._fill(segments)
        if self._run is not None:
            self._run()
        else:
            self._pass(lengths, forward)
            self._capture = self._capture and runs_without_sync(lambda: self._pass(lengths, forward))
            if self._capture:
                stream = torch.cuda.current_stream()
                self._run = captured(lambda: self._pass(lengths, forward), stream=stream, pool=pool)
                self._run()
        assert self._logits_PV is not None
        return self._logits_PV[: len(segments)].clone()  # the next pass overwrites them

    def _fill(self, segments: SequenceOf[Segment]) -> NDArray[np.int64]:
        """Pack prompts into the row; return the lengths of all its segments, the padding last."""
        host = np.zeros(3 * self.size + PROMPTS, dtype=np.int64)
        tokens, positions, at, ends = np.split(host, [self.size, 2 * self.size, 3 * self.size])
        at[:] = self._idle
        lengths = np.zeros(PROMPTS + 1, dtype=np.int64)
        start = 0
        for number, segment in enumerate(segments):
            own = slice(start, start + segment.length)
            tokens[own], positions[own] = segment.prefix.tokens, np.arange(segment.length)
            at[own] = slot_mapping(segment.prefix.blocks, self._cache.block_size)[: segment.length]
            lengths[number], start = segment.length, own.stop
            ends[number] = own.stop - 1
        lengths[-1] = self.size - start
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        for to, array in ((self._whole, host), (self._starts, starts)):
            staged = torch.from_numpy(array)
            to.copy_(staged.pin_memory() if to.is_cuda else staged, non_blocking=True)
        return lengths

    def _pass(self, lengths: NDArray[np.int64], forward: Forward) -> None:
        tokens_T, positions_T, slot_mapping_T, ends_P = torch.split(
            self._whole, [self.size, self.size, self.size, PROMPTS]
        )
        # A graph reads the segment starts from device memory at every replay.
        varlen = VarlenAttention(
            starts_q=self._starts,
            starts_k=self._starts,
            longest_q=self.size,
            longest_k=self.size,
            causal=True,
            window=None,
        )
        parts: dict[Kind, Parts] = {VarlenAttention: (varlen, None)}
        nothing = np.zeros(0, dtype=np.int64)
        layout = PrefillLayout(
            cache=self._cache,
            slot_mapping=slot_mapping_T,
            lengths=lengths,
            before=nothing,
            before_slots=slot_mapping_T[:0],
            device=self._whole.device,
            _parts=parts,
        )
        hidden_TM = forward(tokens_T, positions_T, layout)
        self._logits_PV = self._policy.logits(hidden_TM[ends_P])


class PrefillGraphs(Prefill):
    """Prefill that runs small batches of short prompts as CUDA graphs."""

    def __init__(self, policy: Policy, cache: KVCache, *, idle_block: int) -> None:
        super().__init__(policy, cache)
        self._idle_block = idle_block
        query_THD = policy.head_weight.new_empty(0, policy.heads, policy.head_size)
        standard = all(call.plain and (call.window or SIZES[-1]) >= SIZES[-1] for call in policy.attention)
        supported = standard and (supports_flash(query_THD) or not query_THD.is_cuda)
        self._possible = supported and can_be_captured(policy)
        """Needs varlen attention without a window: others need the lengths on the host."""
        self.rows: dict[int, StaticRow] = {}
        """Rows built so far, by size."""
        self._pool: Any = None

    def _pass(self, segments: SequenceOf[Segment], forward: Forward) -> None:
        total = sum(segment.length for segment in segments)
        size = next((size for size in SIZES if total <= size), None)
        plain = all(s.start == 0 and s.complete and s.prefix.scores is None for s in segments)
        if size is None or not (self._possible and plain) or len(segments) > PROMPTS:
            super()._pass(segments, forward)
            return
        if size not in self.rows:
            self.rows[size] = StaticRow(self.policy, self.cache, size, idle_block=self._idle_block)
        if self.policy.device.type == "cuda":
            self._pool = self._pool or torch.cuda.graph_pool_handle()
        logits_PV = self.rows[size].compute(segments, forward, self._pool)
        for segment, logits_V in zip(segments, logits_PV, strict=True):
            segment.prefix.done, segment.prefix.logits_V = segment.end, logits_V


LARGEST_GROUP = 8
"""Completions of one prompt that share a read of it."""
JOIN_RATIO, PATIENCE = 8, 0.004
"""Start waiting completions once there is one per `JOIN_RATIO` running ones, or after `PATIENCE` seconds."""
MOST_REMEMBERED = ENTRIES // 8
"""Tokens after which drafts are forgotten: each has up to three entries."""
AHEAD = 2
"""Steps issued before the host reads the result of one; few, because requests wait for free slots."""


class SideStream:
    """A stream whose work runs after everything issued so far on the main stream, but beside later work."""

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(device)

    def run(self, work: Callable[[], None]) -> torch.cuda.Event | None:
        """Issue work and return the event of its completion; None: it has completed."""
        if self._stream is None:
            work()
            return None
        # Wait for the main stream: issued steps may still write to blocks that have been reassigned.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            return done


@dataclass(frozen=True, slots=True)
class PendingPrefill:
    """Sequences with slots whose prompts are being computed."""

    sequences: list[Sequence]
    computed: torch.cuda.Event | None

    @property
    def ready(self) -> bool:
        return self.computed is None or bool(self.computed.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Make later work on the main stream wait for the prompts."""
        if self.computed is not None:
            self.computed.wait()


class CUDASteps:
    """Decode steps as CUDA graphs; the device advances sequences and the host reads results late."""

    def __init__(
        self,
        policy: Policy,
        scheduler: ServingScheduler,
        end_tokens: frozenset[int],
        *,
        speculative: bool = True,
    ) -> None:
        self.scheduler, self._finish_check = scheduler, FinishCheck(policy, scheduler, end_tokens)
        room = Capacity(
            slots=len(scheduler.length),
            blocks=scheduler.pool.count,
            prompt_blocks=padded(scheduler.prompt_tables.shape[1], least=1),
            own_blocks=padded(scheduler.tables.shape[1], least=1),
            largest_group=LARGEST_GROUP,
        )
        self.runner = GraphRunner(policy, room, block_size=scheduler.pool.block_size, speculative=speculative)
        self._pace = Pace()
        self.known = np.zeros(len(scheduler.length), dtype=np.int64)
        self._prompts = PrefillGraphs(policy, self.runner.cache, idle_block=room.blocks)
        self._side_stream = SideStream(policy.device)
        self._prefilling: PendingPrefill | None = None
        self._issued: deque[InFlightStep] = deque()
        self._waits_since: float | None = None
        """When the first waiting sequence could have joined."""

    def advance(self, meanwhile: Callable[[], None] = nothing) -> list[tuple[Sequence, Completion]]:
        scheduler = self.scheduler
        self._remove_cancelled()
        width = self._width()
        scheduler.make_room(extra=width - 1)
        ended: list[tuple[Sequence, Completion]] = []
        moved = self._step(ended, meanwhile, width) + self._join()
        # Stop strings need the text on the host, so do not run ahead.
        stops = bool(scheduler.stops[self._decoding_slots()].any())
        self._drain(ended, keep=AHEAD if moved and not stops else 0)
        return ended

    def _drain(self, ended: list[tuple[Sequence, Completion]], *, keep: int) -> None:
        """Process results until `keep` steps are in flight; add sequences that have ended to `ended`."""
        while len(self._issued) > keep:
            ended += self._process(self._issued.popleft())

    def _width(self) -> int:
        """Return how many tokens of each sequence the next step tries.

        One if a request needs every token on the host, or if the requests have different settings.
        """
        scheduler, slots = self.scheduler, self._decoding_slots()
        drafts = self.runner.speculation
        if drafts is None:
            return 1
        if drafts.remembered > MOST_REMEMBERED:
            drafts.forget()
        if not len(slots) or len(np.unique(scheduler.settings[slots])) > 1:
            return 1
        if (scheduler.masks.constrained | scheduler.penalized | (scheduler.alternatives > 0))[slots].any():
            return 1
        width = self._pace.width(len(slots))
        return width if scheduler.blocks_to_add(width - 1).sum() <= scheduler.pool.free else 1

    def _step(
        self, ended: list[tuple[Sequence, Completion]], meanwhile: Callable[[], None], width: int
    ) -> int:
        """Issue at most `width` more tokens for every sequence below its limit; return how many sequences."""
        undone = [meanwhile]
        scheduler = self.scheduler
        slots = self._decoding_slots()
        active = slots[scheduler.length[slots] < scheduler.limit[slots]]
        tenant = scheduler.tenant[active]

        def masks() -> Tensor:
            # A mask depends on the token before, which the host reads while the device runs the layers.
            while undone:
                undone.pop()()
            self._drain(ended, keep=0)
            return scheduler.masks.words_SW

        for sampling, indices in scheduler.by_settings(active):
            slots = active[indices]
            constrained = scheduler.masks.constrained[slots].any()
            self.runner.step(
                scheduler,
                slots,
                sampling,
                likely=self._wants_alternatives(slots),
                penalized=bool(scheduler.penalized[slots].any()),
                masks=masks if constrained else None,
                width=width,
            )
        while undone:
            undone.pop()()
        # Sequences that have ended meanwhile are sampled once more; nobody reads the result.
        self._issue(active, tenant, width)
        return len(active)

    def _decoding_slots(self) -> NDArray[np.int64]:
        """Return the slots of running sequences whose prompts have been computed."""
        if self._prefilling is None:
            return self.scheduler.slots()
        waiting = {sequence.slot for sequence in self._prefilling.sequences}
        return np.array([slot for slot in self.scheduler.slots().tolist() if slot not in waiting], np.int64)

    def _join(self) -> int:
        """Start waiting sequences: prefill their prompts, then issue their first token."""
        if self._prefilling is None and self._time_to_join():
            self._prefilling = self._compute_prompts()
        if self._prefilling is None:
            return 0
        if len(self._decoding_slots()) and not self._prefilling.ready:
            return 0
        self._prefilling.wait()
        joined, self._prefilling = self._prefilling.sequences, None
        scheduler = self.scheduler
        slots = np.array([sequence.slot for sequence in joined], dtype=np.int64)
        for sequence in joined:
            penalties = scheduler.penalties[sequence.slot]
            self.runner.set_penalties(sequence.slot, penalties, sequence.prefix.tokens)
        for sampling, indices in scheduler.by_settings(slots):
            prefixes = [joined[index].prefix for index in indices]
            constrained = scheduler.masks.constrained[slots[indices]].any()
            self.runner.join(
                scheduler,
                slots[indices],
                prefixes,
                sampling,
                likely=self._wants_alternatives(slots[indices]),
                penalized=bool(scheduler.penalized[slots[indices]].any()),
                masks_SW=scheduler.masks.words_SW if constrained else None,
            )
        self._issue(slots, scheduler.tenant[slots], 1)
        return len(joined)

    def _compute_prompts(self) -> PendingPrefill | None:
        """Admit waiting sequences and issue their prefill on the side stream."""
        joined = self.scheduler.admit()
        if not joined:
            return None
        self.known[[sequence.slot for sequence in joined]] = 0  # discard the previous sequence's count
        prefixes = list(dict.fromkeys(s.prefix for s in joined if s.prefix.logits_V is None))
        return PendingPrefill(
            joined, self._side_stream.run(lambda: self._prompts.compute(prefixes, self.runner.hidden))
        )

    def _remove_cancelled(self) -> None:
        """Remove sequences cancelled during prefill, after it has stopped writing to their former blocks."""
        if self._prefilling is None:
            return
        running = set(self.scheduler.running)
        active = [sequence for sequence in self._prefilling.sequences if sequence in running]
        if len(active) < len(self._prefilling.sequences):
            self._prefilling.wait()
            self._prefilling = PendingPrefill(active, self._prefilling.computed) if active else None

    def _time_to_join(self) -> bool:
        """Whether to start a prefill now. Prompts are batched: a prefill takes longer than a decode step."""
        queued, running = self.scheduler.queued, len(self.scheduler.running)
        if not queued:
            self._waits_since = None
            return True
        now = time.monotonic()
        self._waits_since = self._waits_since or now
        if queued * JOIN_RATIO < running and now < self._waits_since + PATIENCE:
            return False
        self._waits_since = None
        return True

    def _wants_alternatives(self, slots: NDArray[np.int64]) -> bool:
        """Whether any sequence in these slots requests top log-probabilities."""
        return bool(self.scheduler.alternatives[slots].any())

    def _issue(self, slots: NDArray[np.int64], tenant: NDArray[np.int64], width: int) -> None:
        if not len(slots):
            return
        scheduler = self.scheduler
        likely = self._wants_alternatives(slots)
        status, arrived = self.runner.status(likely=likely, drafted=width > 1)
        self._issued.append(InFlightStep(slots, width, tenant, status, arrived))
        scheduler.length[slots[scheduler.tenant[slots] == tenant]] += width

    def _process(self, issued: InFlightStep) -> list[tuple[Sequence, Completion]]:
        if issued.arrived is not None:
            issued.arrived.synchronize()
        scheduler = self.scheduler
        still = scheduler.tenant[issued.slots] == issued.tenant
        slots = issued.slots[still]
        if issued.width > 1:
            return self._process_drafted(issued, still)
        logprobs, entropies = issued.status[2:4].view(torch.float32).numpy()[:, slots]
        return self._add(
            slots, issued.status[1].numpy()[slots], logprobs, entropies, likely=issued.status[4:]
        )

    def _process_drafted(
        self, issued: InFlightStep, still: NDArray[np.bool_]
    ) -> list[tuple[Sequence, Completion]]:
        scheduler, slots = self.scheduler, issued.slots[still]
        assert self.runner.speculation is not None
        unpacked = self.runner.speculation.unpack(issued.status, len(issued.slots))
        _, counts, tokens_WN, logprobs_WN, entropies_WN = (numbers[..., still] for numbers in unpacked)
        scheduler.length[slots] -= issued.width - counts
        if len(slots):
            self._pace.gained(counts, issued.width)
        ended: list[tuple[Sequence, Completion]] = []
        for lane in range(issued.width):
            # The limit of a request or a stop string may have ended a sequence at an earlier lane.
            rows = np.flatnonzero((counts > lane) & (scheduler.tenant[slots] == issued.tenant[still]))
            if len(rows):
                results = (tokens_WN[lane, rows], logprobs_WN[lane, rows], entropies_WN[lane, rows])
                ended += self._add(slots[rows], *results)
        return ended

    def _add(
        self,
        slots: NDArray[np.int64],
        tokens: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        entropies: NDArray[np.float32],
        *,
        likely: Tensor | None = None,
    ) -> list[tuple[Sequence, Completion]]:
        """Add a token to the sequence in each slot, and return the sequences that end with it.

        `likely`: the most likely tokens of each slot, for the sequences that request them.
        """
        check_finite("the entropy of the policy", float(entropies.sum()))
        scheduler, at = self.scheduler, self.known[slots]
        scheduler.tokens[slots, at] = tokens
        scheduler.logprobs[slots, at] = logprobs
        scheduler.entropies[slots, at] = entropies
        requesting = scheduler.alternatives[slots] > 0
        if likely is not None and requesting.any():
            tokens_AS, logprobs_AS = likely.chunk(2)
            shown = (tokens_AS, logprobs_AS.view(torch.float32))
            scheduler.note(
                slots[requesting], at[requesting], *(x.numpy()[:, slots[requesting]].T for x in shown)
            )
        if self.runner.speculation is not None:
            self.runner.speculation.remembered += len(slots)
        self.known[slots] = at + 1
        return self._finish_check.finish(slots, at + 1)
