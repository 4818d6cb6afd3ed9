"""Steps of a server on a GPU: CUDA graphs, with the host a few draws ahead.

As `engine.cuda.ahead`, but with a graph for each kind of settings that are in use, and with ends that differ.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from groupwise.engine.cuda.ahead import AHEAD, Issued
from groupwise.engine.cuda.attention import padded
from groupwise.engine.cuda.runner import GraphRunner, Room
from groupwise.engine.live_scheduler import LiveScheduler
from groupwise.engine.live_steps import Ending
from groupwise.engine.scheduler import Sequence
from groupwise.invariants import check_finite
from groupwise.model.policy import Policy
from groupwise.records import Completion

LARGEST_GROUP = 8
"""Answers to one prompt that share a read of it."""
TOGETHER, PATIENCE = 8, 0.02
"""One answer for every so many that run may begin at once; after so many seconds whoever waits."""


class GraphSteps:
    """The device moves each sequence on by itself; the host learns of it late."""

    def __init__(self, policy: Policy, scheduler: LiveScheduler, end_tokens: frozenset[int]) -> None:
        self.scheduler, self._ending = scheduler, Ending(policy, scheduler, end_tokens)
        room = Room(
            slots=len(scheduler.length),
            blocks=scheduler.pool.count,
            prompt_blocks=padded(scheduler.prompt_tables.shape[1], least=1),
            own_blocks=padded(scheduler.tables.shape[1], least=1),
            largest_group=LARGEST_GROUP,
        )
        self.runner = GraphRunner(policy, room, block_size=scheduler.pool.block_size)
        self.known = np.zeros(len(scheduler.length), dtype=np.int64)
        self._issued: deque[Issued] = deque()
        self._waits_since: float | None = None
        """When the first of those who wait could have joined."""

    def advance(self) -> list[tuple[Sequence, Completion]]:
        scheduler = self.scheduler
        scheduler.make_room()
        moved = self._step() + self._join()
        # Stop strings need text: then nobody runs ahead of it.
        stops = bool(scheduler.stops[scheduler.slots()].any())
        ended: list[tuple[Sequence, Completion]] = []
        while len(self._issued) > (AHEAD if moved and not stops else 0):
            ended += self._take_in(self._issued.popleft())
        return ended

    def _step(self) -> int:
        """Issue a token more for everyone who may have one to come; return how many."""
        scheduler = self.scheduler
        slots = scheduler.slots()
        going = slots[scheduler.length[slots] < scheduler.limit[slots]]
        for sampling, indices in scheduler.by_settings(going):
            slots = going[indices]
            self.runner.step(scheduler, slots, sampling, likely=self._asking(slots))
        self._issue(going)
        return len(going)

    def _join(self) -> int:
        """Let waiting sequences start, and issue their first token."""
        scheduler = self.scheduler
        if not self._time_to_join():
            return 0
        joined = scheduler.admit()
        self.runner.prefill(list(dict.fromkeys(s.prefix for s in joined if s.prefix.logits_V is None)))
        slots = np.array([sequence.slot for sequence in joined], dtype=np.int64)
        for sampling, indices in scheduler.by_settings(slots):
            prefixes = [joined[index].prefix for index in indices]
            likely = self._asking(slots[indices])
            self.runner.join(scheduler, slots[indices], prefixes, sampling, likely=likely)
        self.known[slots] = 0
        self._issue(slots)
        return len(joined)

    def _time_to_join(self) -> bool:
        """Prompts are computed several at a time: a pass over one takes longer than a step of everyone."""
        queued, running = self.scheduler.queued, len(self.scheduler.running)
        if not queued:
            self._waits_since = None
            return True
        now = time.monotonic()
        self._waits_since = self._waits_since or now
        if queued * TOGETHER < running and now < self._waits_since + PATIENCE:
            return False
        self._waits_since = None
        return True

    def _asking(self, slots: NDArray[np.int64]) -> bool:
        """Whether someone in these slots wants to know the likeliest tokens."""
        return bool(self.scheduler.alternatives[slots].any())

    def _issue(self, slots: NDArray[np.int64]) -> None:
        if not len(slots):
            return
        scheduler = self.scheduler
        status, arrived = self.runner.status(likely=self._asking(slots))
        self._issued.append(Issued(slots, scheduler.length[slots], scheduler.tenant[slots], status, arrived))
        scheduler.length[slots] += 1

    def _take_in(self, issued: Issued) -> list[tuple[Sequence, Completion]]:
        if issued.arrived is not None:
            issued.arrived.synchronize()
        scheduler = self.scheduler
        still = scheduler.tenant[issued.slots] == issued.tenant
        slots, at = issued.slots[still], issued.at[still]
        tokens = issued.status[1].numpy()[slots]
        logprobs, entropies = issued.status[2:4].view(torch.float32).numpy()[:, slots]
        check_finite("the entropy of the policy", float(entropies.sum()))
        scheduler.tokens[slots, at] = tokens
        scheduler.logprobs[slots, at] = logprobs
        scheduler.entropies[slots, at] = entropies
        asking = scheduler.alternatives[slots] > 0
        if asking.any():
            likely, likely_logprobs = issued.status[4:].chunk(2)
            shown = (likely, likely_logprobs.view(torch.float32))
            scheduler.note(slots[asking], at[asking], *(x.numpy()[:, slots[asking]].T for x in shown))
        self.known[slots] = at + 1
        return self._ending.finish(slots, at + 1)
