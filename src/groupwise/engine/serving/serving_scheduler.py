"""The scheduler of a server: requests come and go, and each has its own settings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from groupwise.engine.cpu_runner import Runner
from groupwise.engine.kv_cache import BlockPool, Prefix
from groupwise.engine.sampler import Alternatives, PromptLogprobs, StopStrings, draw, likeliest, uniforms
from groupwise.engine.scheduler import Scheduler, Sequence
from groupwise.model.ops.logits import scaled_logits
from groupwise.model.policy import Policy
from groupwise.records import Completion, Finish, Request, Sampling

Slots = NDArray[np.int64]

MOST_SETTINGS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A prompt with as many members as it has seeds, each answered with these settings."""

    prompt: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: Sampling
    alternatives: int = 0
    """How many of the likeliest tokens are told beside each one that is drawn."""
    scores_prompt: bool = False
    """Whether the prompt's own tokens are told with their log-probabilities, too."""


class ServingScheduler(Scheduler):
    """Requests have numbers that are used again. A job starts when blocks are set aside for all of it."""

    def __init__(self, *, slots: int, pool: BlockPool, context: int) -> None:
        super().__init__([Request(prompt=(0,), seeds=(0,))], slots=slots, pool=pool, max_tokens=context)
        self.waiting.clear()
        self.context = context
        # Every running sequence may be of a request of its own; jobs that wait have no number yet.
        self.prompt_length = np.zeros(slots, dtype=np.int64)
        self.prompt_tables = np.zeros((slots, pool.blocks_for(context)), dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)
        """Tokens that each slot's sequence may write."""
        self.stops = np.zeros(slots, dtype=np.bool_)
        """Whether a stop string may end it before."""
        self.alternatives = np.zeros(slots, dtype=np.int64)
        """How many are to be told."""
        self.untold: defaultdict[Sequence, list[Alternatives]] = defaultdict(list)
        """Those of each token that nobody was told of yet, of who asked for them."""
        self.drawn: list[Sampling] = [Sampling()] * slots
        """What a draw for it depends on besides its temperature; equal settings have one number."""
        self.settings = np.zeros(slots, dtype=np.int64)
        self._known: dict[Sampling, int] = {}
        self._next_number = count()
        self._jobs: dict[int, Job] = {}
        self._queue: list[Job] = []
        self._numbers = list(range(slots - 1, -1, -1))
        self._unfinished: dict[int, int] = {}
        """Members of each request that have not ended."""
        self._owners: dict[Sequence, Job] = {}
        self._reserved = 0

    @property
    def busy(self) -> bool:
        return bool(self._queue or self.waiting or self.running)

    def check(self, job: Job) -> None:
        """Refuse a job that could never run."""
        if not job.prompt:
            raise ValueError("the prompt has no tokens")
        total = len(job.prompt) + job.sampling.max_tokens
        if total > self.context:
            raise ValueError(
                f"{len(job.prompt)} tokens of prompt and {job.sampling.max_tokens} to come exceed the "
                f"context of {self.context} tokens"
            )
        if len(job.seeds) > len(self.length) or self.need(job) > self.pool.count:
            raise ValueError(f"n={len(job.seeds)} answers of that length do not fit at once")

    def need(self, job: Job) -> int:
        """Blocks that a job may come to use."""
        own = self.pool.blocks_for(job.sampling.max_tokens)
        return self.pool.blocks_for(len(job.prompt)) + len(job.seeds) * own

    def enter(self, job: Job) -> None:
        self._queue.append(job)

    def admit(self) -> list[Sequence]:
        """Start jobs, the longest waiting first, while slots and blocks last."""
        while self._queue:
            job = self._queue[0]
            free = self.vacant - len(self.waiting)
            if len(job.seeds) > free or self._reserved + self.need(job) > self.pool.count:
                break
            self._begin(self._queue.pop(0))
        joined = super().admit()
        for sequence in joined:
            job, slot = self.job_of(sequence), sequence.slot
            sampling, self.alternatives[slot] = job.sampling, job.alternatives
            self.limit[slot], self.stops[slot] = sampling.max_tokens, bool(sampling.stop)
            # Logits are divided by each one's own temperature: it tells nobody apart.
            temperature = 0.0 if sampling.greedy else 1.0
            self.drawn[slot] = replace(sampling, stop=(), max_tokens=self.context, temperature=temperature)
            self.settings[slot] = self._number_of(self.drawn[slot])
        return joined

    def _number_of(self, drawn: Sampling) -> int:
        """The same number for the same settings; forgotten when clients have come up with too many."""
        if drawn not in self._known:
            if len(self._known) >= MOST_SETTINGS:
                self._known.clear()
            self._known[drawn] = next(self._next_number)
        return self._known[drawn]

    def _begin(self, job: Job) -> None:
        number = self._numbers.pop()
        self._jobs[number], self._unfinished[number] = job, len(job.seeds)
        self._reserved += self.need(job)
        self.prompt_length[number] = len(job.prompt)
        scores = PromptLogprobs(job.alternatives) if job.scores_prompt else None
        prefix = Prefix(tokens=job.prompt, scores=scores)
        temperature = None if job.sampling.greedy else job.sampling.temperature
        members = [
            Sequence(number, m, seed, prefix, temperature=temperature) for m, seed in enumerate(job.seeds)
        ]
        self._owners.update(dict.fromkeys(members, job))
        self.waiting.extend(members)

    def finish(self, sequence: Sequence, reason: Finish) -> Completion:
        completion = super().finish(sequence, reason)
        self._leave(sequence.request)
        return completion

    def _leave(self, number: int) -> None:
        self._unfinished[number] -= 1
        if not self._unfinished[number]:
            self._reserved -= self.need(self._jobs.pop(number))
            del self._unfinished[number]
            self._numbers.append(number)

    def drop(self, job: Job) -> list[Sequence]:
        """Forget a job; returns those of its members that were running."""
        self._queue = [waiting for waiting in self._queue if waiting is not job]
        number = next((n for n, known in self._jobs.items() if known is job), None)
        if number is None:
            return []
        running = [sequence for sequence in self.running if sequence.request == number]
        for sequence in [sequence for sequence in self.waiting if sequence.request == number]:
            self.waiting.remove(sequence)
            self.forget(sequence)
            self._leave(number)
        for sequence in running:
            self.finish(sequence, "length")
        return running

    def job_of(self, sequence: Sequence) -> Job:
        """Whose member a sequence is, also when it has ended; until it is forgotten."""
        return self._owners[sequence]

    def forget(self, sequence: Sequence) -> Job:
        self.untold.pop(sequence, None)
        return self._owners.pop(sequence)

    def note(
        self, slots_N: Slots, at_N: Slots, tokens_NA: NDArray[np.int64], logprobs_NA: NDArray[np.float32]
    ) -> None:
        """Keep what might have been drawn in these places of sequences that asked for it."""
        # The drawn token has one log-probability, wherever it is told; another rounding is not another one.
        drawn_N1, own_N1 = self.tokens[slots_N, at_N, None], self.logprobs[slots_N, at_N, None]
        logprobs_NA = np.where(tokens_NA == drawn_N1, own_N1, logprobs_NA)
        for slot, tokens, logprobs in zip(slots_N, tokens_NA.tolist(), logprobs_NA.tolist(), strict=True):
            pairs = [pair for pair in zip(tokens, logprobs, strict=True) if pair[1] > -np.inf]
            self.untold[self.in_slot[slot]].append(tuple(pairs[: self.alternatives[slot]]))

    @property
    def queued(self) -> int:
        """Answers of jobs that have not begun."""
        return sum(len(job.seeds) for job in self._queue)

    def by_settings(self, slots_N: Slots) -> Iterator[tuple[Sampling, Slots]]:
        """Yield settings that a draw depends on, and the indices of those of these slots that share them."""
        numbers_N = self.settings[slots_N]
        for number in np.unique(numbers_N):
            indices = np.flatnonzero(numbers_N == number)
            yield self.drawn[slots_N[indices[0]]], indices


class DecodeSteps(Protocol):
    known: NDArray[np.int64]
    """By slot, how many tokens of its sequence can be read in the scheduler's arrays."""

    def advance(self) -> list[tuple[Sequence, Completion]]:
        """Move everyone on, let others join, and return who has ended."""
        ...


class CPUSteps:
    """On any device, step by step."""

    def __init__(self, policy: Policy, scheduler: ServingScheduler, end_tokens: frozenset[int]) -> None:
        self.scheduler, self._ending = scheduler, FinishCheck(policy, scheduler, end_tokens)
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


class FinishCheck:
    """Tells which sequences are over, and lets them go."""

    def __init__(self, policy: Policy, scheduler: ServingScheduler, end_tokens: frozenset[int]) -> None:
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
