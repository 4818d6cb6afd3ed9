"""One step of everyone who runs: a token each, drawn with each one's own settings."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from groupwise.engine.live_scheduler import LiveScheduler
from groupwise.engine.runner import Runner
from groupwise.engine.sampler import draw, uniforms
from groupwise.engine.scheduler import Sequence
from groupwise.engine.stopping import StopStrings
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
        self.scheduler, self.end_tokens = scheduler, end_tokens
        self.runner = Runner(policy, blocks=scheduler.pool.count, block_size=scheduler.pool.block_size)
        self.known = scheduler.length
        self._stop_strings = StopStrings(policy)

    def advance(self) -> list[tuple[Sequence, Completion]]:
        scheduler = self.scheduler
        scheduler.make_room()
        rows = [self.runner.decode(scheduler)] if scheduler.running else []
        joined = scheduler.admit()
        self.runner.prefill(list(dict.fromkeys(s.prefix for s in joined if s.prefix.logits_V is None)))
        rows += [s.prefix.logits_V[None] for s in joined if s.prefix.logits_V is not None]
        if not rows:
            return []
        logits_RV = torch.cat(rows)
        for sampling, indices in scheduler.by_settings(scheduler.running).items():
            slots = scheduler.slots()[indices]
            at = scheduler.length[slots]
            noise = torch.from_numpy(uniforms(scheduler.seed[slots], at.astype(np.uint64)))
            drawn = draw(logits_RV[indices], sampling, noise.to(logits_RV.device))
            tokens, logprobs, entropies = (x.cpu().numpy() for x in drawn)
            scheduler.tokens[slots, at] = tokens
            scheduler.logprobs[slots, at] = logprobs
            scheduler.entropies[slots, at] = entropies
        scheduler.length[scheduler.slots()] += 1
        ended = [(s, why) for s in scheduler.running if (why := self._reason(s)) is not None]
        return [(sequence, scheduler.finish(sequence, why)) for sequence, why in ended]

    def _reason(self, sequence: Sequence) -> Finish | None:
        scheduler = self.scheduler
        return reason_to_end(
            scheduler,
            sequence,
            int(scheduler.length[sequence.slot]),
            self.end_tokens,
            self._stop_strings,
        )


def reason_to_end(
    scheduler: LiveScheduler,
    sequence: Sequence,
    length: int,
    end_tokens: frozenset[int],
    stop_strings: StopStrings,
) -> Finish | None:
    """Why a sequence of this many tokens is over; None where it is not."""
    slot = sequence.slot
    written = scheduler.tokens[slot, :length]
    if int(written[-1]) in end_tokens:
        return "end"
    stop = scheduler.job_of(sequence).sampling.stop
    if stop and stop_strings.hits([written], stop)[0]:
        return "stop"
    return "length" if length >= scheduler.limit[slot] else None
