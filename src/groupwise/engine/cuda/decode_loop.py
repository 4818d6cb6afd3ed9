"""The decode loop on a GPU: the host issues steps ahead and reads their results late.

The device samples each token and detects the end of each sequence. The host sees it a few steps later; until
then the row of an ended sequence idles and keeps its blocks. The device runs work in the order of issue, so
whatever the host issues next runs after those idle steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.engine.cuda.graph_runner import GraphRunner
from groupwise.engine.cuda.speculation import Pace
from groupwise.engine.prefill import PREFILL_TOKENS
from groupwise.engine.sampler import StopStrings
from groupwise.engine.scheduler import Scheduler, Sequence
from groupwise.invariants import check_finite
from groupwise.model.ops.logits import LogitsProcessor
from groupwise.records import Finish, Sampling

if TYPE_CHECKING:
    from groupwise.engine.engine import CompletionSink

AHEAD = 4
"""Steps issued before the host reads the result of one. With stop strings, which need the text: none."""


DONE = object()


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """Sampled tokens for each of these slots, whose results are still being copied to the host."""

    slots: NDArray[np.int64]
    width: int
    """Most tokens that a sequence may have gained."""
    tenant: NDArray[np.int64]
    status: Tensor
    arrived: torch.cuda.Event | None


@dataclass(slots=True)
class DecodeLoop:
    """The decode loop of one engine call."""

    scheduler: Scheduler
    runner: GraphRunner
    sampling: Sampling
    end_tokens: frozenset[int]
    stop_strings: StopStrings
    sink: CompletionSink
    rule: LogitsProcessor | None = None
    """A sampling rule of the user. It needs the tokens on the host, so no step is issued ahead of it."""
    sampled: int = 0
    """Sequences that sampled in a decode step, over all steps."""
    offered: int = 0
    """Sequences that full slots would have had, while enough were left."""
    _issued: deque[InFlightStep] = field(default_factory=deque)
    _known: NDArray[np.int64] = field(init=False)
    """Tokens of each slot's sequence that have arrived; `scheduler.length` counts all that may be issued."""
    _pace: Pace = field(default_factory=Pace)
    _prefilling: Iterator[None] = field(default_factory=lambda: iter(()))
    """Prefill of the next prompts: one pass between two decode steps."""

    def __post_init__(self) -> None:
        self._known = np.zeros_like(self.scheduler.length)

    def run(self) -> None:
        scheduler = self.scheduler
        ahead = 0 if self.sampling.stop else AHEAD
        while scheduler.busy:
            # Before preempting, release sequences that have ended.
            if scheduler.blocks_to_add().sum() > scheduler.pool.free:
                self._drain(keep=0)
            width = self._width()
            scheduler.make_room(extra=width - 1)
            moved = self._step(width) + self._join()
            self._drain(keep=ahead if moved else 0)
            scheduler.add(self.sink.ready(wait=not scheduler.busy))
        self._drain(keep=0)

    def _width(self) -> int:
        """Return how many tokens of each sequence the next step tries."""
        scheduler = self.scheduler
        slots = scheduler.slots()
        if self.runner.speculation is None or self.rule is not None or not len(slots):
            return 1
        if scheduler.masks.constrained[slots].any():
            return 1
        width = self._pace.width(len(slots))
        # Drafts must not cost another sequence its blocks.
        return width if scheduler.blocks_to_add(width - 1).sum() <= scheduler.pool.free else 1

    def _step(self, width: int) -> int:
        """Issue more tokens, at most `width`, for every sequence below its limit; return how many."""
        slots = self.scheduler.slots()
        slots = slots[self.scheduler.length[slots] < self.scheduler.limit[slots]]
        if len(slots):
            tenant = self.scheduler.tenant[slots]
            constrained = self.scheduler.masks.constrained[slots].any()
            self.runner.step(
                self.scheduler,
                slots,
                self.sampling,
                masks=self._masks if constrained else None,
                rule=partial(self._by_rule, slots) if self.rule else None,
                width=width,
            )
            # Sequences that have ended meanwhile are sampled once more; nobody reads the result.
            self._issue(slots, tenant, width)
            unfinished = len(self.scheduler.running) + len(self.scheduler.waiting)
            self.offered += min(unfinished, len(self.scheduler.length))
        return len(slots)

    def _masks(self) -> Tensor:
        """Return the masks of the next tokens, which depend on the tokens before."""
        self._drain(keep=0)
        return self.scheduler.masks.words_SW

    def _by_rule(self, slots: NDArray[np.int64], logits_NV: Tensor) -> Tensor:
        """Apply the user's rule to the logits of the sequences in these slots, but for those that end now."""
        assert self.rule is not None
        tenant = self.scheduler.tenant[slots]
        self._drain(keep=0)
        still = self.scheduler.tenant[slots] == tenant
        if still.any():
            rows = torch.from_numpy(np.flatnonzero(still)).to(logits_NV.device)
            logits_NV[rows] = self.rule(self.scheduler.contexts(slots[still]), logits_NV[rows])
        return logits_NV

    def _join(self) -> int:
        """Admit waiting sequences and issue their first token; return how many."""
        scheduler = self.scheduler
        if next(self._prefilling, DONE) is DONE and self._next_needs_prefill():
            self._prefilling = self.runner.prefill_passes(scheduler.prepare(PREFILL_TOKENS))
            next(self._prefilling, DONE)
        joined = scheduler.admit()
        if not joined:
            return 0
        self.runner.prefill(list(dict.fromkeys(s.prefix for s in joined if s.prefix.logits_V is None)))
        slots = np.array([sequence.slot for sequence in joined])
        masks_SW = scheduler.masks.words_SW if scheduler.masks.constrained[slots].any() else None
        prefixes = [sequence.prefix for sequence in joined]
        rule = partial(self._by_rule, slots) if self.rule else None
        self.runner.join(scheduler, slots, prefixes, self.sampling, masks_SW=masks_SW, rule=rule)
        self._known[slots] = 0
        self._issue(slots, scheduler.tenant[slots], 1)
        return len(joined)

    def _next_needs_prefill(self) -> bool:
        waiting = self.scheduler.waiting
        return bool(waiting and self.scheduler.vacant and not waiting[0].prefix.blocks)

    def _issue(self, slots: NDArray[np.int64], tenant: NDArray[np.int64], width: int) -> None:
        status, arrived = self.runner.status(drafted=width > 1)
        self._issued.append(InFlightStep(slots, width, tenant, status, arrived))
        still = self.scheduler.tenant[slots] == tenant
        self.scheduler.length[slots[still]] += width

    def _drain(self, *, keep: int) -> None:
        """Process results until `keep` steps are in flight."""
        while len(self._issued) > keep:
            issued = self._issued.popleft()
            if issued.arrived is not None:
                issued.arrived.synchronize()
            self._process(issued)

    def _process(self, issued: InFlightStep) -> None:
        scheduler = self.scheduler
        still = scheduler.tenant[issued.slots] == issued.tenant
        slots = issued.slots[still]
        if issued.width == 1:
            done, tokens, *floats = issued.status.numpy()[:, slots]
            logprobs, entropies = (numbers.view(np.float32) for numbers in floats)
            check_finite("the entropy of the policy", float(entropies.sum()))
            self.sampled += int((self._known[slots] > 0).sum())
            self._add(slots, tokens, logprobs, entropies, done)
            return
        assert self.runner.speculation is not None
        unpacked = self.runner.speculation.unpack(issued.status, len(issued.slots))
        done, counts, tokens_WN, logprobs_WN, entropies_WN = (numbers[..., still] for numbers in unpacked)
        self.sampled += len(slots)
        if len(slots):
            self._pace.gained(counts, issued.width)
        scheduler.length[slots] -= issued.width - counts
        tenant = scheduler.tenant[slots]
        for lane in range(issued.width):
            # A stop string may have ended a sequence at an earlier lane.
            rows = np.flatnonzero((counts > lane) & (scheduler.tenant[slots] == tenant))
            if not len(rows):
                break
            entropies = entropies_WN[lane, rows]
            check_finite("the entropy of the policy", float(entropies.sum()))
            last = (counts[rows] == lane + 1) & (done[rows] != 0)
            self._add(slots[rows], tokens_WN[lane, rows], logprobs_WN[lane, rows], entropies, last)

    def _add(
        self,
        slots: NDArray[np.int64],
        tokens: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        entropies: NDArray[np.float32],
        done: NDArray[Any],
    ) -> None:
        """Add a token to the sequence in each slot, and finish the sequences that end with it."""
        scheduler, at = self.scheduler, self._known[slots]
        scheduler.tokens[slots, at] = tokens
        scheduler.logprobs[slots, at] = logprobs
        scheduler.entropies[slots, at] = entropies
        self._known[slots] += 1
        stop = np.zeros(len(slots), dtype=np.bool_)
        if self.sampling.stop and len(slots):
            written = (scheduler.tokens[slot, : n + 1] for slot, n in zip(slots, at, strict=True))
            stop = self.stop_strings.hits(written, self.sampling.stop)
        ended = done.astype(np.bool_) | stop
        for row in np.flatnonzero(ended):
            slot = int(slots[row])
            scheduler.length[slot] = at[row] + 1
            end = int(tokens[row]) in self.end_tokens and not scheduler.masks.failed[slot]
            self._finish(scheduler.in_slot[slot], "end" if end else "stop" if stop[row] else "length")
        scheduler.masks.update(slots[~ended], tokens[~ended].astype(np.int64))

    def _finish(self, sequence: Sequence, reason: Finish) -> None:
        self.sink.finished(sequence.request, sequence.member, self.scheduler.finish(sequence, reason))
