"""The serving scheduler and CPU decode steps: requests come and go, each with its own settings.

`ServingScheduler` reserves all blocks a job may need before it starts. `FinishCheck` ends completions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.engine.general_runner import runner_for
from groupwise.engine.sampler import (
    Alternatives,
    Penalties,
    PromptLogprobs,
    StopStrings,
    draw,
    likeliest,
    noise_on,
    uniforms,
)
from groupwise.engine.scheduler import BlockPool, Prefix, Scheduler, Sequence
from groupwise.model.grammar import GrammarCompiler
from groupwise.model.ops.logits import scaled_logits
from groupwise.model.policy import Policy
from groupwise.model.token_grammar import TokenGrammar
from groupwise.records import Completion, Finish, Request, Sampling

Slots = NDArray[np.int64]

MOST_SETTINGS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A prompt and its sampling settings; each seed produces one completion."""

    prompt: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: Sampling
    alternatives: int = 0
    """How many top log-probabilities to return with each sampled token."""
    scores_prompt: bool = False
    """Whether to return the log-probabilities of the prompt's tokens, too."""
    penalties: Penalties | None = None
    grammar: str | None = None
    """A grammar that each completion must match (`model.grammar`)."""


class ServingScheduler(Scheduler):
    """Reuses request numbers, and starts a job once blocks for all its tokens can be reserved."""

    def __init__(
        self, *, slots: int, pool: BlockPool, context: int, compiler: GrammarCompiler | None = None
    ) -> None:
        super().__init__([Request(prompt=(0,), seeds=(0,))], slots=slots, pool=pool, max_tokens=context)
        self.waiting.clear()
        self.context, self._compiler = context, compiler
        self._grammars: dict[Job, TokenGrammar] = {}
        # Each running sequence may belong to a different request; waiting jobs have no number yet.
        self.prompt_length = np.zeros(slots, dtype=np.int64)
        self.prompt_tables = np.zeros((slots, pool.blocks_for(context)), dtype=np.int64)
        self.stops = np.zeros(slots, dtype=np.bool_)
        """Whether the sequence has stop strings."""
        self.alternatives = np.zeros(slots, dtype=np.int64)
        """Number of top log-probabilities to return."""
        self.unsent: defaultdict[Sequence, list[Alternatives]] = defaultdict(list)
        """Alternatives of tokens that have not been sent yet, for sequences that requested them."""
        self.sampling: list[Sampling] = [Sampling()] * slots
        """Sampling settings without the temperature; `settings` holds one number per distinct value."""
        self.settings = np.zeros(slots, dtype=np.int64)
        self.penalties: list[Penalties | None] = [None] * slots
        self.penalized = np.zeros(slots, dtype=np.bool_)
        """Whether the sequence has penalties."""
        self._known: dict[Sampling, int] = {}
        self._next_number = count()
        self._jobs: dict[int, Job] = {}
        self._queue: list[Job] = []
        self._numbers = list(range(slots - 1, -1, -1))
        self._unfinished: dict[int, int] = {}
        """Unfinished completions of each request."""
        self._owners: dict[Sequence, Job] = {}
        self._reserved = 0

    @property
    def busy(self) -> bool:
        return bool(self._queue or self.waiting or self.running)

    def check(self, job: Job) -> TokenGrammar | None:
        """Raise ValueError for a job that could never run; return its grammar, compiled, which takes time."""
        if not job.prompt:
            raise ValueError("the prompt is empty")
        total = len(job.prompt) + job.sampling.max_tokens
        if total > self.context:
            raise ValueError(
                f"{len(job.prompt)} prompt tokens and max_tokens={job.sampling.max_tokens} exceed the "
                f"context of {self.context} tokens; shorten the prompt or lower max_tokens"
            )
        if len(job.seeds) > len(self.length) or self.need(job) > self.pool.count:
            raise ValueError(
                f"n={len(job.seeds)} completions of up to {job.sampling.max_tokens} tokens "
                "exceed the server's capacity; lower n or max_tokens"
            )
        if job.grammar is None:
            return None
        assert self._compiler is not None, "a job with a grammar needs a compiler"
        return self._compiler.compile(job.grammar)

    def _preempt(self, sequence: Sequence) -> None:
        raise AssertionError("a job starts only when blocks for all its tokens are reserved")

    def grammar_of(self, sequence: Sequence) -> TokenGrammar | None:
        return self._grammars.get(self.job_of(sequence))

    def need(self, job: Job) -> int:
        """Return the maximum number of blocks a job may use."""
        own = self.pool.blocks_for(job.sampling.max_tokens)
        return self.pool.blocks_for(len(job.prompt)) + len(job.seeds) * own

    def enter(self, job: Job, grammar: TokenGrammar | None = None) -> None:
        """Queue a job; `grammar` is what `check` returned."""
        self._queue.append(job)
        if grammar is not None:
            self._grammars[job] = grammar

    def admit(self) -> list[Sequence]:
        """Start jobs in order of arrival, while slots and blocks last."""
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
            self.penalties[slot], self.penalized[slot] = job.penalties, job.penalties is not None
            # Logits are divided by each row's own temperature, so it does not split the batch.
            temperature = 0.0 if sampling.greedy else 1.0
            self.sampling[slot] = replace(sampling, stop=(), max_tokens=self.context, temperature=temperature)
            self.settings[slot] = self._number_of(self.sampling[slot])
        return joined

    def _number_of(self, sampling: Sampling) -> int:
        """Return one number per distinct settings; the table is cleared when it grows too large."""
        if sampling not in self._known:
            if len(self._known) >= MOST_SETTINGS:
                self._known.clear()
            self._known[sampling] = next(self._next_number)
        return self._known[sampling]

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
            job = self._jobs.pop(number)
            self._reserved -= self.need(job)
            self._grammars.pop(job, None)
            del self._unfinished[number]
            self._numbers.append(number)

    def drop(self, job: Job) -> list[Sequence]:
        """Remove a job and return its sequences that were running."""
        self._queue = [waiting for waiting in self._queue if waiting is not job]
        number = next((n for n, known in self._jobs.items() if known is job), None)
        if number is None:
            self._grammars.pop(job, None)
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
        """Return a sequence's job, also after the sequence has ended, until `forget`."""
        return self._owners[sequence]

    def forget(self, sequence: Sequence) -> Job:
        self.unsent.pop(sequence, None)
        return self._owners.pop(sequence)

    def note(
        self, slots_N: Slots, at_N: Slots, tokens_NA: NDArray[np.int64], logprobs_NA: NDArray[np.float32]
    ) -> None:
        """Store the alternatives at these positions, for sequences that requested them."""
        # Report one log-probability for the sampled token: top-k may round it differently.
        drawn_N1, own_N1 = self.tokens[slots_N, at_N, None], self.logprobs[slots_N, at_N, None]
        logprobs_NA = np.where(tokens_NA == drawn_N1, own_N1, logprobs_NA)
        for slot, tokens, logprobs in zip(slots_N, tokens_NA.tolist(), logprobs_NA.tolist(), strict=True):
            pairs = [pair for pair in zip(tokens, logprobs, strict=True) if pair[1] > -np.inf]
            self.unsent[self.in_slot[slot]].append(tuple(pairs[: self.alternatives[slot]]))

    @property
    def queued(self) -> int:
        """Number of completions of jobs that have not started."""
        return sum(len(job.seeds) for job in self._queue)

    def by_settings(self, slots_N: Slots) -> Iterator[tuple[Sampling, Slots]]:
        """Group slots by sampling settings: yield each settings value and the indices that share it."""
        numbers_N = self.settings[slots_N]
        for number in np.unique(numbers_N):
            indices = np.flatnonzero(numbers_N == number)
            yield self.sampling[slots_N[indices[0]]], indices


def nothing() -> None:
    """The default work of the host while a step runs."""


class DecodeSteps(Protocol):
    known: NDArray[np.int64]
    """By slot, how many tokens are available in the scheduler's arrays."""

    def advance(self, meanwhile: Callable[[], None] = nothing) -> list[tuple[Sequence, Completion]]:
        """Run one step, admit waiting sequences, and return those that have ended.

        `meanwhile` is called once, on a GPU while the device runs the step.
        """
        ...


class CPUSteps:
    """Synchronous decode steps, on any device."""

    def __init__(self, policy: Policy, scheduler: ServingScheduler, end_tokens: frozenset[int]) -> None:
        self.scheduler, self._finish_check = scheduler, FinishCheck(policy, scheduler, end_tokens)
        self.runner = runner_for(policy, blocks=scheduler.pool.count, block_size=scheduler.pool.block_size)
        self.known = scheduler.length

    def advance(self, meanwhile: Callable[[], None] = nothing) -> list[tuple[Sequence, Completion]]:
        meanwhile()
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
        for row in np.flatnonzero(scheduler.penalized[running]):
            logits_RV[row] = self._penalized(logits_RV[row], scheduler.running[row])
        logits_RV = scheduler.masks.apply(logits_RV, running)
        temperature_R = torch.from_numpy(scheduler.temperatures(running, 1.0))
        logits_RV = logits_RV / temperature_R.to(logits_RV.device)[:, None]
        for sampling, indices in scheduler.by_settings(running):
            slots = running[indices]
            at = scheduler.length[slots]
            noise = uniforms(scheduler.seed[slots], at.astype(np.uint64))
            drawn = draw(logits_RV[indices], sampling, noise_on(logits_RV.device, noise))
            tokens, logprobs, entropies = (x.cpu().numpy() for x in drawn)
            scheduler.tokens[slots, at] = tokens
            scheduler.logprobs[slots, at] = logprobs
            scheduler.entropies[slots, at] = entropies
            requesting = scheduler.alternatives[slots] > 0
            if requesting.any():
                likely = likeliest(scaled_logits(logits_RV[indices[requesting]], sampling).log_softmax(-1))
                scheduler.note(slots[requesting], at[requesting], *(x.cpu().numpy() for x in likely))
        scheduler.length[running] += 1
        return self._finish_check.finish(running, scheduler.length[running])

    def _penalized(self, logits_V: Tensor, sequence: Sequence) -> Tensor:
        scheduler, slot = self.scheduler, sequence.slot
        penalties, completion = scheduler.penalties[slot], scheduler.tokens[slot, : scheduler.length[slot]]
        assert penalties is not None
        return penalties.apply(logits_V, sequence.prefix.tokens, completion)


class FinishCheck:
    """Detects finished sequences and releases them."""

    def __init__(self, policy: Policy, scheduler: ServingScheduler, end_tokens: frozenset[int]) -> None:
        self.scheduler, self.end_tokens = scheduler, end_tokens
        self._is_end_V = np.zeros(policy.head_weight.shape[0], dtype=np.bool_)
        self._is_end_V[list(end_tokens)] = True
        self._stop_strings = StopStrings(policy)

    def finish(self, slots_N: Slots, lengths_N: Slots) -> list[tuple[Sequence, Completion]]:
        """Finish the sequences in these slots that have ended; `lengths_N` are their lengths."""
        scheduler = self.scheduler
        ended_N = self._is_end_V[scheduler.tokens[slots_N, lengths_N - 1]]
        ended_N |= (lengths_N >= scheduler.limit[slots_N]) | scheduler.stops[slots_N]
        ended: list[tuple[Sequence, Completion]] = []
        if ended_N.any():  # candidates; `_reason` checks stop strings
            for slot, length in zip(slots_N[ended_N].tolist(), lengths_N[ended_N].tolist(), strict=True):
                sequence = scheduler.in_slot[slot]
                if reason := self._reason(sequence, length):
                    scheduler.length[slot] = length
                    ended.append((sequence, scheduler.finish(sequence, reason)))
        going_N = np.isin(slots_N, scheduler.slots()) if ended else np.ones(len(slots_N), dtype=np.bool_)
        scheduler.masks.update(slots_N[going_N], scheduler.tokens[slots_N[going_N], lengths_N[going_N] - 1])
        return ended

    def _reason(self, sequence: Sequence, length: int) -> Finish | None:
        """Return why a sequence of this length has ended; None if it has not."""
        scheduler, slot = self.scheduler, sequence.slot
        written = scheduler.tokens[slot, :length]
        if int(written[-1]) in self.end_tokens:
            return "length" if scheduler.masks.failed[slot] else "end"
        stop = scheduler.job_of(sequence).sampling.stop
        if stop and self._stop_strings.hits([written], stop)[0]:
            return "stop"
        return "length" if length >= scheduler.limit[slot] else None
