"""The in-process generator: schedule → run → draw → collect, until every member has finished."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from groupwise.config.sections import EngineConfig
from groupwise.engine.blocks import BlockPool
from groupwise.engine.runner import Runner
from groupwise.engine.sampler import draw, uniforms
from groupwise.engine.scheduler import Scheduler, Sequence
from groupwise.errors import ConfigError
from groupwise.model.policy import Policy
from groupwise.records import Completion, Finish, Request, Sampling


class Engine:
    """Continues prompts with the policy, in groups that share their prompt's blocks."""

    def __init__(self, policy: Policy, config: EngineConfig) -> None:
        self.policy = policy
        self.config = config
        self._runner: Runner | None = None
        self._end = np.array(sorted(policy.end_tokens))

    @torch.no_grad()
    def generate(self, requests: SequenceOf[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return each request's completions, in the order of its seeds."""
        self._check_length(requests, sampling)
        pool, runner = self._cache_for(requests, sampling)
        members = sum(len(request.seeds) for request in requests)
        slots = min(self.config.max_sequences, members)
        scheduler = Scheduler(requests, slots=slots, pool=pool, max_tokens=sampling.max_tokens)
        results: list[list[Completion | None]] = [[None] * len(request.seeds) for request in requests]
        was_training = self.policy.model.training
        self.policy.model.eval()
        try:
            while scheduler.waiting or scheduler.running:
                for sequence, reason in self._step(scheduler, runner, sampling):
                    results[sequence.request][sequence.member] = scheduler.finish(sequence, reason)
        finally:
            self.policy.model.train(was_training)
        assert pool.free == pool.count, "blocks leaked"
        return [[completion for completion in group if completion is not None] for group in results]

    def _step(
        self, scheduler: Scheduler, runner: Runner, sampling: Sampling
    ) -> list[tuple[Sequence, Finish]]:
        """One token for every running sequence; returns those that ended with it."""
        scheduler.make_room()
        rows: list[Tensor] = [runner.decode(scheduler)] if scheduler.running else []
        admitted = scheduler.admit()
        fresh = dict.fromkeys(s.prefix for s in admitted if s.prefix.logits_V is None)
        runner.prefill(list(fresh))
        rows += [s.prefix.logits_V[None] for s in admitted if s.prefix.logits_V is not None]
        for sequence in admitted:
            if not sequence.prefix.waiting:
                sequence.prefix.logits_V = None
        return self._draw(scheduler, torch.cat(rows), sampling)

    def _draw(
        self, scheduler: Scheduler, logits_RV: Tensor, sampling: Sampling
    ) -> list[tuple[Sequence, Finish]]:
        slots = np.array([sequence.slot for sequence in scheduler.running])
        at = scheduler.length[slots]
        noise = uniforms(scheduler.seed[slots], at.astype(np.uint64))
        drawn = draw(logits_RV, sampling, torch.from_numpy(noise).to(logits_RV.device))
        tokens, logprobs, entropies = (x.cpu().numpy() for x in drawn)
        scheduler.tokens[slots, at] = tokens
        scheduler.logprobs[slots, at] = logprobs
        scheduler.entropies[slots, at] = entropies
        scheduler.length[slots] += 1
        ended = np.isin(tokens, self._end)
        stopped = self._hit_stop_string(scheduler, sampling) if sampling.stop else np.zeros_like(ended)
        done = ended | stopped | (at + 1 >= sampling.max_tokens)
        running = list(scheduler.running)
        return [
            (running[row], "end" if ended[row] else "stop" if stopped[row] else "length")
            for row in np.flatnonzero(done)
        ]

    def _hit_stop_string(
        self, scheduler: Scheduler, sampling: Sampling
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether each running sequence's text now holds a stop string.

        A token adds at least one character of text or completes one, so looking at as many last
        tokens as the longest stop string has bytes is enough.
        """
        reach = max(len(stop.encode()) for stop in sampling.stop) + 1
        hits = []
        for sequence in scheduler.running:
            length = scheduler.length[sequence.slot]
            text = self.policy.decode(scheduler.tokens[sequence.slot, max(0, length - reach) : length].tolist())
            hits.append(any(stop in text for stop in sampling.stop))
        return np.array(hits)

    def _cache_for(self, requests: SequenceOf[Request], sampling: Sampling) -> tuple[BlockPool, Runner]:
        """Reuse the cache of the last call when it is large enough."""
        size = self.config.block_size
        per_member = -(-sampling.max_tokens // size)
        prompts = sorted((-(-len(request.prompt) // size) for request in requests), reverse=True)
        slots = min(self.config.max_sequences, sum(len(request.seeds) for request in requests))
        needed = slots * per_member + sum(prompts[:slots])
        if self.config.kv_tokens is not None:
            needed = min(needed, -(-self.config.kv_tokens // size))
        if self._runner is None or self._runner.cache.keys.shape[1] < needed:
            self._runner = None
            self._runner = Runner(self.policy, blocks=needed, block_size=size)
        blocks = self._runner.cache.keys.shape[1]
        return BlockPool(blocks, block_size=size), self._runner

    def _check_length(self, requests: SequenceOf[Request], sampling: Sampling) -> None:
        longest = max(len(request.prompt) for request in requests)
        limit = self.policy.context_length
        if longest + sampling.max_tokens > limit:
            raise ConfigError(
                f"a prompt of {longest} tokens and rollout.max_tokens={sampling.max_tokens} exceed the model's "
                f"context of {limit}; lower rollout.max_tokens"
            )
