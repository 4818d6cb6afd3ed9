"""Samples to packed micro-batches: no padding, each group's prompt once, bounded by a token budget.

Axes: T tokens of the packed row, S samples, A tokens behind the prompts, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.model.packed import PackedLayout
from groupwise.model.transfer import to_device
from groupwise.records import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward and backward pass works on.

    Example: one group with prompt (5, 6) and replies (7, 2) and (8, 2), every reply token trained ->
        tokens_T=[5, 6, 7, 8], positions_T=[0, 1, 2, 2]
        predictor_N=[1, 2, 1, 3], targets_N=[7, 2, 8, 2], sequence_N=[0, 0, 1, 1]
    """

    tokens_T: Tensor
    """A sample's last token predicts nothing and is left out."""
    positions_T: Tensor
    layout: PackedLayout
    predictor_N: Tensor
    """Where in the row each trained token is predicted: at the token before it."""
    targets_N: Tensor
    sampled_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor
    """Which sample of the micro-batch a trained token belongs to."""


def micro_batches(samples: Sequence[Sample], *, budget: int) -> list[list[int]]:
    """Split samples into micro-batches of at most `budget` tokens, as lists of their indices.

    Members of a group stay neighbours, and a shared prompt counts once in each micro-batch that
    holds it. A sample larger than the budget gets a micro-batch of its own.
    """
    batches: list[list[int]] = []
    size, group = 0, None
    for index in sorted(range(len(samples)), key=lambda i: samples[i].group):
        sample = samples[index]
        own = len(sample.tokens) - sample.prefix
        cost = own if sample.group == group else own + sample.prefix
        if not batches or size + cost > budget:
            batches.append([])
            size, cost = 0, own + sample.prefix
        batches[-1].append(index)
        size += cost
        group = sample.group
    return batches


def pack(samples: Sequence[Sample], *, device: torch.device) -> MicroBatch:
    """Lay samples out as one row; members of a group must be neighbours."""
    groups = [list(members) for _, members in groupby(samples, key=lambda sample: sample.group)]
    prompts = [group[0].tokens[: group[0].prefix] for group in groups]
    for prompt, group in zip(prompts, groups, strict=True):
        shared = all(sample.tokens[: sample.prefix] == prompt for sample in group)
        assert shared, "samples of one group share their prompt"
    own = [sample.tokens[sample.prefix : -1] for sample in samples]
    positions = [range(len(p)) for p in prompts] + [range(s.prefix, len(s.tokens) - 1) for s in samples]
    sequence_A, predictor_A = _answers(groups)

    def answers(name: str, dtype: type[np.generic]) -> NDArray[Any]:
        values = chain.from_iterable(getattr(sample, name)[sample.prefix :] for sample in samples)
        return np.fromiter(values, dtype)

    trained_A = answers("trained", np.bool_)

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
    )


def _answers(groups: Sequence[Sequence[Sample]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For every token behind a prompt: its sample, and where in the row it is predicted."""
    sizes_S = np.array([len(sample.tokens) - sample.prefix for group in groups for sample in group])
    sequence_A = np.repeat(np.arange(len(sizes_S)), sizes_S)
    prompt_ends = np.cumsum([group[0].prefix for group in groups]) - 1
    # Members follow the last prompt without their last tokens: one token less for each member before.
    predictor_A = prompt_ends[-1] + np.arange(len(sequence_A)) - sequence_A
    # But a first token is predicted at the end of its prompt.
    predictor_A[np.cumsum(sizes_S) - sizes_S] = np.repeat(prompt_ends, [len(group) for group in groups])
    return sequence_A, predictor_A
