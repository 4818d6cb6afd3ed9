"""Sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509): one row is split over several processes.

Outside of attention, a decoder processes each token independently, so a process needs only its own segment.
For attention the processes exchange queries, keys and values: each gets all tokens for its share of the
heads. The attention layout is that of the whole packed row, with shared prompts.

Axes: T tokens of the row, H query heads, K key heads, D head size, N trained tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from groupwise.errors import ConfigError
from groupwise.model.attention.hf_interface import STANDARD, AttentionVariant, Layout
from groupwise.model.policy import Policy
from groupwise.records import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class UlyssesContext:
    """Which process holds which segment of a row."""

    rank: int
    count: int

    def check(self, policy: Policy) -> None:
        """Raise ConfigError if the model's heads cannot be divided evenly among processes."""
        if policy.general is not None:
            raise ConfigError(
                f"run.parallel=context requires the fast path, but the model {policy.general.reason}; use "
                "run.parallel=ddp"
            )
        if policy.key_heads % self.count or policy.heads % self.count:
            raise ConfigError(
                f"run.parallel=context divides attention heads among processes: {policy.heads} query heads "
                f"and {policy.key_heads} key heads must be divisible by {self.count} processes"
            )

    def segments(self, tokens: int) -> list[int]:
        """Return the length of each process's segment of a row, as even as possible."""
        return [tokens // self.count + (rank < tokens % self.count) for rank in range(self.count)]

    def own(self, tokens: int) -> slice:
        lengths = self.segments(tokens)
        start = sum(lengths[: self.rank])
        return slice(start, start + lengths[self.rank])

    def gather(self, own_n: Tensor, index_n: Tensor, count: int) -> Tensor:
        """Return the values of all N tokens from all processes; gradients flow to this process's values."""
        whole_N: Tensor = _AllGather.apply(own_n, index_n, count)  # type: ignore[no-untyped-call]
        return whole_N


@dataclass(frozen=True, slots=True, kw_only=True)
class UlyssesLayout:
    """Attention layout of a segment, on top of the layout of the whole row."""

    row: Layout
    tokens: int
    context: UlyssesContext

    def attend(
        self,
        q_1HTD: Tensor,
        k_1KTD: Tensor,
        v_1KTD: Tensor,
        *,
        layer: int,
        scale: float,
        variant: AttentionVariant = STANDARD,
    ) -> Tensor:
        """Return the attention output_1THD of this process's segment."""
        lengths = self.context.segments(self.tokens)
        mine = [exchange_heads(x, 2, lengths, 1, self._heads(x)) for x in (q_1HTD, k_1KTD, v_1KTD)]
        if variant.sinks_H is not None:
            variant = replace(variant, sinks_H=variant.sinks_H.chunk(self.context.count)[self.context.rank])
        output_1THD = self.row.attend(*mine, layer=layer, scale=scale, variant=variant)
        heads = [output_1THD.shape[2]] * self.context.count
        return exchange_heads(output_1THD, 2, heads, 1, lengths)

    def logprobs(
        self,
        policy: Policy,
        sampling: Sampling,
        *,
        tokens_T: Tensor,
        positions_T: Tensor,
        predictor_N: Tensor,
        targets_N: Tensor,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return (logprobs_N, entropy_N) of a row of which each process computes a segment."""
        own = self.context.own(self.tokens)
        hidden_TM = policy.hidden(tokens_T[own], positions_T[own], self)
        inside_N = (predictor_N >= own.start) & (predictor_N < own.stop)
        index_n = inside_N.nonzero()[:, 0]
        logprobs_n, entropy_n = policy.token_logprobs(
            hidden_TM.index_select(0, predictor_N[index_n] - own.start),
            targets_N[index_n],
            sampling,
            entropy_gradient=entropy_gradient,
        )
        # The backward pass must run through every layer even if the segment has no trained token.
        zero = 0.0 * hidden_TM.sum()
        count = len(targets_N)
        whole_N = self.context.gather(logprobs_n, index_n, count) + zero
        return whole_N, self.context.gather(entropy_n, index_n, count)

    def _heads(self, x_1HTD: Tensor) -> list[int]:
        return [x_1HTD.shape[1] // self.context.count] * self.context.count


def exchange_heads(x: Tensor, gathered: int, pieces: list[int], divided: int, shares: list[int]) -> Tensor:
    """Gather all processes' pieces along one axis and keep this process's share along another."""
    result: Tensor = _HeadExchange.apply(x, gathered, pieces, divided, shares)  # type: ignore[no-untyped-call]
    return result


class _HeadExchange(torch.autograd.Function):
    """Differentiable `exchange`; the backward pass swaps the gathered and the divided axis."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gathered: int, pieces: list[int], divided: int, shares: list[int]
    ) -> Tensor:
        ctx.back = (divided, shares, gathered, pieces)
        return exchange(x, gathered, pieces, divided, shares)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return exchange(grads[0], *ctx.back), None, None, None, None


def exchange(x: Tensor, gathered: int, pieces: list[int], divided: int, shares: list[int]) -> Tensor:
    longest = max(pieces)
    padding = [0, 0] * (x.dim() - 1 - gathered) + [0, longest - x.shape[gathered]]
    own = torch.nn.functional.pad(x, padding).contiguous()
    gathered_parts = [torch.empty_like(own) for _ in pieces]
    dist.all_gather(gathered_parts, own)
    whole = torch.cat(
        [part.narrow(gathered, 0, length) for part, length in zip(gathered_parts, pieces, strict=True)],
        gathered,
    )
    rank = dist.get_rank()
    return whole.narrow(divided, sum(shares[:rank]), shares[rank]).contiguous()


class _AllGather(torch.autograd.Function):
    """Gather values of all processes. Each computes the whole loss and keeps its own gradient."""

    @staticmethod
    def forward(ctx: Any, own_n: Tensor, index_n: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(index_n)
        whole_N = own_n.new_zeros(count).index_copy(0, index_n, own_n)
        dist.all_reduce(whole_N)
        return whole_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (index_n,) = ctx.saved_tensors
        return grads[0].index_select(0, index_n), None, None
