"""One row over several processes: each computes a segment of its tokens, and all of them for some heads.

Everything in a decoder but attention looks at one token at a time, so a process needs only its own segment.
For attention the processes trade: each gives away its tokens' queries, keys and values, and gets those of
all tokens for its share of the heads (DeepSpeed-Ulysses, arXiv 2309.14509). The layout that says what attends
to what is that of the whole row, packed and with shared prompts as ever.

Axes: T tokens of the row, H query heads, K key heads, D head size, N trained tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from groupwise.errors import ConfigError
from groupwise.model.attention.hf_interface import Layout
from groupwise.model.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class UlyssesContext:
    """Who holds which segment of a row."""

    rank: int
    count: int

    def check(self, policy: Policy) -> None:
        """Refuse a model whose heads cannot be shared out."""
        if policy.key_heads % self.count or policy.heads % self.count:
            raise ConfigError(
                f"run.parallel=context shares out heads: {policy.key_heads} key heads do not divide by "
                f"{self.count} processes"
            )

    def segments(self, tokens: int) -> list[int]:
        """Length of each process's segment of a row, as even as can be."""
        return [tokens // self.count + (rank < tokens % self.count) for rank in range(self.count)]

    def own(self, tokens: int) -> slice:
        lengths = self.segments(tokens)
        start = sum(lengths[: self.rank])
        return slice(start, start + lengths[self.rank])

    def everyones(self, own_n: Tensor, places_n: Tensor, count: int) -> Tensor:
        """Return a value for each of N tokens, of which this process has some; it learns from its own."""
        whole_N: Tensor = _AllGather.apply(own_n, places_n, count)  # type: ignore[no-untyped-call]
        return whole_N


@dataclass(frozen=True, slots=True, kw_only=True)
class UlyssesLayout:
    """Attention of a segment, through the layout of the whole row."""

    row: Layout
    tokens: int
    context: UlyssesContext

    def attend(self, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, *, layer: int, scale: float) -> Tensor:
        """Return the attention output_1THD of this process's segment."""
        lengths = self.context.segments(self.tokens)
        mine = [traded(x, 2, lengths, 1, self._heads(x)) for x in (q_1HTD, k_1KTD, v_1KTD)]
        output_1THD = self.row.attend(*mine, layer=layer, scale=scale)
        heads = [output_1THD.shape[2]] * self.context.count
        return traded(output_1THD, 2, heads, 1, lengths)

    def _heads(self, x_1HTD: Tensor) -> list[int]:
        return [x_1HTD.shape[1] // self.context.count] * self.context.count


def traded(x: Tensor, gathered: int, pieces: list[int], divided: int, shares: list[int]) -> Tensor:
    """Gather everyone's pieces along one axis, and keep this process's share along another."""
    result: Tensor = _HeadExchange.apply(x, gathered, pieces, divided, shares)  # type: ignore[no-untyped-call]
    return result


class _HeadExchange(torch.autograd.Function):
    """A gradient goes back the way its value came: gathered where it was divided, divided where gathered."""

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
    everyone = [torch.empty_like(own) for _ in pieces]
    dist.all_gather(everyone, own)
    whole = torch.cat(
        [part.narrow(gathered, 0, length) for part, length in zip(everyone, pieces, strict=True)], gathered
    )
    rank = dist.get_rank()
    return whole.narrow(divided, sum(shares[:rank]), shares[rank]).contiguous()


class _AllGather(torch.autograd.Function):
    """Values of all processes side by side. Each computes the whole loss and takes its own gradient."""

    @staticmethod
    def forward(ctx: Any, own_n: Tensor, places_n: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(places_n)
        whole_N = own_n.new_zeros(count).index_copy(0, places_n, own_n)
        dist.all_reduce(whole_N)
        return whole_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places_n,) = ctx.saved_tensors
        return grads[0].index_select(0, places_n), None, None
