"""Generation without end: requests join while others are under way, tokens are handed out as they come.

The engine's parts, run by one thread. What one request gets depends on nothing that runs beside it
but rounding: its noise is its own, and a request starts only when the cache has room for all it may write, so
nobody is ever made to start over.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from groupwise.engine.kv_cache import BlockPool
from groupwise.engine.sampler import Alternatives
from groupwise.engine.scheduler import Sequence as Member
from groupwise.engine.serving.serving_scheduler import CPUSteps, DecodeSteps, Job, ServingScheduler
from groupwise.model.ops.equivalence import in_mode
from groupwise.model.policy import Policy
from groupwise.records import Completion, Finish

PAUSE = 0.04
"""Seconds between two news of one answer at least, but of its end: many small ones take the steps' time."""


class Busy(Exception):
    """As many requests wait as may wait."""


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What one member of a job wrote since it was last heard of."""

    job: Job
    member: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    alternatives: tuple[Alternatives, ...]
    """Of each token; empty where none were asked for."""
    prompt: tuple[Alternatives, ...]
    """In the first news, where it was asked for: `Scores.places`."""
    finish: Finish | None
    """None: there is more to come."""


class ServingEngine:
    """Runs jobs as they are submitted; `deliver` is called from its thread with what is new."""

    def __init__(
        self,
        policy: Policy,
        *,
        slots: int,
        context: int,
        waiting: int,
        deliver: Callable[[Sequence[StreamChunk]], None],
        failed: Callable[[Exception], None],
        block_size: int = 16,
        kv_tokens: int | None = None,
    ) -> None:
        self.policy = policy
        self.context = min(context, policy.context_length)
        self.slots = slots
        self.most_waiting = waiting
        """Answers that may wait for others to end."""
        self._open: dict[Job, int] = {}
        """Jobs under way or waiting, with how many of their answers have not ended."""
        self._deliver, self._failed = deliver, failed
        tokens = kv_tokens or slots * self.context
        pool = BlockPool(
            max(-(-tokens // block_size), -(-self.context // block_size) + 2), block_size=block_size
        )
        self.scheduler = ServingScheduler(slots=slots, pool=pool, context=self.context)
        self._incoming: deque[Job] = deque()
        self._cancelled: set[Job] = set()
        self._sent: dict[Member, tuple[int, float]] = {}
        """How many tokens of each were told, and when. Everyone has a time of their own: no bursts."""
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self.run, name="groupwise-engine", daemon=True)

    @property
    def load(self) -> tuple[int, int]:
        """Answers that are being written, and answers that wait."""
        running = len(self.scheduler.running)
        return running, sum(self._open.copy().values()) - running

    @property
    def jobs(self) -> frozenset[Job]:
        """Everything under way or waiting."""
        with self._changed:
            return frozenset(self._open)

    def start(self) -> None:
        """Run in a thread of its own."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Let a job join; raises `Busy` when too many wait, ValueError when it can never run."""
        self.scheduler.check(job)
        with self._changed:
            if sum(self._open.values()) + len(job.seeds) > self.slots + self.most_waiting:
                raise Busy
            self._open[job] = len(job.seeds)
            self._incoming.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Stop a job that nobody listens to any more."""
        with self._changed:
            self._cancelled.add(job)
            self._changed.notify()

    def close(self) -> None:
        """Stop, whatever is under way."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(30)

    def run(self) -> None:
        """Run until it is closed, in this thread.

        On a CPU the main one is best: OpenMP keeps threads for each thread that computes, and where they
        are more than cores they go to sleep whenever they wait for each other: half the speed on two cores.
        """
        try:
            if self.policy.device.type == "cuda":
                torch.cuda.set_device(self.policy.device)  # of this thread
            with torch.inference_mode(), in_mode(self.policy.model, training=False), ExitStack() as stack:
                steps = self._steps(stack)
                while self._take_in():
                    self._deliver(self._news(steps))
        except Exception as error:
            with self._changed:
                self._open.clear()  # nobody need wait for them
            self._failed(error)
            raise

    def _steps(self, stack: ExitStack) -> DecodeSteps:
        ends = self.policy.end_tokens
        if self.policy.device.type == "cuda" and find_spec("triton") is not None:
            from groupwise.engine.serving.cuda_serving import CUDASteps

            graph = CUDASteps(self.policy, self.scheduler, ends)
            if not graph.runner.fused:
                stack.enter_context(self.policy.merged_adapters())
            graph.runner.refresh()
            return graph
        plain = CPUSteps(self.policy, self.scheduler, ends)
        stack.enter_context(plain.runner.ready())
        return plain

    def _take_in(self) -> bool:
        """Wait until there is something to do; take in what came meanwhile. False: it is time to stop."""
        with self._changed:
            while not (self._closing or self._incoming or self._cancelled or self.scheduler.busy):
                self._changed.wait()
            while self._incoming:
                self.scheduler.enter(self._incoming.popleft())
            cancelled, self._cancelled = self._cancelled, set()
            for job in cancelled:
                self._open.pop(job, None)
        for job in cancelled:
            for member in self.scheduler.drop(job):
                self.scheduler.forget(member)
                self._sent.pop(member, None)
        return not self._closing

    def _news(self, steps: DecodeSteps) -> list[StreamChunk]:
        """Run one step, and say what everyone wrote."""
        if not self.scheduler.busy:
            return []
        ended = steps.advance()
        news = [self._last_words(member, completion) for member, completion in ended]
        now = time.monotonic()
        for member in self.scheduler.running:
            sent, told = self._sent.get(member, (0, 0.0))
            if now >= told + PAUSE and (known := int(steps.known[member.slot])) > sent:
                self._sent[member] = known, now
                tokens = self.scheduler.tokens[member.slot, sent:known].tolist()
                logprobs = self.scheduler.logprobs[member.slot, sent:known].tolist()
                job = self.scheduler.job_of(member)
                beside = self._beside(member, sent)
                news.append(StreamChunk(job, member.member, tuple(tokens), tuple(logprobs), *beside, None))
        return news

    def _last_words(self, member: Member, completion: Completion) -> StreamChunk:
        sent, _ = self._sent.pop(member, (0, 0.0))
        beside, job = self._beside(member, sent), self.scheduler.forget(member)
        with self._changed:
            self._open[job] -= 1
            if not self._open[job]:
                del self._open[job]
        tokens, logprobs = completion.tokens[sent:], completion.logprobs[sent:]
        return StreamChunk(job, member.member, tokens, logprobs, *beside, completion.finish)

    def _beside(self, member: Member, sent: int) -> tuple[tuple[Alternatives, ...], tuple[Alternatives, ...]]:
        """What is told with tokens after the first `sent`: their alternatives, and the prompt's scores."""
        scores = None if sent else member.prefix.scores
        return tuple(self.scheduler.untold.pop(member, ())), () if scores is None else tuple(scores.places)
