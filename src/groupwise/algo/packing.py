"""Samples to packed micro-batches: no padding, each group's prompt once, bounded by a token budget.

Axes: T tokens of the packed row, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from groupwise.model.packed import PackedLayout
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
    tokens: list[int] = []
    positions: list[int] = []
    predictor: list[int] = []
    targets: list[int] = []
    sampled: list[float] = []
    advantages: list[float] = []
    sequence: list[int] = []
    shapes: list[tuple[int, list[int]]] = []
    number = 0
    for _, members in groupby(samples, key=lambda sample: sample.group):
        lengths: list[int] = []
        prefix: tuple[int, ...] = ()
        for sample in members:
            own = sample.tokens[sample.prefix : -1]
            if not lengths:
                prefix = sample.tokens[: sample.prefix]
                tokens += prefix
                positions += range(len(prefix))
                prompt_end = len(tokens) - 1
            assert sample.tokens[: sample.prefix] == prefix, "samples of one group share their prompt"
            start = len(tokens)
            tokens += own
            positions += range(len(prefix), len(prefix) + len(own))
            lengths.append(len(own))
            for at in range(sample.prefix, len(sample.tokens)):
                if sample.trained[at]:
                    offset = at - sample.prefix
                    predictor.append(start + offset - 1 if offset else prompt_end)
                    targets.append(sample.tokens[at])
                    sampled.append(sample.logprobs[at])
                    advantages.append(sample.advantages[at])
                    sequence.append(number)
            number += 1
        shapes.append((len(prefix), lengths))
    return MicroBatch(
        tokens_T=torch.tensor(tokens, device=device),
        positions_T=torch.tensor(positions, device=device),
        layout=PackedLayout.build(shapes, device=device),
        predictor_N=torch.tensor(predictor, device=device),
        targets_N=torch.tensor(targets, device=device),
        sampled_N=torch.tensor(sampled, device=device),
        advantages_N=torch.tensor(advantages, device=device),
        sequence_N=torch.tensor(sequence, device=device),
    )
