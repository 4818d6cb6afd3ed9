"""One step of everyone who runs: a token each, drawn with each one's own settings."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from groupwise.engine.live_scheduler import LiveScheduler, Slots
from groupwise.engine.runner import Runner
from groupwise.engine.sampler import draw, likeliest, uniforms
from groupwise.engine.scheduler import Sequence
from groupwise.engine.stopping import StopStrings
from groupwise.model.distribution import scaled_logits
from groupwise.model.policy import Policy
from groupwise.records import Completion, Finish


class Steps(Protocol):
    known: NDArray[np.int64]
    """By slot, how many tokens of its sequence can be read in the scheduler's arrays."""

    def advance(self) -> list[tuple[Sequence, Completion]]:
        """Move everyone on, let others join, and return who has ended."""
        ...


class PlainSteps:
    """On any device, step by step."""

    def __init__(self, policy: Policy, scheduler: LiveScheduler, end_tokens: frozenset[int]) -> None:
        self.scheduler, self._ending = scheduler, Ending(policy, scheduler, end_tokens)
        self.runner = Runner(policy, blocks=scheduler.pool.count, block_size=scheduler.pool.block_size)
        self.known = scheduler.length

    def advance(self) -> list[tuple[Sequence, Completion]]:
        scheduler = self.scheduler
        scheduler.make_room()
        rows = [self.runner.decode(scheduler)] if scheduler.running else []
        joined = scheduler.admit()
        self.runner.prefill(list(dict.fromkeys(s.prefix for s in joined if s.prefix.logits_V is None)))
        rows += [s.prefix.logits_V[None] for s in joined if s.prefix.logits_V is not None]
        if not rows:
            return []
        logits_RV = torch.cat(rows).float()
        running = scheduler.slots()
        heat_R = torch.from_numpy(scheduler.temperatures(running, 1.0))
        logits_RV = logits_RV / heat_R.to(logits_RV.device)[:, None]
        for sampling, indices in scheduler.by_settings(running):
            slots = running[indices]
            at = scheduler.length[slots]
            noise = torch.from_numpy(uniforms(scheduler.seed[slots], at.astype(np.uint64)))
            drawn = draw(logits_RV[indices], sampling, noise.to(logits_RV.device))
            tokens, logprobs, entropies = (x.cpu().numpy() for x in drawn)
            scheduler.tokens[slots, at] = tokens
            scheduler.logprobs[slots, at] = logprobs
            scheduler.entropies[slots, at] = entropies
            asking = scheduler.alternatives[slots] > 0
            if asking.any():
                likely = likeliest(scaled_logits(logits_RV[indices[asking]], sampling).log_softmax(-1))
                scheduler.note(slots[asking], at[asking], *(x.cpu().numpy() for x in likely))
        scheduler.length[running] += 1
        return self._ending.finish(running, scheduler.length[running])


class Ending:
    """Tells which sequences are over, and lets them go."""

    def __init__(self, policy: Policy, scheduler: LiveScheduler, end_tokens: frozenset[int]) -> None:
        self.scheduler, self.end_tokens = scheduler, end_tokens
        self._ends = np.array(sorted(end_tokens), dtype=np.int64)
        self._stop_strings = StopStrings(policy)

    def finish(self, slots_N: Slots, lengths_N: Slots) -> list[tuple[Sequence, Completion]]:
        """End those of these slots' sequences that are over, now that each has so many tokens."""
        scheduler = self.scheduler
        over_N = np.isin(scheduler.tokens[slots_N, lengths_N - 1], self._ends)
        over_N |= (lengths_N >= scheduler.limit[slots_N]) | scheduler.stops[slots_N]
        ended: list[tuple[Sequence, Completion]] = []
        if over_N.any():  # only for them is it worth looking closer
            for slot, length in zip(slots_N[over_N].tolist(), lengths_N[over_N].tolist(), strict=True):
                sequence = scheduler.in_slot[slot]
                if why := self._reason(sequence, length):
                    scheduler.length[slot] = length
                    ended.append((sequence, scheduler.finish(sequence, why)))
        return ended

    def _reason(self, sequence: Sequence, length: int) -> Finish | None:
        """Why a sequence of this many tokens is over; None where it is not."""
        scheduler, slot = self.scheduler, sequence.slot
        written = scheduler.tokens[slot, :length]
        if int(written[-1]) in self.end_tokens:
            return "end"
        stop = scheduler.job_of(sequence).sampling.stop
        if stop and self._stop_strings.hits([written], stop)[0]:
            return "stop"
        return "length" if length >= scheduler.limit[slot] else None
