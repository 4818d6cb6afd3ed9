"""Several engines on one policy, each continuing its share of the requests in a thread of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from groupwise.config.sections import EngineConfig
from groupwise.engine.engine import Engine, evaluating
from groupwise.model.policy import Policy
from groupwise.model.workers import Workers
from groupwise.records import Completion, Request, Sampling


def engine_for(policy: Policy, config: EngineConfig) -> Engine | SideBySide:
    """The fastest way to generate with this policy; a cache whose size the user gave is one cache."""
    workers = Workers.suited_to(policy)
    if workers.count == 1 or config.kv_tokens is not None:
        return Engine(policy, config)
    return SideBySide(policy, config, workers)


class SideBySide:
    """Groups are dealt out to the engines, so each prompt is still computed once."""

    def __init__(self, policy: Policy, config: EngineConfig, workers: Workers) -> None:
        self.policy = policy
        self.workers = workers
        share = replace(config, max_sequences=-(-config.max_sequences // workers.count))
        self.engines = [Engine(policy, share) for _ in range(workers.count)]

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return each request's completions, in the order of its seeds."""
        shares = [(engine, requests[first :: len(self.engines)]) for first, engine in enumerate(self.engines)]

        def run(share: tuple[Engine, Sequence[Request]]) -> list[list[Completion]]:
            engine, asked = share
            return engine.generate(asked, sampling)

        # Both change the policy itself, so they are done once for all.
        with evaluating(self.policy.model), self.policy.folded():
            done = list(self.workers.map(run, shares))
        count = len(self.engines)
        return [done[number % count][number // count] for number in range(len(requests))]
