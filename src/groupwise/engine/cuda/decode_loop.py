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
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.engine.cuda.graph_runner import GraphRunner
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
    """One sampled token for each of these slots, whose results are still being copied to the host."""

    slots: NDArray[np.int64]
    at: NDArray[np.int64]
    """Position of each token in its completion."""
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
    """Tokens sampled in decode steps."""
    offered: int = 0
    """Tokens that full slots would have sampled, while enough sequences were left."""
    _issued: deque[InFlightStep] = field(default_factory=deque)
    _prefilling: Iterator[None] = field(default_factory=lambda: iter(()))
    """Prefill of the next prompts: one pass between two decode steps."""

    def run(self) -> None:
        scheduler = self.scheduler
        ahead = 0 if self.sampling.stop else AHEAD
        while scheduler.busy:
            # Before preempting, release sequences that have ended.
            if self._growing() > scheduler.pool.free:
                self._drain(keep=0)
            scheduler.make_room()
            moved = self._step() + self._join()
            self._drain(keep=ahead if moved else 0)
            scheduler.add(self.sink.ready(wait=not scheduler.busy))
        self._drain(keep=0)

    def _growing(self) -> int:
        slots = self.scheduler.slots()
        return int((self.scheduler.length[slots] > self.scheduler.room[slots]).sum())

    def _step(self) -> int:
        """Issue one more token for every sequence below its limit; return how many."""
        slots = self.scheduler.slots()
        slots = slots[self.scheduler.length[slots] < self.sampling.max_tokens]
        if len(slots):
            tenant = self.scheduler.tenant[slots]
            constrained = self.scheduler.masks.constrained[slots].any()
            self.runner.step(
                self.scheduler,
                slots,
                self.sampling,
                masks=self._masks if constrained else None,
                rule=partial(self._by_rule, slots) if self.rule else None,
            )
            # Sequences that have ended meanwhile are sampled once more; nobody reads the result.
            self._issue(slots[self.scheduler.tenant[slots] == tenant])
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
        self._issue(slots)
        return len(joined)

    def _next_needs_prefill(self) -> bool:
        waiting = self.scheduler.waiting
        return bool(waiting and self.scheduler.vacant and not waiting[0].prefix.blocks)

    def _issue(self, slots: NDArray[np.int64]) -> None:
        scheduler = self.scheduler
        status, arrived = self.runner.status()
        self._issued.append(
            InFlightStep(slots, scheduler.length[slots], scheduler.tenant[slots], status, arrived)
        )
        scheduler.length[slots] += 1

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
        slots, at = issued.slots[still], issued.at[still]
        self.sampled += int((at > 0).sum())
        done, tokens, *floats = issued.status.numpy()[:, slots]
        logprobs, entropies = (numbers.view(np.float32) for numbers in floats)
        check_finite("the entropy of the policy", float(entropies.sum()))
        scheduler.tokens[slots, at] = tokens
        scheduler.logprobs[slots, at] = logprobs
        scheduler.entropies[slots, at] = entropies
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
        scheduler.masks.update(slots[~ended], tokens[~ended])

    def _finish(self, sequence: Sequence, reason: Finish) -> None:
        self.sink.finished(sequence.request, sequence.member, self.scheduler.finish(sequence, reason))
