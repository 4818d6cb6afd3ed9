"""The in-process engine: schedule → run → sample → collect, until every sequence has finished.

`Engine` sizes the KV cache, picks the CPU or the CUDA-graph runner, and passes completions to a sink.
"""

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
from groupwise.engine.general_runner import GeneralRunner, runner_for
from groupwise.engine.sampler import StopStrings, draw, noise_on, uniforms
from groupwise.engine.scheduler import NONE, BlockPool, FutureRequests, Scheduler, Sequence
from groupwise.errors import ConfigError
from groupwise.model.device import explain_out_of_memory, free_memory, supports_fp8, total_memory
from groupwise.model.policy import Policy
from groupwise.records import Completion, Finish, Request, Sampling

if TYPE_CHECKING:
    from groupwise.engine.cuda.graph_runner import GraphRunner
    from groupwise.engine.multi_lora import LoRABank


class CompletionSink(Protocol):
    """Receives each completion as it finishes, and may return follow-up requests."""

    def finished(self, request: int, member: int, completion: Completion) -> None: ...

    def ready(self, *, wait: bool) -> SequenceOf[Request]:
        """Return requests to add. With `wait`, an empty result ends generation."""
        ...


@dataclass(slots=True)
class CollectSink:
    """Stores completions and adds no requests."""

    completions: dict[tuple[int, int], Completion] = field(default_factory=dict)

    def finished(self, request: int, member: int, completion: Completion) -> None:
        self.completions[request, member] = completion

    def ready(self, *, wait: bool) -> list[Request]:
        return []


class Engine:
    """Generates completions with the policy; the completions of a request share its prompt's KV blocks."""

    def __init__(self, policy: Policy, config: EngineConfig, members: LoRABank | None = None) -> None:
        self.policy = policy
        self.members = members
        """LoRA adapters that requests select from; None: every request uses the policy's own adapter."""
        self.config = config
        bfloat16 = policy.head_weight.dtype == torch.bfloat16
        config.check_fp8(supported=supports_fp8(policy.device), bfloat16=bfloat16)
        if config.fp8:  # refuse now what the first call would refuse
            from groupwise.engine.cuda.fused_layers import fp8_forward

            fp8_forward(policy, products=config.quantization is not None)
        if config.unpack is not None:
            policy.unpacks = config.unpack
        self.preempted = 0
        """Sequences the last call preempted for lack of KV blocks. If high, raise engine.kv_tokens."""
        self.occupancy = 1.0
        """Fraction of usable slots that sampled a token, over the decode steps of the last call on a GPU."""
        self.runner: Runner | GeneralRunner | None = None
        self.graph_runner: GraphRunner | None = None
        """What runs the policy, with its KV cache: created by the first call, None after `release`."""
        self._stop_strings = StopStrings(policy)
        self._end_tokens = np.array(sorted(policy.end_tokens), dtype=np.int64)

    @torch.no_grad()
    def generate(self, requests: SequenceOf[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return each request's completions, in the order of its seeds."""
        sink = CollectSink()
        self._serve(requests, sampling, sink)
        return [
            [sink.completions[r, m] for m in range(len(request.seeds))] for r, request in enumerate(requests)
        ]

    @torch.no_grad()
    def converse(
        self,
        requests: SequenceOf[Request],
        sampling: Sampling,
        sink: CompletionSink,
        *,
        tokens: int,
        turns: int,
    ) -> None:
        """Pass every completion to `sink` as it finishes, and run the follow-up requests it returns.

        `tokens`: the maximum growth of a conversation after its first prompt.
        `turns`: the maximum number of completions in a conversation.
        """
        members = sum(len(request.seeds) for request in requests)
        longest = max((len(request.prompt) for request in requests), default=0) + tokens - sampling.max_tokens
        self._serve(
            requests, sampling, sink, future=FutureRequests(requests=members * (turns - 1), longest=longest)
        )

    @property
    def unrepeatable(self) -> bool:
        """Whether repeating a call may change the bits: GPU results depend on the batch composition."""
        return self.policy.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()

    @explain_out_of_memory("generating", "lower engine.max_sequences, rollout.max_tokens or engine.kv_tokens")
    def _serve(
        self,
        requests: SequenceOf[Request],
        sampling: Sampling,
        sink: CompletionSink,
        *,
        future: FutureRequests = NONE,
    ) -> None:
        if not requests:
            return
        self._check_context(requests, sampling, future)
        slots = min(self.config.max_sequences, sum(len(request.seeds) for request in requests))
        pool = BlockPool(self._blocks(requests, sampling, slots, future), block_size=self.config.block_size)
        scheduler = Scheduler(
            requests,
            slots=slots,
            pool=pool,
            max_tokens=sampling.max_tokens,
            future=future,
            grammar=self.policy.grammar,
        )
        with self.policy.in_eval_mode(), freeze_gc():
            run = self._run_ahead if self.accelerated else self._run
            run(scheduler, sampling, sink)
        scheduler.drop_histories()
        assert pool.free == pool.count, "blocks leaked"
        self.preempted = scheduler.preempted

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Generate with the policy's current weights inside this context. Every process must enter it."""
        with self.policy.whole():
            yield

    def make_room(self, needed: int) -> None:
        """Release the engine's memory if fewer than `needed` bytes are free on the GPU.

        Otherwise keep it: capturing CUDA graphs again is slow.
        """
        if self.policy.device.type == "cuda" and free_memory(self.policy.device) < needed:
            self.release()

    def release(self) -> None:
        """Free the KV cache and the runner; the next call allocates them again."""
        if self.graph_runner is not None:
            self.graph_runner.drop_graphs()
        self.runner = self.graph_runner = None
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _member_count(self) -> int:
        return 0 if self.members is None else len(self.members)

    @property
    def accelerated(self) -> bool:
        """Whether decode steps run as CUDA graphs."""
        on_gpu = self.policy.device.type == "cuda" and find_spec("triton") is not None
        return on_gpu and self.policy.general is None

    def _run(self, scheduler: Scheduler, sampling: Sampling, sink: CompletionSink) -> None:
        """Run synchronously, on any device."""
        runner = self._runner_with(scheduler.pool)
        with runner.ready():
            while scheduler.busy:
                logits_RV = self._next_logits(scheduler, runner)
                self._draw(scheduler, logits_RV, sampling)
                for sequence, reason in self._ended(scheduler, sampling):
                    sink.finished(sequence.request, sequence.member, scheduler.finish(sequence, reason))
                slots = scheduler.slots()
                scheduler.masks.update(slots, scheduler.tokens[slots, scheduler.length[slots] - 1])
                scheduler.add(sink.ready(wait=not scheduler.busy))

    def _run_ahead(self, scheduler: Scheduler, sampling: Sampling, sink: CompletionSink) -> None:
        """Run CUDA graphs, with the host a few steps ahead of the device."""
        from groupwise.engine.cuda.decode_loop import DecodeLoop

        runner = self._graph_runner_for(scheduler)
        with nullcontext() if runner.fused else self.policy.merged_adapters():
            runner.refresh()
            if runner.speculation is not None:
                runner.speculation.forget()
            loop = DecodeLoop(
                scheduler,
                runner,
                sampling,
                self.policy.end_tokens,
                self._stop_strings,
                sink,
                rule=self.policy.logits_processor,
            )
            loop.run()
        self.occupancy = loop.sampled / max(1, loop.offered)

    def _next_logits(self, scheduler: Scheduler, runner: Runner | GeneralRunner) -> Tensor:
        """Decode running sequences, admit and prefill waiting ones, and return all next-token logits."""
        scheduler.make_room()
        rows = [runner.decode(scheduler)] if scheduler.running else []
        joined = scheduler.admit()
        fresh = dict.fromkeys(s.prefix for s in joined if s.prefix.logits_V is None)
        runner.prefill(list(fresh))
        rows += [s.prefix.logits_V[None] for s in joined if s.prefix.logits_V is not None]
        return torch.cat(rows)

    def _draw(self, scheduler: Scheduler, logits_RV: Tensor, sampling: Sampling) -> None:
        """Sample one token for every running sequence."""
        slots = scheduler.slots()
        at = scheduler.length[slots]
        noise = uniforms(scheduler.seed[slots], at.astype(np.uint64))
        if self.policy.logits_processor is not None:
            logits_RV = self.policy.logits_processor(scheduler.contexts(slots), logits_RV)
        logits_RV = scheduler.masks.apply(logits_RV, slots)
        temperature = scheduler.temperatures(slots, sampling.temperature)
        if not sampling.greedy and (temperature != np.float32(sampling.temperature)).any():
            logits_RV = logits_RV.float() / torch.from_numpy(temperature).to(logits_RV.device)[:, None]
            sampling = replace(sampling, temperature=1.0)
        drawn = draw(logits_RV, sampling, noise_on(logits_RV.device, noise))
        tokens, logprobs, entropies = (x.cpu().numpy() for x in drawn)
        scheduler.tokens[slots, at] = tokens
        scheduler.logprobs[slots, at] = logprobs
        scheduler.entropies[slots, at] = entropies
        scheduler.length[slots] += 1

    def _ended(self, scheduler: Scheduler, sampling: Sampling) -> list[tuple[Sequence, Finish]]:
        """Return the running sequences that their last token finishes, with the finish reasons."""
        slots = scheduler.slots()
        length = scheduler.length[slots]
        end: NDArray[np.bool_] = np.isin(scheduler.tokens[slots, length - 1], self._end_tokens)
        stop = np.zeros_like(end)
        if sampling.stop:
            written = (scheduler.tokens[slot, :n] for slot, n in zip(slots, length, strict=True))
            stop = self._stop_strings.hits(written, sampling.stop)
        done = np.flatnonzero(end | stop | (length >= sampling.max_tokens))
        end &= ~scheduler.masks.failed[slots]
        return [
            (scheduler.running[row], "end" if end[row] else "stop" if stop[row] else "length") for row in done
        ]

    def _blocks(
        self, requests: SequenceOf[Request], sampling: Sampling, slots: int, future: FutureRequests
    ) -> int:
        """Return the cache size in blocks: the worst case, capped by engine.kv_tokens or free memory."""
        size, allowed = self.config.block_size, self.config.kv_tokens
        lengths = [len(request.prompt) for request in requests] + [future.longest] * min(
            slots, future.requests
        )
        prompts = sorted((-(-length // size) for length in lengths), reverse=True)
        completion = -(-sampling.max_tokens // size)
        most, least = slots * completion + sum(prompts[:slots]), completion + prompts[0]
        most += min(slots, future.requests) * least  # histories kept for the next turn
        if allowed is None:
            return self._fitting(most, least) if self.accelerated else most
        if allowed // size < least:
            raise ConfigError(
                f"engine.kv_tokens={allowed} cannot hold the longest prompt and rollout.max_tokens="
                f"{sampling.max_tokens}; set engine.kv_tokens to at least {least * size}"
            )
        return min(most, allowed // size)

    def _runner_with(self, pool: BlockPool) -> Runner | GeneralRunner:
        """Return the last call's runner if its cache is large enough, else a new one."""
        runner = self.runner
        if runner is None or runner.blocks < pool.count or runner.members != self._member_count:
            self.runner = runner = None  # free the old cache before allocating the new one
            runner = runner_for(
                self.policy, blocks=pool.count, block_size=pool.block_size, members=self.members
            )
        assert self.members is None or runner.fused is not None, "check `MultiLoRAEngine.batched` first"
        self.runner = runner
        return runner

    def _graph_runner_for(self, scheduler: Scheduler) -> GraphRunner:
        """Return the last call's graph runner if its capacity suffices, else a new one."""
        from groupwise.engine.cuda.decode_attention import Capacity
        from groupwise.engine.cuda.graph_runner import GraphRunner

        capacity, size = Capacity.of(scheduler), self.config.block_size
        runner = self.graph_runner
        if runner is None or not runner.capacity.holds(capacity) or runner.members != self._member_count:
            self.graph_runner = runner = None  # free the old cache before allocating the new one
            runner = GraphRunner(
                self.policy,
                capacity,
                block_size=size,
                members=self.members,
                speculative=self.config.speculative,
                fp8=self.config.quantization == "fp8",
                fp8_cache=self.config.kv_cache_dtype == "fp8",
            )
        assert self.members is None or runner.fused, "check `MultiLoRAEngine.batched` first"
        self.graph_runner = runner
        return runner

    def _fitting(self, most: int, least: int) -> int:
        """Return the block count that fits into GPU memory; reuse a cache that is at most a fifth smaller.

        Deterministic kernels need the same count whatever the calls before: preemption depends on it.
        """
        held = 0 if self.graph_runner is None else self.graph_runner.capacity.blocks
        if torch.are_deterministic_algorithms_enabled():
            return min(most, max(least, self.affordable_blocks(held)))
        blocks = min(most, max(least, held + self.affordable_blocks()))
        return held if least <= held < blocks <= 1.25 * held else blocks

    def affordable_blocks(self, held: int = 0) -> int:
        """Return the number of KV blocks that fit into 80% of the free GPU memory and of `held` blocks.

        Deterministic kernels take at most a quarter of the whole memory, which is the same in every process.
        """
        token = 2 * self.policy.layers * self.policy.key_heads * self.policy.head_size
        size = self.config.key_bytes(self.policy.head_size, self.policy.head_weight.element_size())
        block = int(token * self.config.block_size * size)
        free = int(0.8 * (free_memory(self.policy.device) + held * block))
        if torch.are_deterministic_algorithms_enabled():
            free = min(free, total_memory(self.policy.device) // 4)
        return free // block

    def _check_context(
        self, requests: SequenceOf[Request], sampling: Sampling, future: FutureRequests
    ) -> None:
        longest = max(len(request.prompt) for request in requests)
        limit = self.policy.context_length
        if longest >= limit:
            raise ConfigError(
                f"a prompt of {longest} tokens leaves no room for a completion in the model's context of "
                f"{limit} tokens; shorten the prompt or use a model with a longer context"
            )
        if longest + sampling.max_tokens > limit:
            raise ConfigError(
                f"a prompt of {longest} tokens and rollout.max_tokens={sampling.max_tokens} exceed the "
                f"model's context of {limit} tokens; lower rollout.max_tokens"
            )
        if future.longest + sampling.max_tokens > limit:
            added = future.longest + sampling.max_tokens - longest
            raise ConfigError(
                f"a prompt of {longest} tokens and up to {added} tokens of turns and tool results exceed the "
                f"model's context of {limit} tokens; lower tools.max_tokens"
            )


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Freeze existing objects so that garbage collection during generation skips them.

    Generation creates many objects and so triggers full collections. Each one traverses every imported
    module and takes tenths of a second, while the GPU idles.
    """
    if gc.get_freeze_count():  # the program or an enclosing call has frozen objects already
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
