"""Warm start: supervised steps on worked answers, through the same packing and log-probabilities as GRPO."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from groupwise.algo.packing import micro_batches, pack
from groupwise.invariants import check_finite
from groupwise.model.logprobs import token_logprobs
from groupwise.model.policy import Policy
from groupwise.records import Sample, Sampling


def worked_sample(prompt: Sequence[int], answer: Sequence[int], *, group: int) -> Sample:
    """One prompt and the answer to imitate; the loss is on the answer alone, its end token included."""
    before, size = len(prompt), len(prompt) + len(answer)
    return Sample(
        tokens=(*prompt, *answer),
        trained=(False,) * before + (True,) * len(answer),
        logprobs=(0.0,) * size,
        entropies=(0.0,) * size,
        advantages=(0.0,) * size,
        prefix=before,
        group=group,
    )


def supervised_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    *,
    rate: float,
    max_grad_norm: float,
    micro_batch_tokens: int,
) -> float:
    """Make one optimizer step on the mean negative log-probability a token, which is returned."""
    policy.model.train()
    tokens = sum(sample.length for sample in samples)
    total = 0.0
    for indices in micro_batches(samples, budget=micro_batch_tokens):
        batch = pack([samples[i] for i in indices], device=policy.device)
        hidden_TM = policy.hidden(batch.tokens_T, batch.positions_T, batch.layout)
        logprobs_N, _ = token_logprobs(
            hidden_TM.index_select(0, batch.predictor_N),
            policy.head_weight,
            policy.head_bias,
            batch.targets_N,
            Sampling(),
            entropy_gradient=False,
        )
        loss = -logprobs_N.sum() / tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    check_finite("the loss", total)
    torch.nn.utils.clip_grad_norm_(policy.trainable().values(), max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total
