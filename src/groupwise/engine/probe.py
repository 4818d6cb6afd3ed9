"""Whether a server has the weights of now: its log-probabilities of a fixed text tell."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np
import torch

from groupwise.errors import InvariantError
from groupwise.model.logprobs import token_logprobs
from groupwise.model.mode import in_mode
from groupwise.model.packed import PackedLayout
from groupwise.model.policy import Policy
from groupwise.records import Sampling

LENGTH = 64
LIMIT = 0.2
"""Nats a token past which a server has another model from the start, whatever the rounding in bfloat16."""
FINEST = 1e-5
"""Rounding in float32; less is luck."""
CLEARLY = 4.0
"""Past this many times the rounding, a difference is one of weights."""


class Probe:
    """A text of random tokens, whose log-probabilities move with every update more than a likely text's."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        ordinary = min(policy.head_weight.shape[0], policy.tokenizer.vocab_size or 1 << 30)
        self.tokens = tuple(int(t) for t in np.random.default_rng(0).integers(0, ordinary, LENGTH))
        self.now: list[float] | None = None
        self.rounding: float | None = None
        """By how much server and trainer differ with the same weights: what the first check finds."""

    @torch.no_grad()
    def take(self) -> None:
        """Compute the policy's log-probabilities of now."""
        tokens_T = torch.tensor(self.tokens, device=self.policy.device)
        layout = PackedLayout.build([(1, (LENGTH - 2,))], device=tokens_T.device)
        positions_T = torch.arange(LENGTH - 1, device=tokens_T.device)
        with in_mode(self.policy.model, training=False):
            hidden_TM = self.policy.hidden(tokens_T[:-1], positions_T, layout)
        logprobs_N, _ = token_logprobs(
            hidden_TM,
            self.policy.head_weight,
            self.policy.head_bias,
            tokens_T[1:],
            Sampling(),
            entropy_gradient=False,
        )
        self.now = logprobs_N.float().cpu().tolist()

    def check(self, served: Sequence[float], address: str) -> None:
        """Stop the run when a server's log-probabilities are not the policy's."""
        assert self.now is not None, "the policy's own come first"
        gap = distance(served, self.now)
        if not gap <= LIMIT:
            raise InvariantError(
                f"the rollout server {address} has other weights than the trainer: its log-probabilities "
                f"differ by {gap:.3f} nats a token on a fixed text; is it the same model and dtype?"
            )
        if self.rounding is None:
            self.rounding = max(gap, FINEST)
        if gap > CLEARLY * self.rounding:
            raise InvariantError(
                f"the rollout server {address} has not taken the update, or only a part of it: its "
                f"log-probabilities differ from the trainer's by {gap:.2g} nats a token on a fixed text, "
                f"where rounding alone makes {self.rounding:.2g}"
            )


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    return fmean(abs(a - b) for a, b in zip(one, other, strict=True))
