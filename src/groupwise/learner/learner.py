"""The GRPO update: samples in, new weights and metrics out.

`training.loop` calls `minibatches`, then `compute_loss` and `step` for each. Agents and populations call
`train_on`, which does all three.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from groupwise.algo.losses import (
    LossSettings,
    Tokens,
    averages,
    merge,
    policy_loss,
    token_weights,
    try_loss,
)
from groupwise.algo.samples import (
    adapted_coefficient,
    mean_entropy,
    predicting_results,
    training_batch,
)
from groupwise.algo.surrogates import CUSTOM_LOSSES
from groupwise.config.schema import AlgoConfig, OptimConfig
from groupwise.errors import ConfigError
from groupwise.invariants import check_finite, check_gap
from groupwise.learner.micro_batch import (
    SMALLER_PASSES,
    MicroBatch,
    MicroBatchInputs,
    PassOutput,
    StepOutput,
    default_micro_batch_tokens,
    micro_batches,
    row_logprobs,
    smaller_passes,
    supervised_logprobs,
)
from groupwise.learner.optimizer import make_optimizer
from groupwise.learner.teacher import SelfTeacher, Teacher
from groupwise.model.attention.ulysses import UlyssesContext
from groupwise.model.device import explain_out_of_memory, ran_out_of_memory
from groupwise.model.policy import Policy
from groupwise.parallel.processes import Processes, shares_of_samples, sum_gradients
from groupwise.records import Group, Sample, Sampling

GPU_LOGITS_BYTES = 2 << 30
"""Upper bound on the memory of a chunk of logits and its gradient on a GPU."""


class Learner:
    """Computes gradients from samples and steps the optimizer."""

    def __init__(
        self,
        policy: Policy,
        *,
        algo: AlgoConfig,
        optim: OptimConfig,
        sampling: Sampling,
        max_steps: int,
        processes: Processes | None = None,
        context: UlyssesContext | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.policy = policy
        self.teacher = teacher
        self.context = context
        """Set for sequence parallelism: all processes share every row. None: each computes its own rows."""
        self.processes = processes or Processes()
        self.algo = algo
        self._check_supported()
        self.optim = optim
        self.sampling = sampling
        self.micro_batch_tokens = optim.micro_batch_tokens or default_micro_batch_tokens(policy)
        self.total_updates = max_steps * optim.updates
        self.updates = 0
        """Optimizer steps so far; the learning-rate schedule depends on it."""
        self.last_logprobs: dict[tuple[int, int, int], list[float]] = {}
        """Log-probabilities of the trained tokens in the last pass, by group, member and part."""
        self.optimizer = make_optimizer(policy, optim)
        self.settings = loss_settings(algo)
        self.entropy_coefficient = 0.0
        """State of the adaptive entropy bonus (`algo.target_entropy`)."""

    def _check_supported(self) -> None:
        supervised = self.algo.echo > 0 or self.algo.sft_weight > 0
        if self.context is not None and (supervised or self.teacher is not None):
            raise ConfigError("run.parallel=context excludes algo.teacher, algo.echo and algo.sft_weight")
        if self.context is not None and self.policy.logits_processor is not None:
            raise ConfigError("run.parallel=context excludes rollout.logits_processor; set run.parallel=ddp")
        if self.context is not None and self.policy.grammar is not None:
            raise ConfigError(
                "run.parallel=context excludes rollout.json_schema and rollout.grammar; set run.parallel=ddp"
            )
        if isinstance(self.teacher, SelfTeacher) and self.policy.is_sharded:
            raise ConfigError("algo.teacher=self does not work with a sharded policy; set run.parallel=ddp")

    def train_on(self, groups: Sequence[Group], demonstrations: Sequence[Sample] = ()) -> dict[str, float]:
        """Train on groups with advantages: every optimizer step of one training step. Return the metrics."""
        return self._train(self.minibatches(groups, demonstrations))

    def minibatches(
        self, groups: Sequence[Group], demonstrations: Sequence[Sample] = ()
    ) -> Iterator[list[MicroBatchInputs]]:
        """Return the mini-batches of one training step, `optim.epochs` times over.

        The caller computes the loss of each and makes an optimizer step before it asks for the next.
        `demonstrations` are supervised samples that go with the groups of the same number.
        """
        algo = self.algo
        if algo.target_entropy is not None:
            self._adapt_entropy_bonus(groups, algo.target_entropy)
        samples, sequences, tokens = training_batch(
            groups,
            mask_truncated=algo.mask_truncated,
            # A KL penalty or an entropy bonus gives a gradient to members of zero advantage as well.
            keep_zero=algo.beta > 0
            or self.settings.entropy_bonus != 0
            or self.teacher is not None
            or algo.echo > 0,
            top_entropy=algo.top_entropy,
        )
        if isinstance(self.teacher, SelfTeacher):
            hints = self.teacher.hints(groups)
            samples = [replace(one, hint=hints.get((one.group, one.member), ())) for one in samples]
        if algo.echo:
            samples = predicting_results(samples, weight=algo.echo)
        return self._minibatches([*samples, *demonstrations], sequences=sequences, tokens=tokens)

    def _adapt_entropy_bonus(self, groups: Sequence[Group], target: float) -> None:
        """Set the entropy bonus of this step and move the coefficient of the next one."""
        entropy = mean_entropy(groups, mask_truncated=self.algo.mask_truncated)
        active, self.entropy_coefficient = adapted_coefficient(
            self.entropy_coefficient, entropy, target=target, step=self.algo.entropy_step
        )
        self.settings = replace(self.settings, entropy_bonus=active)

    def update(self, samples: Sequence[Sample], *, sequences: int, tokens: int) -> dict[str, float]:
        """Train on samples: every optimizer step of one training step. Return the metrics.

        `sequences` and `tokens` count the whole batch, also what is not computed because its advantage is 0:
        they are the loss's denominators. Every process gets all samples and computes a share of them. Losses
        are sums, so the gradient is the sum of the processes' gradients.
        """
        return self._train(self._minibatches(samples, sequences=sequences, tokens=tokens))

    def _train(self, minibatches: Iterator[list[MicroBatchInputs]]) -> dict[str, float]:
        for minibatch in minibatches:
            self.compute_loss(minibatch)
            self.step()
        return self.report()

    def _minibatches(
        self, samples: Sequence[Sample], *, sequences: int, tokens: int
    ) -> Iterator[list[MicroBatchInputs]]:
        self.last_logprobs = {}
        self._outputs: list[dict[str, Tensor]] = []
        self._losses: list[float] = []
        self._norms: list[float] = []
        if not samples:
            return
        self.policy.model.train()
        minibatches = self._prepare(samples, sequences=sequences, tokens=tokens)
        for _ in range(self.optim.epochs):
            yield from minibatches

    def compute_loss(self, minibatch: list[MicroBatchInputs]) -> None:
        """Compute the loss of a mini-batch and its gradient, one micro-batch after the other."""
        own = StepOutput(0.0, {})
        with self.processes.together():
            own = self._collect(minibatch, self._accumulate(minibatch))
        everyone = self.processes.gather(own.on_cpu())
        if self.context is not None:
            everyone = everyone[:1]  # all processes have computed the same loss, together
        total = merge(each.metrics for each in everyone)
        self._outputs.append(total)
        self._losses.append(sum(each.loss for each in everyone))
        check_finite("the loss", self._losses[-1])
        check_gap(averages(total).get("policy/gap", 0.0), limit=self.algo.max_gap)

    def step(self) -> None:
        """Make one optimizer step with the gradient of the last mini-batch."""
        sum_gradients(self.processes, self.policy)
        rate = scheduled_rate(self.optim, self.updates, total=self.total_updates)
        norm = clipped_step(self.policy, self.optimizer, rate=rate, max_grad_norm=self.optim.max_grad_norm)
        self.updates += 1
        self._norms.append(norm)

    def report(self) -> dict[str, float]:
        """Return the metrics of this training step's updates."""
        if not self._norms:
            return {"policy/updates": 0.0}
        metrics = averages(merge(self._outputs))
        if "policy/cross_entropy_sum" in metrics:
            metrics["policy/cross_entropy"] = metrics.pop("policy/cross_entropy_sum") / self.optim.epochs
        return {
            **metrics,
            "policy/loss": sum(self._losses) / len(self._losses),
            "policy/grad_norm": sum(self._norms) / len(self._norms),
            "policy/updates": float(len(self._norms)),
            "optim/learning_rate": scheduled_rate(self.optim, self.updates - 1, total=self.total_updates),
            **(
                {}
                if self.algo.target_entropy is None
                else {"policy/entropy_bonus": self.settings.entropy_bonus}
            ),
        }

    def all_logprobs(self) -> dict[tuple[int, int], list[float]]:
        """Return the log-probabilities of all processes in the last pass, by group and member."""
        parts = {
            key: logprobs
            for seen in self.processes.gather(self.last_logprobs)
            for key, logprobs in seen.items()
        }
        later = sorted(key for key in parts if key[2])
        whole = {key[:2]: logprobs for key, logprobs in parts.items() if not key[2]}
        for key in later:
            whole[key[:2]] = [*whole.get(key[:2], ()), *parts[key]]
        return whole

    @property
    def most_bytes(self) -> int:
        """Upper bound on an update's memory besides weights: activations, logits, gradients, moments."""
        weights = 16 * self.policy.trained_numbers
        return self.micro_batch_tokens * self.policy.activation_bytes + GPU_LOGITS_BYTES + weights

    @explain_out_of_memory("computing old, reference and teacher log-probabilities", SMALLER_PASSES)
    def _prepare(
        self, samples: Sequence[Sample], *, sequences: int, tokens: int
    ) -> list[list[MicroBatchInputs]]:
        """Split samples into packed mini-batches and compute their old and reference log-probabilities."""
        divided = split_groups(samples, self.optim.minibatches or 1)
        self._minibatch_count = len(divided)
        weights = token_weights(
            self.algo.loss,
            [[sample.length for sample in minibatch if sample.length] for minibatch in divided],
            sequences=sequences,
            tokens=tokens,
            max_tokens=self.sampling.max_tokens,
            normalize=self.algo.normalize,
            rollouts=[[sample.whole_length for sample in minibatch if sample.length] for minibatch in divided]
            if any(sample.rollout_length for sample in samples)
            else None,
        )
        prepared: list[list[MicroBatchInputs]] = []
        for minibatch, own_weights in zip(divided, weights, strict=True):
            each = iter(own_weights)
            # A demonstration has no trained token, and so no weight in the policy loss.
            sample_weights = [next(each) if sample.length else 0.0 for sample in minibatch]
            # Before the first update the old policy equals the current one, unless dropout makes it differ.
            old_pass = bool(prepared) or self.optim.epochs > 1 or self.policy.noisy
            parts: list[MicroBatchInputs] = []
            for part in self._parts(minibatch, sample_weights):
                parts.append(
                    replace(
                        part,
                        old_N=self._fixed_logprobs(self.policy, part.batch) if old_pass else None,
                        reference_N=self._reference_logprobs(part.batch) if self.algo.beta else None,
                        teacher_N=None if self.teacher is None else self._teacher_logprobs(part),
                    )
                )
            prepared.append(parts)
        return prepared

    def _parts(self, minibatch: Sequence[Sample], weights: Sequence[float]) -> Iterator[MicroBatchInputs]:
        """Yield the passes that make up this process's share of a mini-batch."""
        if self.context is not None:
            shares = [list(range(len(minibatch)))] * self.processes.count
        else:
            shares = shares_of_samples(minibatch, self.processes.count)
        passes = [
            [
                [share[i] for i in indices]
                for indices in micro_batches(
                    [minibatch[i] for i in share],
                    budget=self.micro_batch_tokens,
                    shared=self.policy.general is None,
                )
            ]
            for share in shares
        ]
        for indices in passes[self.processes.rank]:
            yield MicroBatchInputs.build(
                [minibatch[i] for i in indices], [weights[i] for i in indices], device=self.policy.device
            )
        if self.policy.is_sharded:
            # Sharded layers need all processes: those without work run idle passes.
            for _ in range(max(map(len, passes)) - len(passes[self.processes.rank])):
                yield replace(
                    MicroBatchInputs.build(minibatch[:1], [0.0], device=self.policy.device), idle=True
                )

    def _logprobs(self, policy: Policy, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        entropy_gradient = self.settings.entropy_bonus != 0
        return row_logprobs(
            policy, batch, self.sampling, entropy_gradient=entropy_gradient, context=self.context
        )

    @torch.no_grad()
    def _fixed_logprobs(self, policy: Policy, batch: MicroBatch) -> Tensor:
        """Compute log-probabilities without dropout, as during sampling."""
        policy.model.eval()
        try:
            return self._logprobs(policy, batch)[0]
        finally:
            self.policy.model.train()

    def _teacher_logprobs(self, part: MicroBatchInputs) -> Tensor:
        assert self.teacher is not None
        try:
            return self.teacher.logprobs(part)
        finally:
            self.policy.model.train()

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        with self.policy.reference() as reference:
            return self._fixed_logprobs(reference, batch)

    def _accumulate(self, parts: list[MicroBatchInputs]) -> list[PassOutput]:
        """Accumulate a mini-batch's gradient; if memory runs out, start over with smaller micro-batches.

        Smaller micro-batches give the same gradient. `parts` is updated in place, for later epochs.
        """
        while True:
            try:
                return [self._backward(part) for part in parts]
            except (RuntimeError, MemoryError) as error:
                if not ran_out_of_memory(error):
                    raise
                if self.policy.is_sharded or self.context is not None:
                    raise ConfigError(
                        f"the update ran out of memory; {SMALLER_PASSES} (passes have at most "
                        f"{self.micro_batch_tokens} tokens)"
                    ) from error
                if all(len(part.members) == 1 for part in parts):
                    raise ConfigError(
                        "a single completion does not fit in memory; "
                        "set model.gradient_checkpointing=true or lower rollout.max_tokens"
                    ) from error
            parts[:] = [half for part in parts for half in part.halves()]
            self.micro_batch_tokens = smaller_passes(self.optimizer, self.micro_batch_tokens)

    def _backward(self, part: MicroBatchInputs) -> PassOutput:
        batch = part.batch
        cross_entropy: Tensor | None = None
        if batch.supervised is None:
            logprobs_N, entropy_N = self._logprobs(self.policy, batch)
        else:
            logprobs_N, entropy_N, cross_entropy = supervised_logprobs(
                self.policy, batch, self.sampling, entropy_gradient=self.settings.entropy_bonus != 0
            )
        loss, metrics = self._policy_loss(part, logprobs_N, entropy_N)
        if cross_entropy is not None:
            # The weights are those of the whole step; a mini-batch counts as if it were all of it.
            loss = loss + (0.0 if part.idle else self._minibatch_count) * cross_entropy
            metrics["policy/cross_entropy_sum"] = 0.0 * cross_entropy if part.idle else cross_entropy
        self.policy.backward(loss)
        return PassOutput(
            loss=loss.detach(),
            metrics={name: value.detach() for name, value in metrics.items()},
            logprobs_N=logprobs_N.detach(),
        )

    def _policy_loss(
        self, part: MicroBatchInputs, logprobs_N: Tensor, entropy_N: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        batch = part.batch
        if not len(logprobs_N):  # demonstrations alone
            return logprobs_N.sum(), {}
        return policy_loss(
            Tokens(
                logprobs_N=logprobs_N,
                old_N=logprobs_N.detach() if part.old_N is None else part.old_N,
                sampled_N=batch.sampled_N,
                reference_N=part.reference_N,
                entropy_N=entropy_N,
                advantages_N=batch.advantages_N,
                weights_N=part.weights_N,
                sequence_N=batch.sequence_N,
                teacher_N=part.teacher_N,
            ),
            self.settings,
        )

    def _collect(self, parts: Sequence[MicroBatchInputs], outputs: Sequence[PassOutput]) -> StepOutput:
        """Read the outputs of a mini-batch's passes: the only point where the host waits for the GPU."""
        counted = [(part, output) for part, output in zip(parts, outputs, strict=True) if not part.idle]
        for part, output in counted:
            each = torch.split(output.logprobs_N.float().cpu(), [sample.length for sample in part.members])
            for sample, own_N in zip(part.members, each, strict=True):
                if sample.length:
                    self.last_logprobs[sample.group, sample.member, sample.part] = own_N.tolist()
        return StepOutput(
            sum(float(output.loss) for _, output in counted), merge(output.metrics for _, output in counted)
        )


def loss_settings(algo: AlgoConfig) -> LossSettings:
    """Return what the loss is made of."""
    return LossSettings(
        kind=algo.loss,
        clip_low=algo.clip_low,
        clip_high=algo.clip_high,
        clip_two_sided=algo.clip_two_sided,
        beta=algo.beta,
        kl=algo.kl,
        correction=algo.correction,
        correction_cap=algo.correction_cap,
        entropy_bonus=algo.entropy_bonus,
        divergence_limit=algo.divergence_limit,
        tau_positive=algo.tau_positive,
        tau_negative=algo.tau_negative,
        off_policy_mask=algo.off_policy_mask,
        distill=0.0 if algo.teacher is None else algo.distill,
    )


def try_custom_loss(algo: AlgoConfig) -> None:
    """Try a loss of the user before a model loads."""
    if algo.loss in CUSTOM_LOSSES:
        try_loss(loss_settings(algo), teacher=algo.teacher)


def split_groups(samples: Sequence[Sample], count: int) -> list[list[Sample]]:
    """Distribute whole groups over at most `count` mini-batches of similar size, in order."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    count = min(count, len(groups))
    ordered = list(groups.values())
    bounds = [round(i * len(ordered) / count) for i in range(count + 1)]
    return [[sample for group in ordered[start:end] for sample in group] for start, end in pairwise(bounds)]


@explain_out_of_memory(
    "making an optimizer step", "set optim.kind=adamw8bit, optim.offload=true or lora.r=16"
)
def clipped_step(
    policy: Policy, optimizer: torch.optim.Optimizer, *, rate: float, max_grad_norm: float
) -> float:
    """Clip the gradient, step, and return its norm before clipping. A limit of 0 disables clipping."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    if policy.zero is not None:
        norm = policy.zero.step()  # clips with the limit passed to `start`
        check_finite("the gradient norm", norm)
    else:
        norm = clip(policy, max_grad_norm or float("inf"))
        check_finite("the gradient norm", norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    policy.version += 1
    return norm


def clip(policy: Policy, limit: float) -> float:
    """Clip the gradient to the norm `limit` and return its norm before clipping."""
    if policy.shards is None:
        return float(torch.nn.utils.clip_grad_norm_(list(policy.trainable().values()), limit))
    policy.shards.take_gradients()
    owned = list(policy.owned().values())
    whole = [p.grad for n, p in policy.owned().items() if n not in policy.shards.parts and p.grad is not None]
    norm = policy.shards.norm(whole)
    torch.nn.utils.clip_grads_with_norm_(owned, limit, norm)
    return float(norm)


def scheduled_rate(optim: OptimConfig, update: int, *, total: int) -> float:
    """Return the learning rate of optimizer step `update` (from 0) of `total` by the settings."""
    assert optim.learning_rate is not None, "the config must be resolved first"
    return learning_rate(
        update, peak=optim.learning_rate, kind=optim.schedule, warmup=optim.warmup_steps, total=total
    )


def learning_rate(update: int, *, peak: float, kind: str, warmup: int, total: int) -> float:
    """Return the learning rate of optimizer step `update` (from 0) of `total`.

    The first warm-up step has a rate above 0; linear and cosine reach 0 just after the last step.
    """
    if update < warmup:
        return peak * (update + 1) / warmup
    if kind == "constant":
        return peak
    done = min(1.0, (update - warmup) / max(1, total - warmup))
    return peak * (1 - done) if kind == "linear" else peak * 0.5 * (1 + math.cos(math.pi * done))
