"""Groups with advantages to the token sequences that are trained.

A rollout is in the batch when it is valid, has a trained token and is not masked for being
truncated. All of these count in the loss's denominators (`batch_size`). Those of zero advantage pull
on nothing unless there is a KL penalty or an entropy bonus, so they need not be computed
(`to_samples`): leaving them out saves time and changes no gradient.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from statistics import fmean

from groupwise.records import Group, Rollout, Sample


def in_batch(groups: Sequence[Group], *, mask_truncated: bool) -> Iterator[tuple[int, Rollout]]:
    """Yield every rollout of the batch with the number of its group."""
    for number, group in enumerate(groups):
        for rollout in group.valid:
            if rollout.length and not (mask_truncated and rollout.truncated):
                yield number, rollout


def batch_size(groups: Sequence[Group], *, mask_truncated: bool) -> tuple[int, int]:
    """Return the sequences and the trained tokens of the batch, zero advantages included."""
    lengths = [rollout.length for _, rollout in in_batch(groups, mask_truncated=mask_truncated)]
    return len(lengths), sum(lengths)


def to_samples(groups: Sequence[Group], *, mask_truncated: bool, keep_zero: bool) -> list[Sample]:
    """Return the batch as samples, each trained token with its advantage.

    `keep_zero` also returns rollouts of zero advantage: needed when a KL penalty or an entropy bonus
    gives them a gradient.
    """
    samples = [
        sample
        for number, rollout in in_batch(groups, mask_truncated=mask_truncated)
        if keep_zero or rollout.has_signal
        for sample in rollout_samples(rollout, group=number)
    ]
    return numbered_prompts(samples)


def training_batch(
    groups: Sequence[Group], *, mask_truncated: bool, keep_zero: bool, top_entropy: float = 1.0
) -> tuple[list[Sample], int, int]:
    """Return the samples of a step, and the sequences and tokens of its whole batch."""
    samples = to_samples(groups, mask_truncated=mask_truncated, keep_zero=keep_zero)
    return (
        keep_top_entropy(samples, share=top_entropy),
        *batch_size(groups, mask_truncated=mask_truncated),
    )


def rollout_samples(rollout: Rollout, *, group: int) -> Iterator[Sample]:
    """Yield the token sequences of a rollout as samples of the group with this number."""
    whole = rollout.length if rollout.branches else 0
    advantages = on_tokens(rollout)
    for part, sequence in enumerate(rollout.sequences):
        yield Sample(
            tokens=sequence.tokens,
            trained=sequence.trained,
            logprobs=sequence.logprobs,
            entropies=sequence.entropies,
            advantages=tuple(islice(advantages, len(sequence.tokens))),
            prefix=sequence.prompt_length,
            group=group,
            member=rollout.member,
            part=part,
            rollout_length=whole,
        )


def on_tokens(rollout: Rollout) -> Iterator[float]:
    """Yield the advantage of each token of all sequences; tokens that are not trained get 0."""
    each = chain.from_iterable(sequence.trained for sequence in rollout.sequences)
    if rollout.token_advantages is None:
        return (rollout.advantage if trained else 0.0 for trained in each)
    own = iter(rollout.token_advantages)
    return (next(own) if trained else 0.0 for trained in each)


def numbered_prompts(samples: Sequence[Sample]) -> list[Sample]:
    """Number the distinct prompts of each group: an agent may write another prompt for each member."""
    prompts: dict[int, dict[tuple[int, ...], int]] = {}
    numbered = []
    for sample in samples:
        own = prompts.setdefault(sample.group, {})
        number = own.setdefault(sample.tokens[: sample.prefix], len(own))
        numbered.append(replace(sample, prompt=number) if number else sample)
    return numbered


def predicting_results(samples: Sequence[Sample], *, weight: float) -> list[Sample]:
    """Return the samples with a cross-entropy loss on what came between turns (ECHO, arXiv 2605.24517).

    These are the tokens after the prompt that the policy did not sample: tool results or an environment's
    replies, with the chat template's text around them. The loss is `weight` times their mean over the step.
    """
    read = [
        [not trained and place >= sample.prefix for place, trained in enumerate(sample.trained)]
        for sample in samples
    ]
    total = sum(map(sum, read))
    if not total:
        return list(samples)
    return [
        replace(sample, supervised=tuple(weight / total if flag else 0.0 for flag in own))
        for sample, own in zip(samples, read, strict=True)
    ]


def mean_entropy(groups: Sequence[Group], *, mask_truncated: bool) -> float:
    """Return the mean entropy of the batch's trained tokens, as they were sampled."""
    entropies = [
        entropy
        for _, rollout in in_batch(groups, mask_truncated=mask_truncated)
        for sequence in rollout.sequences
        for entropy, trained in zip(sequence.entropies, sequence.trained, strict=True)
        if trained
    ]
    return fmean(entropies) if entropies else 0.0


def adapted_coefficient(
    coefficient: float, entropy: float, *, target: float, step: float
) -> tuple[float, float]:
    """Return the entropy bonus of this step, and the coefficient for the next.

    Adaptive entropy control as in Skywork-OR1 (arXiv 2505.22312). Below the target the bonus acts and its
    coefficient grows by `step`; above it the bonus is off and the coefficient shrinks. It is never negative.
    """
    if entropy > target:
        return 0.0, max(0.0, coefficient - step)
    return coefficient, coefficient + step


def keep_top_entropy(samples: Sequence[Sample], *, share: float) -> list[Sample]:
    """Return the samples with the advantage kept on the tokens of highest entropy and 0 on the others.

    The tokens that compete are those with an advantage, over all samples of the step; exactly the
    nearest whole number to `share` of them is kept, at least one. Equal entropies go to the earlier
    sample, then to the earlier token. The others stay `trained`: they count in every denominator and
    feel the KL penalty and the entropy bonus (80/20 rule, arXiv 2506.01939).
    """
    competing = [
        (-entropy, number, position)
        for number, sample in enumerate(samples)
        for position, (entropy, advantage) in enumerate(zip(sample.entropies, sample.advantages, strict=True))
        if advantage != 0.0
    ]
    if share >= 1.0 or not competing:
        return list(samples)
    count = max(1, round(share * len(competing)))
    kept = {(number, position) for _, number, position in heapq.nsmallest(count, competing)}
    return [
        replace(
            sample,
            advantages=tuple(
                advantage if (number, position) in kept else 0.0
                for position, advantage in enumerate(sample.advantages)
            ),
        )
        for number, sample in enumerate(samples)
    ]
