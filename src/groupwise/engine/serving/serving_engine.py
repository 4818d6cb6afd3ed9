"""The serving engine: one thread that runs jobs as they arrive and streams their tokens.

Other requests affect a completion only through rounding, because every request has its own seed. A request
starts only when the cache can hold all the tokens it may generate, so no request is ever preempted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Generic, NamedTuple, TypeVar

import torch

from groupwise.engine.sampler import Alternatives
from groupwise.engine.scheduler import BlockPool
from groupwise.engine.scheduler import Sequence as Member
from groupwise.engine.serving.serving_scheduler import CPUSteps, DecodeSteps, Job, ServingScheduler
from groupwise.model.grammar import GrammarCompiler
from groupwise.model.policy import Policy
from groupwise.model.token_grammar import TokenGrammar
from groupwise.records import Completion, Finish

PAUSE = 0.04
"""Minimum seconds between two chunks of one completion, except the last: many small chunks slow decoding."""


class Busy(Exception):
    """The waiting queue is full."""


JobKey = TypeVar("JobKey")


class StreamChunk(NamedTuple, Generic[JobKey]):
    """The tokens that one completion of a job has gained since its previous chunk."""

    job: JobKey
    """The job, or the number that stands for it in another process."""
    member: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    alternatives: tuple[Alternatives, ...]
    """Top log-probabilities of each token; empty if not requested."""
    prompt: tuple[Alternatives, ...]
    """`PromptLogprobs.positions`, in the first chunk if requested."""
    finish: Finish | None
    """None: more chunks follow."""


class ServingEngine:
    """Runs submitted jobs and calls `deliver` with new chunks from the engine thread."""

    def __init__(
        self,
        policy: Policy,
        *,
        slots: int,
        context: int,
        waiting: int,
        deliver: Callable[[Sequence[StreamChunk[Job]]], None],
        failed: Callable[[Exception], None],
        block_size: int = 16,
        kv_tokens: int | None = None,
        speculative: bool = True,
    ) -> None:
        self.policy = policy
        self._speculative = speculative
        self.context = min(context, policy.context_length)
        self.slots = slots
        self.most_waiting = waiting
        """Maximum number of waiting completions."""
        self._open: dict[Job, int] = {}
        """Running and waiting jobs, with their number of unfinished completions."""
        self._deliver, self._failed = deliver, failed
        tokens = kv_tokens or slots * self.context
        pool = BlockPool(
            max(-(-tokens // block_size), -(-self.context // block_size) + 2), block_size=block_size
        )
        self.scheduler = ServingScheduler(
            slots=slots,
            pool=pool,
            context=self.context,
            compiler=GrammarCompiler(policy, policy.end_tokens),
        )
        self._incoming: deque[tuple[Job, TokenGrammar | None]] = deque()
        self._cancelled: set[Job] = set()
        self._sent: dict[Member, tuple[int, float]] = {}
        """Tokens already sent of each completion, and the time of its last chunk."""
        self._chunks: list[StreamChunk[Job]] = []
        """Chunks of the last step, which are delivered while the device runs the next one."""
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self.run, name="groupwise-engine", daemon=True)

    @property
    def load(self) -> tuple[int, int]:
        """Number of running and of waiting completions."""
        running = len(self.scheduler.running)
        return running, sum(self._open.copy().values()) - running

    @property
    def jobs(self) -> frozenset[Job]:
        """All running and waiting jobs."""
        with self._changed:
            return frozenset(self._open)

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Raise `Busy` if the queue is full, ValueError if the job can never run."""
        grammar = self.scheduler.check(job)
        with self._changed:
            if sum(self._open.values()) + len(job.seeds) > self.slots + self.most_waiting:
                raise Busy
            self._open[job] = len(job.seeds)
            self._incoming.append((job, grammar))
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Stop a job whose client has disconnected."""
        with self._changed:
            self._cancelled.add(job)
            self._changed.notify()

    def close(self) -> None:
        """Stop the engine, including running jobs."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(30)

    def run(self) -> None:
        """Run in the calling thread until closed.

        On a CPU, call this from the main thread. OpenMP keeps a thread pool per computing thread; with more
        threads than cores, every barrier puts threads to sleep, which halves the speed on two cores.
        """
        try:
            if self.policy.device.type == "cuda":
                torch.cuda.set_device(self.policy.device)  # the current device is per thread
            with torch.inference_mode(), self.policy.in_eval_mode(), ExitStack() as stack:
                steps = self._steps(stack)
                while self._process_queue():
                    self._advance(steps)
        except Exception as error:
            self._send()
            with self._changed:
                self._open.clear()  # these jobs will never finish
            self._failed(error)
            raise

    def _steps(self, stack: ExitStack) -> DecodeSteps:
        ends = self.policy.end_tokens
        on_gpu = self.policy.device.type == "cuda" and find_spec("triton") is not None
        if on_gpu and self.policy.general is None:
            from groupwise.engine.serving.cuda_serving import CUDASteps

            graph = CUDASteps(self.policy, self.scheduler, ends, speculative=self._speculative)
            if not graph.runner.fused:
                stack.enter_context(self.policy.merged_adapters())
            graph.runner.refresh()
            return graph
        plain = CPUSteps(self.policy, self.scheduler, ends)
        stack.enter_context(plain.runner.ready())
        return plain

    def _process_queue(self) -> bool:
        """Wait for work, then apply new jobs and cancellations. Return False when the engine closes."""
        with self._changed:
            while not (self._closing or self._incoming or self._cancelled or self.scheduler.busy):
                self._changed.wait()
            while self._incoming:
                self.scheduler.enter(*self._incoming.popleft())
            cancelled, self._cancelled = self._cancelled, set()
            for job in cancelled:
                self._open.pop(job, None)
        for job in cancelled:
            for member in self.scheduler.drop(job):
                self.scheduler.forget(member)
                self._sent.pop(member, None)
        return not self._closing

    def _advance(self, steps: DecodeSteps) -> None:
        """Run one step, and meanwhile send the chunks that are due.

        With grammars, the device idles while the host works between two steps.
        """
        if not self.scheduler.busy:
            self._send()  # what ended before the last job was cancelled
            return
        ended = steps.advance(lambda: self._send_due(steps))
        self._chunks = [self._final_chunk(member, completion) for member, completion in ended]
        if not self.scheduler.busy:
            self._send()

    def _send_due(self, steps: DecodeSteps) -> None:
        """Send the chunks of ended completions, and new tokens of others whose last chunk is old enough."""
        now = time.monotonic()
        for member in self.scheduler.running:
            sent, sent_at = self._sent.get(member, (0, 0.0))
            if now >= sent_at + PAUSE and (known := int(steps.known[member.slot])) > sent:
                self._sent[member] = known, now
                tokens = self.scheduler.tokens[member.slot, sent:known].tolist()
                logprobs = self.scheduler.logprobs[member.slot, sent:known].tolist()
                job = self.scheduler.job_of(member)
                extras = self._extras(member, sent)
                self._chunks.append(
                    StreamChunk(job, member.member, tuple(tokens), tuple(logprobs), *extras, None)
                )
        self._send()

    def _send(self) -> None:
        chunks, self._chunks = self._chunks, []
        if chunks:
            self._deliver(chunks)

    def _final_chunk(self, member: Member, completion: Completion) -> StreamChunk[Job]:
        sent, _ = self._sent.pop(member, (0, 0.0))
        extras, job = self._extras(member, sent), self.scheduler.forget(member)
        with self._changed:
            self._open[job] -= 1
            if not self._open[job]:
                del self._open[job]
        tokens, logprobs = completion.tokens[sent:], completion.logprobs[sent:]
        return StreamChunk(job, member.member, tokens, logprobs, *extras, completion.finish)

    def _extras(self, member: Member, sent: int) -> tuple[tuple[Alternatives, ...], tuple[Alternatives, ...]]:
        """Return the alternatives of unsent tokens and, for the first chunk, of the prompt."""
        scores = None if sent else member.prefix.scores
        return tuple(self.scheduler.unsent.pop(member, ())), () if scores is None else tuple(scores.positions)
