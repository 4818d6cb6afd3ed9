"""Supervised fine-tuning with the same packing and log-probabilities as GRPO."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.config.schema import OptimConfig
from groupwise.errors import ConfigError
from groupwise.invariants import check_finite
from groupwise.learner.learner import clipped_step, scheduled_rate
from groupwise.learner.micro_batch import (
    SMALLER_PASSES,
    default_micro_batch_tokens,
    micro_batches,
    pack,
    row_logprobs,
    smaller_passes,
)
from groupwise.learner.optimizer import make_optimizer
from groupwise.model.device import ran_out_of_memory
from groupwise.model.policy import Policy
from groupwise.parallel.processes import Processes, shares_of_samples, sum_gradients
from groupwise.records import Sample, Sampling


def worked_sample(prompt: Sequence[int], answer: Sequence[int], *, group: int) -> Sample:
    """Return a sample whose loss covers the answer only, including its end token."""
    trained = (False,) * len(prompt) + (True,) * len(answer)
    return masked_sample((*prompt, *answer), trained, group=group)


def masked_sample(tokens: Sequence[int], trained: Sequence[bool], *, group: int) -> Sample:
    """Return a sample whose loss covers the tokens marked in `trained`.

    The samples of a group must share all tokens before their first trained token.
    """
    zeros = (0.0,) * len(tokens)
    return Sample(
        tokens=tuple(tokens),
        trained=tuple(trained),
        logprobs=zeros,
        entropies=zeros,
        advantages=zeros,
        prefix=trained.index(True),
        group=group,
    )


class SFTLearner:
    """Steps the optimizer on supervised samples and returns metrics."""

    def __init__(
        self, policy: Policy, *, optim: OptimConfig, max_steps: int, processes: Processes | None = None
    ) -> None:
        self.policy = policy
        self.processes = processes or Processes()
        self.optim = optim
        self.micro_batch_tokens = optim.micro_batch_tokens or default_micro_batch_tokens(policy)
        self.total_updates = max_steps
        self.updates = 0
        """Optimizer steps so far; the learning-rate schedule depends on it."""
        self.optimizer = make_optimizer(policy, optim)

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Run one optimizer step on the mean negative log-likelihood per token."""
        self.policy.model.train()
        loss = self._mean_loss(samples, backward=True)
        sum_gradients(self.processes, self.policy)
        rate = scheduled_rate(self.optim, self.updates, total=self.total_updates)
        norm = clipped_step(self.policy, self.optimizer, rate=rate, max_grad_norm=self.optim.max_grad_norm)
        self.updates += 1
        return {"sft/loss": loss, "policy/grad_norm": norm, "optim/learning_rate": rate}

    @torch.no_grad()
    def loss(self, samples: Sequence[Sample]) -> float:
        """Return the mean negative log-likelihood per token, without dropout and without an update."""
        self.policy.model.eval()
        return self._mean_loss(samples, backward=False)

    def _mean_loss(self, samples: Sequence[Sample], *, backward: bool) -> float:
        """Return the loss over all samples; each process computes a share."""
        own = 0.0
        with self.processes.together():
            shares = [
                [samples[i] for i in share] for share in shares_of_samples(samples, self.processes.count)
            ]
            tokens = sum(sample.length for sample in samples)
            own = self._share_loss(shares[self.processes.rank], tokens=tokens, backward=backward)
            if self.policy.is_sharded:
                # Sharded layers need all processes: those without work run idle passes.
                passes = [len(micro_batches(share, budget=self.micro_batch_tokens)) for share in shares]
                for _ in range(max(passes) - passes[self.processes.rank]):
                    pass_loss(self.policy, samples[:1], tokens=float("inf"), backward=backward)
        return sum(self.processes.gather(own))

    def _share_loss(self, samples: Sequence[Sample], *, tokens: int, backward: bool) -> float:
        """Return `mean_loss`; if memory runs out, start over with smaller micro-batches."""
        while True:
            budget = self.micro_batch_tokens
            try:
                return mean_loss(
                    self.policy, samples, tokens=tokens, micro_batch_tokens=budget, backward=backward
                )
            except (RuntimeError, MemoryError) as error:
                if not ran_out_of_memory(error):
                    raise
                if self.policy.is_sharded:
                    raise ConfigError(f"the update ran out of memory; {SMALLER_PASSES}") from error
                if len(micro_batches(samples, budget=budget, shared=self.policy.general is None)) == len(
                    samples
                ):
                    raise ConfigError(
                        "a single example does not fit in memory; set model.gradient_checkpointing=true or "
                        "lower sft.max_length"
                    ) from error
            self.micro_batch_tokens = smaller_passes(self.optimizer, budget)


def supervised_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    *,
    rate: float,
    max_grad_norm: float,
    micro_batch_tokens: int,
) -> float:
    """Run one optimizer step on the mean negative log-likelihood per token and return that loss."""
    policy.model.train()
    tokens = sum(sample.length for sample in samples)
    loss = mean_loss(policy, samples, tokens=tokens, micro_batch_tokens=micro_batch_tokens, backward=True)
    clipped_step(policy, optimizer, rate=rate, max_grad_norm=max_grad_norm)
    return loss


def mean_loss(
    policy: Policy, samples: Sequence[Sample], *, tokens: int, micro_batch_tokens: int, backward: bool
) -> float:
    """Return the summed negative log-likelihood divided by `tokens`; `backward` accumulates its gradient."""
    losses = [
        pass_loss(policy, [samples[i] for i in indices], tokens=tokens, backward=backward)
        for indices in micro_batches(samples, budget=micro_batch_tokens, shared=policy.general is None)
    ]
    total = sum(map(float, losses))  # after all passes are issued, so the GPU stays busy
    check_finite("the loss", total)
    return total


def pass_loss(policy: Policy, samples: Sequence[Sample], *, tokens: float, backward: bool) -> Tensor:
    """Return the loss of one pass as a tensor on its device."""
    batch = pack(samples, device=policy.device)
    logprobs_N, _ = row_logprobs(policy, batch, Sampling(), entropy_gradient=False)
    loss = -logprobs_N.sum() / tokens
    if backward:
        policy.backward(loss)
    return loss.detach()
