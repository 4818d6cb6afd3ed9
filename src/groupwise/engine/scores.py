"""What the policy makes of tokens that it did not draw: those of a prompt.

Axes: N tokens, M model width, V vocabulary, A alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from groupwise.engine.sampler import Alternatives, likeliest
from groupwise.model.policy import Policy

TOGETHER = 64
"""Tokens whose logits are in memory at once."""


@dataclass(slots=True, eq=False)
class Scores:
    """Filled in while a prompt is computed, at temperature 1, as nobody sampled it."""

    alternatives: int
    places: list[Alternatives] = field(default_factory=list)
    """Of each token of the prompt but the first, which follows nothing: itself, then the likeliest."""

    def add(self, policy: Policy, hidden_NM: Tensor, tokens: Sequence[int]) -> None:
        """Score the tokens that follow these places."""
        tokens_N1 = torch.tensor(tokens, dtype=torch.int64, device=hidden_NM.device)[:, None]
        for start in range(0, len(tokens), TOGETHER):
            here = slice(start, start + TOGETHER)
            own_N1, logprobs_NV = tokens_N1[here], policy.logits(hidden_NM[here]).float().log_softmax(-1)
            likely_NA, values_NA = (x[:, : self.alternatives] for x in likeliest(logprobs_NV))
            shown_NA = torch.cat([own_N1, likely_NA], dim=1)
            values_NA = torch.cat([logprobs_NV.gather(1, own_N1), values_NA], dim=1)
            for pair in zip(shown_NA.tolist(), values_NA.tolist(), strict=True):
                self.places.append(tuple(zip(*pair, strict=True)))
