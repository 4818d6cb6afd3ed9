"""Steps of a server on a GPU: CUDA graphs, with the host a few draws ahead.

As `engine.cuda.ahead`, but with a graph for each kind of settings that are in use, with ends that differ, and
with prompts computed on a stream of their own: a step of a few dozen answers leaves most of the GPU idle.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from groupwise.engine.cuda.ahead import Issued
from groupwise.engine.cuda.launch import padded
from groupwise.engine.cuda.prompts import PromptGraphs
from groupwise.engine.cuda.runner import GraphRunner, Room, new_stream
from groupwise.engine.live_scheduler import LiveScheduler
from groupwise.engine.live_steps import Ending
from groupwise.engine.scheduler import Sequence
from groupwise.invariants import check_finite
from groupwise.model.policy import Policy
from groupwise.records import Completion

LARGEST_GROUP = 8
"""Answers to one prompt that share a read of it."""
TOGETHER, PATIENCE = 8, 0.004
"""One answer for every so many that run may begin at once; after so many seconds whoever waits."""
AHEAD = 2
"""Draws issued before the results of one are looked at: someone waits for each place that is free."""


class Beside:
    """A stream for work that runs beside what the main one is given later, and behind all it has by now."""

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(device)

    def run(self, work: Callable[[], None]) -> torch.cuda.Event | None:
        """Give it work; returns what tells when that is done, None: it is done."""
        if self._stream is None:
            work()
            return None
        # Behind the main stream: steps that were issued may still write to blocks that have a new owner.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            return done


@dataclass(frozen=True, slots=True)
class Joining:
    """Sequences that have slots, and whose prompts are being computed."""

    sequences: list[Sequence]
    computed: torch.cuda.Event | None

    @property
    def ready(self) -> bool:
        return self.computed is None or bool(self.computed.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Let whatever the main stream is given from now on come after the prompts."""
        if self.computed is not None:
            self.computed.wait()


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
        self._prompts = PromptGraphs(policy, self.runner.cache, idle_block=room.blocks)
        self._beside = Beside(policy.device)
        self._joining: Joining | None = None
        self._issued: deque[Issued] = deque()
        self._waits_since: float | None = None
        """When the first of those who wait could have joined."""

    def advance(self) -> list[tuple[Sequence, Completion]]:
        scheduler = self.scheduler
        self._leave_out_cancelled()
        scheduler.make_room()
        moved = self._step() + self._join()
        # Stop strings need text: then nobody runs ahead of it.
        stops = bool(scheduler.stops[self._begun()].any())
        ended: list[tuple[Sequence, Completion]] = []
        while len(self._issued) > (AHEAD if moved and not stops else 0):
            ended += self._take_in(self._issued.popleft())
        return ended

    def _step(self) -> int:
        """Issue a token more for everyone who may have one to come; return how many."""
        scheduler = self.scheduler
        slots = self._begun()
        going = slots[scheduler.length[slots] < scheduler.limit[slots]]
        for sampling, indices in scheduler.by_settings(going):
            slots = going[indices]
            self.runner.step(scheduler, slots, sampling, likely=self._asking(slots))
        self._issue(going)
        return len(going)

    def _begun(self) -> NDArray[np.int64]:
        """The slots of all who run, but for those whose prompts are being computed."""
        if self._joining is None:
            return self.scheduler.slots()
        waiting = {sequence.slot for sequence in self._joining.sequences}
        return np.array([slot for slot in self.scheduler.slots().tolist() if slot not in waiting], np.int64)

    def _join(self) -> int:
        """Let waiting sequences start: have their prompts computed, then issue their first token."""
        if self._joining is None and self._time_to_join():
            self._joining = self._compute_prompts()
        if self._joining is None:
            return 0
        if len(self._begun()) and not self._joining.ready:
            return 0
        self._joining.wait()
        joined, self._joining = self._joining.sequences, None
        scheduler = self.scheduler
        slots = np.array([sequence.slot for sequence in joined], dtype=np.int64)
        for sampling, indices in scheduler.by_settings(slots):
            prefixes = [joined[index].prefix for index in indices]
            likely = self._asking(slots[indices])
            self.runner.join(scheduler, slots[indices], prefixes, sampling, likely=likely)
        self._issue(slots)
        return len(joined)

    def _compute_prompts(self) -> Joining | None:
        """Give slots to those who wait, and their prompts to the stream beside."""
        joined = self.scheduler.admit()
        if not joined:
            return None
        self.known[[sequence.slot for sequence in joined]] = 0  # nobody reads what was there before
        prefixes = list(dict.fromkeys(s.prefix for s in joined if s.prefix.logits_V is None))
        return Joining(joined, self._beside.run(lambda: self._prompts.compute(prefixes, self.runner.hidden)))

    def _leave_out_cancelled(self) -> None:
        """Forget who was cancelled while joining, once their prompts no longer write to blocks they had."""
        if self._joining is None:
            return
        running = set(self.scheduler.running)
        left = [sequence for sequence in self._joining.sequences if sequence in running]
        if len(left) < len(self._joining.sequences):
            self._joining.wait()
            self._joining = Joining(left, self._joining.computed) if left else None

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
