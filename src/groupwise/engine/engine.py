"""The in-process generator: schedule → run → draw → collect, until every member has finished."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.config.schema import EngineConfig
from groupwise.engine.cpu_runner import Runner
from groupwise.engine.kv_cache import BlockPool
from groupwise.engine.sampler import StopStrings, draw, uniforms
from groupwise.engine.scheduler import NONE, FutureRequests, Scheduler, Sequence
from groupwise.errors import ConfigError
from groupwise.model.adapters.lora_bank import LoRABank
from groupwise.model.device import free_memory
from groupwise.model.ops.equivalence import in_mode
from groupwise.model.policy import Policy
from groupwise.records import Completion, Finish, Request, Sampling

if TYPE_CHECKING:
    from groupwise.engine.cuda.graph_runner import GraphRunner


class CompletionSink(Protocol):
    """Whom completions are for: takes each as it ends, and may have something to go on with."""

    def finished(self, request: int, member: int, completion: Completion) -> None: ...

    def ready(self, *, wait: bool) -> SequenceOf[Request]:
        """Return requests to add. With `wait`, none means that there will be no more."""
        ...


@dataclass(slots=True)
class CollectSink:
    """A partner that keeps what it is given and has nothing to add."""

    completions: dict[tuple[int, int], Completion] = field(default_factory=dict)

    def finished(self, request: int, member: int, completion: Completion) -> None:
        self.completions[request, member] = completion

    def ready(self, *, wait: bool) -> list[Request]:
        return []


class Engine:
    """Continues prompts with the policy, in groups that share their prompt's blocks."""

    def __init__(self, policy: Policy, config: EngineConfig, members: LoRABank | None = None) -> None:
        self.policy = policy
        self.members = members
        """Adapters of which each request names one; None: the policy's own answers everything."""
        self.config = config
        if config.unpack is not None:
            policy.unpacks = config.unpack
        self.preempted = 0
        """Sequences that the last call started over for lack of blocks: engine.kv_tokens is small."""
        self.occupancy = 1.0
        """Of the slots that could be taken in the last call on a GPU, the share that drew a token."""
        self._runner: Runner | None = None
        self._graph_runner: GraphRunner | None = None
        self._stop_strings = StopStrings(policy)
        self._end_tokens = np.array(sorted(policy.end_tokens), dtype=np.int64)

    @torch.no_grad()
    def generate(self, requests: SequenceOf[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return each request's completions, in the order of its seeds."""
        kept = CollectSink()
        self._serve(requests, sampling, kept)
        return [
            [kept.completions[r, m] for m in range(len(request.seeds))] for r, request in enumerate(requests)
        ]

    @torch.no_grad()
    def converse(
        self,
        requests: SequenceOf[Request],
        sampling: Sampling,
        partner: CompletionSink,
        *,
        tokens: int,
        turns: int,
    ) -> None:
        """Hand every completion to `partner` as it ends, and go on with the requests it has by then.

        `tokens`: the most that a conversation grows behind its first prompt; `turns`: completions in it.
        """
        members = sum(len(request.seeds) for request in requests)
        longest = max((len(request.prompt) for request in requests), default=0) + tokens - sampling.max_tokens
        self._serve(
            requests, sampling, partner, more=FutureRequests(requests=members * (turns - 1), longest=longest)
        )

    @property
    def unrepeatable(self) -> bool:
        """Whether the same requests may give other bits: on a GPU they depend on what is beside them."""
        return self.policy.device.type == "cuda"

    def _serve(
        self,
        requests: SequenceOf[Request],
        sampling: Sampling,
        partner: CompletionSink,
        *,
        more: FutureRequests = NONE,
    ) -> None:
        if not requests:
            return
        self._check_context(requests, sampling, more)
        slots = min(self.config.max_sequences, sum(len(request.seeds) for request in requests))
        pool = BlockPool(self._blocks(requests, sampling, slots, more), block_size=self.config.block_size)
        scheduler = Scheduler(requests, slots=slots, pool=pool, max_tokens=sampling.max_tokens, more=more)
        with in_mode(self.policy.model, training=False), collecting_only_new():
            run = self._run_ahead if self.accelerated else self._run
            run(scheduler, sampling, partner)
        scheduler.drop_histories()
        assert pool.free == pool.count, "blocks leaked"
        self.preempted = scheduler.preempted

    @contextmanager
    def ready(self) -> Iterator[None]:
        """While the block lasts, calls answer with the policy as it is now; all processes come by here."""
        with self.policy.whole():
            yield

    def make_room(self, needed: int) -> None:
        """Give memory back where so many bytes are not free on a GPU: captured graphs are worth keeping."""
        if self.policy.device.type == "cuda" and free_memory(self.policy.device) < needed:
            self.release()

    def release(self) -> None:
        """Give back the memory of the cache, and of all that was made for it, until the next call."""
        if self._graph_runner is not None:
            self._graph_runner.drop_graphs()
        self._runner = self._graph_runner = None
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _member_count(self) -> int:
        return 0 if self.members is None else len(self.members)

    @property
    def accelerated(self) -> bool:
        """Whether steps are CUDA graphs."""
        return self.policy.device.type == "cuda" and find_spec("triton") is not None

    def _run(self, scheduler: Scheduler, sampling: Sampling, partner: CompletionSink) -> None:
        """Step by step, on any device."""
        runner = self._runner_with(scheduler.pool)
        with runner.ready():
            while scheduler.busy:
                logits_RV = self._next_logits(scheduler, runner)
                self._draw(scheduler, logits_RV, sampling)
                for sequence, reason in self._ended(scheduler, sampling):
                    partner.finished(sequence.request, sequence.member, scheduler.finish(sequence, reason))
                scheduler.add(partner.ready(wait=not scheduler.busy))

    def _run_ahead(self, scheduler: Scheduler, sampling: Sampling, partner: CompletionSink) -> None:
        """In CUDA graphs, with the host a few steps ahead."""
        from groupwise.engine.cuda.decode_loop import DecodeLoop

        runner = self._graph_runner_for(scheduler)
        with nullcontext() if runner.fused else self.policy.merged_adapters():
            runner.refresh()
            ahead = DecodeLoop(
                scheduler, runner, sampling, self.policy.end_tokens, self._stop_strings, partner
            )
            ahead.run()
        self.occupancy = ahead.drawn / max(1, ahead.offered)

    def _next_logits(self, scheduler: Scheduler, runner: Runner) -> Tensor:
        """Run those that are under way, let others join, and return the next token's logits of all."""
        scheduler.make_room()
        rows = [runner.decode(scheduler)] if scheduler.running else []
        joined = scheduler.admit()
        fresh = dict.fromkeys(s.prefix for s in joined if s.prefix.logits_V is None)
        runner.prefill(list(fresh))
        rows += [s.prefix.logits_V[None] for s in joined if s.prefix.logits_V is not None]
        return torch.cat(rows)

    def _draw(self, scheduler: Scheduler, logits_RV: Tensor, sampling: Sampling) -> None:
        """Add one token to every running sequence."""
        slots = scheduler.slots()
        at = scheduler.length[slots]
        noise = uniforms(scheduler.seed[slots], at.astype(np.uint64))
        temperature = scheduler.temperatures(slots, sampling.temperature)
        if not sampling.greedy and (temperature != np.float32(sampling.temperature)).any():
            logits_RV = logits_RV.float() / torch.from_numpy(temperature).to(logits_RV.device)[:, None]
            sampling = replace(sampling, temperature=1.0)
        drawn = draw(logits_RV, sampling, torch.from_numpy(noise).to(logits_RV.device))
        tokens, logprobs, entropies = (x.cpu().numpy() for x in drawn)
        scheduler.tokens[slots, at] = tokens
        scheduler.logprobs[slots, at] = logprobs
        scheduler.entropies[slots, at] = entropies
        scheduler.length[slots] += 1

    def _ended(self, scheduler: Scheduler, sampling: Sampling) -> list[tuple[Sequence, Finish]]:
        """The running sequences whose last token ends them."""
        slots = scheduler.slots()
        length = scheduler.length[slots]
        end: NDArray[np.bool_] = np.isin(scheduler.tokens[slots, length - 1], self._end_tokens)
        stop = np.zeros_like(end)
        if sampling.stop:
            written = (scheduler.tokens[slot, :n] for slot, n in zip(slots, length, strict=True))
            stop = self._stop_strings.hits(written, sampling.stop)
        done = np.flatnonzero(end | stop | (length >= sampling.max_tokens))
        return [
            (scheduler.running[row], "end" if end[row] else "stop" if stop[row] else "length") for row in done
        ]

    def _blocks(
        self, requests: SequenceOf[Request], sampling: Sampling, slots: int, more: FutureRequests
    ) -> int:
        """The cache's size: all that could be needed at once, or what the user allows."""
        size, allowed = self.config.block_size, self.config.kv_tokens
        lengths = [len(request.prompt) for request in requests] + [more.longest] * min(slots, more.requests)
        prompts = sorted((-(-length // size) for length in lengths), reverse=True)
        answer = -(-sampling.max_tokens // size)
        most, least = slots * answer + sum(prompts[:slots]), answer + prompts[0]
        most += min(slots, more.requests) * least  # what finished turns leave for the next
        if allowed is None:
            return self._fitting(most, least) if self.accelerated else most
        if allowed // size < least:
            raise ConfigError(
                f"engine.kv_tokens={allowed} cannot hold the longest prompt and rollout.max_tokens="
                f"{sampling.max_tokens}; raise it to at least {least * size}"
            )
        return min(most, allowed // size)

    def _runner_with(self, pool: BlockPool) -> Runner:
        """Reuse the memory of the last call when it is large enough."""
        kept = self._runner
        if kept is None or kept.blocks < pool.count or kept.members != self._member_count:
            self._runner = kept = None  # free the old cache before taking the new one
            kept = Runner(self.policy, blocks=pool.count, block_size=pool.block_size, members=self.members)
        assert self.members is None or kept.lean is not None, "ask `TogetherEngine.batched` first"
        self._runner = kept
        return kept

    def _graph_runner_for(self, scheduler: Scheduler) -> GraphRunner:
        """Reuse the memory and the graphs of the last call when they are large enough."""
        from groupwise.engine.cuda.graph_runner import Capacity, GraphRunner

        room, size = Capacity.of(scheduler), self.config.block_size
        kept = self._graph_runner
        if kept is None or not kept.room.holds(room) or kept.members != self._member_count:
            self._graph_runner = kept = None  # free the old cache before taking the new one
            kept = GraphRunner(self.policy, room, block_size=size, members=self.members)
        assert self.members is None or kept.fused, "ask `TogetherEngine.batched` first"
        self._graph_runner = kept
        return kept

    def _fitting(self, most: int, least: int) -> int:
        """As many blocks as are asked for and fit; no new cache for one that is little larger."""
        held = 0 if self._graph_runner is None else self._graph_runner.room.blocks
        blocks = min(most, max(least, held + self._affordable_blocks()))
        return held if least <= held < blocks <= 1.25 * held else blocks

    def _affordable_blocks(self) -> int:
        """Blocks that fit into what is free of the GPU, a fifth of it left for everything else."""
        token = 2 * self.policy.layers * self.policy.key_heads * self.policy.head_size
        block = token * self.config.block_size * self.policy.head_weight.element_size()
        return int(0.8 * free_memory(self.policy.device)) // block

    def _check_context(self, requests: SequenceOf[Request], sampling: Sampling, more: FutureRequests) -> None:
        longest = max(len(request.prompt) for request in requests)
        limit = self.policy.context_length
        if longest >= limit:
            raise ConfigError(
                f"a prompt of {longest} tokens leaves no room for an answer in the model's context of "
                f"{limit}; shorten the prompt or use a model with a longer context"
            )
        if longest + sampling.max_tokens > limit:
            raise ConfigError(
                f"a prompt of {longest} tokens and rollout.max_tokens={sampling.max_tokens} exceed the "
                f"model's context of {limit}; lower rollout.max_tokens"
            )
        if more.longest + sampling.max_tokens > limit:
            added = more.longest + sampling.max_tokens - longest
            raise ConfigError(
                f"a prompt of {longest} tokens and the {added} that turns and tools may add exceed the "
                f"model's context of {limit}; lower tools.max_tokens"
            )


@contextmanager
def collecting_only_new() -> Iterator[None]:
    """Python's garbage collector leaves alone what was there before the block.

    Answers are many objects, which make it go through everything that was ever imported and loaded: that
    takes tenths of a second, in which a GPU has nothing to do.
    """
    if gc.get_freeze_count():  # the program has its own way, or a block around this one
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
