"""Log-probabilities of the trained tokens of a packed row, computed by one process or by all together.

Axes: T tokens of the row or of a stretch of it, M hidden size, N trained tokens, n those of a stretch.
"""

from __future__ import annotations

from torch import Tensor

from groupwise.algo.packing import MicroBatch
from groupwise.model.context import Context, ContextLayout
from groupwise.model.logprobs import token_logprobs
from groupwise.model.policy import Policy
from groupwise.records import Sampling


def row_logprobs(
    policy: Policy,
    batch: MicroBatch,
    sampling: Sampling,
    *,
    entropy_gradient: bool,
    context: Context | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (logprobs_N, entropy_N). With a context every process returns all of them."""
    if context is not None:
        return spread_logprobs(policy, batch, sampling, entropy_gradient=entropy_gradient, context=context)
    return policy.computing(lambda: own_logprobs(policy, batch, sampling, entropy_gradient=entropy_gradient))


def own_logprobs(
    policy: Policy, batch: MicroBatch, sampling: Sampling, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """The same of a row that one process computes."""
    hidden_TM = policy.hidden(batch.tokens_T, batch.positions_T, batch.layout)
    return token_logprobs(
        hidden_TM.index_select(0, batch.predictor_N),
        policy.head_weight,
        policy.head_bias,
        batch.targets_N,
        sampling,
        entropy_gradient=entropy_gradient,
    )


def spread_logprobs(
    policy: Policy, batch: MicroBatch, sampling: Sampling, *, entropy_gradient: bool, context: Context
) -> tuple[Tensor, Tensor]:
    """The same of a row of which each process computes a stretch."""
    tokens = len(batch.tokens_T)
    own = context.own(tokens)
    layout = ContextLayout(row=batch.layout, tokens=tokens, context=context)
    hidden_TM = policy.hidden(batch.tokens_T[own], batch.positions_T[own], layout)
    inside_N = (batch.predictor_N >= own.start) & (batch.predictor_N < own.stop)
    places_n = inside_N.nonzero()[:, 0]
    logprobs_n, entropy_n = token_logprobs(
        hidden_TM.index_select(0, batch.predictor_N[places_n] - own.start),
        policy.head_weight,
        policy.head_bias,
        batch.targets_N[places_n],
        sampling,
        entropy_gradient=entropy_gradient,
    )
    # Also where no trained token is in the stretch, the backward pass must go through every layer.
    nothing = 0.0 * hidden_TM.sum()
    count = len(batch.targets_N)
    whole_N = context.everyones(logprobs_n, places_n, count) + nothing
    return whole_N, context.everyones(entropy_n, places_n, count)
