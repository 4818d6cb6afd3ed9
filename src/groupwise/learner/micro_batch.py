"""Packed micro-batches and their log-probabilities: no padding, each group's prompt once, a token budget.

Axes: T tokens of the packed row, S samples, A tokens after the prompts, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.invariants import check_targets
from groupwise.model.attention.packed import PackedLayout
from groupwise.model.attention.ulysses import UlyssesContext, UlyssesLayout
from groupwise.model.device import to_device, total_memory
from groupwise.model.ops.logits import entropy, masked_logits, scaled_logits
from groupwise.model.policy import Policy
from groupwise.model.token_grammar import TokenGrammar
from groupwise.records import Sample, Sampling
from groupwise.tracking.run_folder import LOGGER

SMALLER_PASSES = "lower optim.micro_batch_tokens or set model.gradient_checkpointing=true"
"""What helps if an update runs out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedTokens:
    """Tokens to predict, with the weight of each in a sum of cross-entropies at temperature 1."""

    predictor_X: Tensor
    targets_X: Tensor
    weights_X: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The packed tensors of one forward and backward pass.

    Example: one group with prompt (5, 6) and replies (7, 2) and (8, 2), every reply token trained ->
        tokens_T=[5, 6, 7, 8], positions_T=[0, 1, 2, 2]
        predictor_N=[1, 2, 1, 3], targets_N=[7, 2, 8, 2], sequence_N=[0, 0, 1, 1]
    """

    tokens_T: Tensor
    """Without each sample's last token, which predicts nothing."""
    positions_T: Tensor
    layout: PackedLayout
    predictor_N: Tensor
    """Row index at which each trained token is predicted: that of the token before it."""
    targets_N: Tensor
    sampled_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor
    """Index of the sample that each trained token belongs to."""
    supervised: SupervisedTokens | None = None
    """Tokens with a cross-entropy loss; None if there are none."""
    samples: Sequence[Sample] = ()
    _masks: list[Tensor] = field(default_factory=list)
    """The result of `masks`, kept for the next pass over the same tokens."""

    def masks(self, grammar: TokenGrammar) -> Tensor:
        """Return masks_NW: the tokens that a grammar allows in place of each trained token."""
        if not self._masks:
            masks_AW = grammar.masks([sample.tokens[sample.prefix :] for sample in self.samples])
            trained_A = np.fromiter(
                chain.from_iterable(sample.trained[sample.prefix :] for sample in self.samples), np.bool_
            )
            self._masks.append(to_device(masks_AW[trained_A], self.targets_N.device))
        return self._masks[0]

    def contexts(self) -> Iterator[tuple[int, ...]]:
        """Yield the tokens before each trained token, prompt included."""
        for sample in self.samples:
            for place, trained in enumerate(sample.trained):
                if trained:
                    yield sample.tokens[:place]


def micro_batches(samples: Sequence[Sample], *, budget: int, shared: bool = True) -> list[list[int]]:
    """Split samples into micro-batches of at most `budget` tokens, as lists of their indices.

    Members of a group stay adjacent, and a shared prompt counts once in each micro-batch that
    holds it. A sample larger than the budget gets a micro-batch of its own. Without `shared`, every
    sample's prompt is computed with it.
    """
    batches: list[list[int]] = []
    size, group = 0, None
    for index in sorted(range(len(samples)), key=lambda i: prompt_of(samples[i])):
        sample = samples[index]
        own = len(sample.tokens) - sample.prefix
        cost = own if shared and prompt_of(sample) == group else own + sample.prefix
        if not batches or size + cost > budget:
            batches.append([])
            size, cost = 0, own + sample.prefix
        batches[-1].append(index)
        size += cost
        group = prompt_of(sample)
    return batches


def smaller_passes(optimizer: torch.optim.Optimizer, budget: int) -> int:
    """Discard what a pass without enough memory left behind, and return half of its budget.

    A failed pass may leave a partial gradient, so all of it is discarded. Call this outside of the except
    block: the exception's traceback holds the tensors of the failed pass.
    """
    optimizer.zero_grad(set_to_none=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    budget = max(1, budget // 2)
    LOGGER.warning(
        "out of memory in the update; retrying with micro-batches of %d tokens (same gradient)", budget
    )
    return budget


def prompt_of(sample: Sample) -> tuple[int, int]:
    """Return the key of the samples that share their prompt."""
    return sample.group, sample.prompt


def pack(samples: Sequence[Sample], *, device: torch.device) -> MicroBatch:
    """Pack samples into one row; those with the same prompt must be adjacent."""
    groups = [list(members) for _, members in groupby(samples, key=prompt_of)]
    prompts = [group[0].tokens[: group[0].prefix] for group in groups]
    for prompt, group in zip(prompts, groups, strict=True):
        shared = all(sample.tokens[: sample.prefix] == prompt for sample in group)
        assert shared, "samples with the same prompt number must share their prompt"
    own = [sample.tokens[sample.prefix : -1] for sample in samples]
    positions = [range(len(p)) for p in prompts] + [range(s.prefix, len(s.tokens) - 1) for s in samples]
    sequence_A, predictor_A = _completion_indices(groups)

    def answers(name: str, dtype: type[np.generic]) -> NDArray[Any]:
        values = chain.from_iterable(getattr(sample, name)[sample.prefix :] for sample in samples)
        return np.fromiter(values, dtype)

    trained_A = answers("trained", np.bool_)
    supervised = None
    if any(sample.supervised for sample in samples):
        weights = ((s.supervised or (0.0,) * len(s.tokens))[s.prefix :] for s in samples)
        weights_A = np.fromiter(chain.from_iterable(weights), np.float32)
        wanted_A = weights_A != 0.0
        supervised = SupervisedTokens(
            predictor_X=to_device(predictor_A[wanted_A], device),
            targets_X=to_device(answers("tokens", np.int64)[wanted_A], device),
            weights_X=to_device(weights_A[wanted_A], device),
        )

    move = partial(to_device, device=device)

    return MicroBatch(
        tokens_T=move(np.fromiter(chain(*prompts, *own), np.int64)),
        positions_T=move(np.fromiter(chain(*positions), np.int64)),
        layout=PackedLayout.build(
            [(g[0].prefix, [len(sample.tokens) - sample.prefix - 1 for sample in g]) for g in groups],
            device=device,
        ),
        predictor_N=move(predictor_A[trained_A]),
        targets_N=move(answers("tokens", np.int64)[trained_A]),
        sampled_N=move(answers("logprobs", np.float32)[trained_A]),
        advantages_N=move(answers("advantages", np.float32)[trained_A]),
        sequence_N=move(sequence_A[trained_A]),
        supervised=supervised,
        samples=samples,
    )


def _completion_indices(groups: Sequence[Sequence[Sample]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for every token after a prompt, its sample and the row index that predicts it."""
    sizes_S = np.array([len(sample.tokens) - sample.prefix for group in groups for sample in group])
    sequence_A = np.repeat(np.arange(len(sizes_S)), sizes_S)
    prompt_ends = np.cumsum([group[0].prefix for group in groups]) - 1
    # Members follow the last prompt without their last tokens: one token fewer per preceding member.
    predictor_A = prompt_ends[-1] + np.arange(len(sequence_A)) - sequence_A
    # The first token of a member is predicted at the end of its prompt.
    predictor_A[np.cumsum(sizes_S) - sizes_S] = np.repeat(prompt_ends, [len(group) for group in groups])
    return sequence_A, predictor_A


CPU_ACTIVATIONS = 4 << 30
"""Activation memory of one pass on a CPU in bytes; larger passes are hardly faster."""
LEAST = 1024


def pass_tokens(*, gpu_memory: int | None, token_bytes: int, recomputes: bool) -> int:
    """Return the number of tokens per pass, derived from total memory so that a resumed run gets the same.

    `gpu_memory` is the GPU's total memory, None on a CPU; `token_bytes` the activation memory of a token.
    """
    if gpu_memory is None:
        share, most = CPU_ACTIVATIONS, 4096
    else:
        # Large passes amortize host overhead; gradient checkpointing is chosen to save memory.
        share, most = gpu_memory // 4, 8192 if recomputes else 49152
    return min(max(share // token_bytes, LEAST), most)


def default_micro_batch_tokens(policy: Policy) -> int:
    """Return the default of optim.micro_batch_tokens for the policy's device."""
    on_gpu = policy.device.type == "cuda"
    return pass_tokens(
        gpu_memory=total_memory(policy.device) if on_gpu else None,
        token_bytes=policy.activation_bytes,
        recomputes=policy.model.is_gradient_checkpointing,
    )


def row_logprobs(
    policy: Policy,
    batch: MicroBatch,
    sampling: Sampling,
    *,
    entropy_gradient: bool,
    context: UlyssesContext | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (logprobs_N, entropy_N). With a Ulysses context, every process returns all of them."""
    if context is not None:
        row = UlyssesLayout(row=batch.layout, tokens=len(batch.tokens_T), context=context)
        return row.logprobs(
            policy,
            sampling,
            tokens_T=batch.tokens_T,
            positions_T=batch.positions_T,
            predictor_N=batch.predictor_N,
            targets_N=batch.targets_N,
            entropy_gradient=entropy_gradient,
        )
    return policy.computing(lambda: own_logprobs(policy, batch, sampling, entropy_gradient=entropy_gradient))


def own_logprobs(
    policy: Policy, batch: MicroBatch, sampling: Sampling, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """`row_logprobs` of a row that one process computes."""
    hidden_TM = policy.hidden(batch.tokens_T, batch.positions_T, batch.layout)
    return trained_logprobs(policy, batch, hidden_TM, sampling, entropy_gradient=entropy_gradient)


def trained_logprobs(
    policy: Policy, batch: MicroBatch, hidden_TM: Tensor, sampling: Sampling, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return (logprobs_N, entropy_N) of a row from its hidden states."""
    hidden_NM = hidden_TM.index_select(0, batch.predictor_N)
    rule = policy.logits_processor
    masks_NW = None if policy.grammar is None else batch.masks(policy.grammar)
    if rule is None:
        return policy.token_logprobs(
            hidden_NM, batch.targets_N, sampling, entropy_gradient=entropy_gradient, masks_NW=masks_NW
        )
    # A rule in Python is far slower than the logits are large: it is meant for small models.
    processed_NV = rule(batch.contexts(), policy.logits(hidden_NM))
    if masks_NW is not None:
        processed_NV = masked_logits(processed_NV, masks_NW, keep_N=batch.targets_N)
    logprobs_NV = scaled_logits(processed_NV, sampling, keep_N=batch.targets_N).log_softmax(-1)
    entropy_N = entropy(logprobs_NV if entropy_gradient else logprobs_NV.detach())
    return logprobs_NV.gather(1, batch.targets_N[:, None])[:, 0], entropy_N


def supervised_logprobs(
    policy: Policy, batch: MicroBatch, sampling: Sampling, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logprobs_N, entropy_N) and the weighted cross-entropy of the row's supervised tokens."""
    tokens = batch.supervised
    assert tokens is not None, "the row has no supervised tokens"

    def compute() -> tuple[Tensor, Tensor, Tensor]:
        hidden_TM = policy.hidden(batch.tokens_T, batch.positions_T, batch.layout)
        logprobs_N, entropy_N = trained_logprobs(
            policy, batch, hidden_TM, sampling, entropy_gradient=entropy_gradient
        )
        own_X, _ = policy.token_logprobs(
            hidden_TM.index_select(0, tokens.predictor_X),
            tokens.targets_X,
            Sampling(),
            entropy_gradient=False,
        )
        return logprobs_N, entropy_N, -(tokens.weights_X * own_X).sum()

    return policy.computing(compute)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutput:
    """Results of one pass, left on the device so that the host can issue the next pass without waiting."""

    loss: Tensor
    metrics: dict[str, Tensor]
    logprobs_N: Tensor


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of a mini-batch: the loss, and metrics as sums over tokens."""

    loss: float
    metrics: dict[str, Tensor]

    def on_cpu(self) -> StepOutput:
        """Return a copy with metrics on the CPU, for other processes."""
        return replace(self, metrics={name: value.cpu() for name, value in self.metrics.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchInputs:
    """A micro-batch with its loss weights and its old and reference log-probabilities."""

    members: Sequence[Sample]
    weights: Sequence[float]
    """Loss weight of each member's tokens."""
    batch: MicroBatch
    old_N: Tensor | None = None
    reference_N: Tensor | None = None
    teacher_N: Tensor | None = None
    idle: bool = False
    """Runs only to keep sharded processes in step; has weight 0 and does not count in metrics."""

    @classmethod
    def build(
        cls, members: Sequence[Sample], weights: Sequence[float], *, device: torch.device
    ) -> MicroBatchInputs:
        batch = pack(members, device=device)
        check_targets(members, batch.targets_N.tolist())
        return cls(members=members, weights=weights, batch=batch)

    @property
    def weights_N(self) -> Tensor:
        weights_S = to_device(np.asarray(self.weights, dtype=np.float32), self.batch.targets_N.device)
        return weights_S[self.batch.sequence_N]

    def halves(self) -> list[MicroBatchInputs]:
        """Return the same work as two parts; a single member cannot be divided."""
        middle = len(self.members) // 2
        trained = sum(sample.length for sample in self.members[:middle])
        device = self.batch.targets_N.device

        def half(members: slice, tokens: slice) -> MicroBatchInputs:
            part = MicroBatchInputs.build(self.members[members], self.weights[members], device=device)
            old_N = None if self.old_N is None else self.old_N[tokens]
            return replace(
                part,
                old_N=old_N,
                reference_N=None if self.reference_N is None else self.reference_N[tokens],
                teacher_N=None if self.teacher_N is None else self.teacher_N[tokens],
            )

        if not middle:
            return [self]
        return [half(slice(middle), slice(trained)), half(slice(middle, None), slice(trained, None))]
