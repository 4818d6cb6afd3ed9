"""Distribution of an update over processes: balanced shares of samples, sharding, and gradient sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from groupwise.errors import ConfigError
from groupwise.model.distributed.deepspeed_zero import ZeroEngine
from groupwise.model.distributed.fsdp import FSDPShards
from groupwise.model.ops.equivalence import draws_noise
from groupwise.model.policy import Policy
from groupwise.parallel.processes import Processes
from groupwise.records import Sample


def shares_of_samples(samples: Sequence[Sample], count: int) -> list[list[int]]:
    """Return the indices of the samples of each of `count` processes, in order.

    Groups are assigned greedily, largest first, each to the process with the fewest tokens. A group larger
    than a fair share is divided, and every process with a part of it computes its prompt.

    Example: groups of 6, 3 and 3 tokens for two processes -> the first group; the other two
    """
    if count == 1:
        return [list(range(len(samples)))]
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    fair = sum(cost(samples, members) for members in groups.values()) / count
    pieces = [piece for members in groups.values() for piece in divided(samples, members, at_most=fair)]
    shares: list[list[int]] = [[] for _ in range(count)]
    held = [0] * count
    for piece in sorted(pieces, key=lambda piece: (-cost(samples, piece), piece)):
        least = min(range(count), key=lambda rank: (held[rank], rank))
        shares[least] += piece
        held[least] += cost(samples, piece)
    return [sorted(share) for share in shares]


def divided(samples: Sequence[Sample], members: list[int], *, at_most: float) -> Iterator[list[int]]:
    """Halve a group until every piece costs at most `at_most` or has one member."""
    if len(members) == 1 or cost(samples, members) <= at_most:
        yield members
        return
    middle = len(members) // 2
    yield from divided(samples, members[:middle], at_most=at_most)
    yield from divided(samples, members[middle:], at_most=at_most)


def cost(samples: Sequence[Sample], members: Sequence[int]) -> int:
    """Return the tokens of the packed row: the prompt once, and each completion."""
    prompt = samples[members[0]].prefix
    return prompt + sum(len(samples[i].tokens) - samples[i].prefix for i in members)


def sum_gradients(processes: Processes, policy: Policy) -> None:
    """All-reduce the gradients; a gradient that no process has stays None.

    FSDP already sums the gradients of sharded layers, DeepSpeed those of all parameters.
    """
    if processes.count == 1 or policy.zero is not None:
        return
    divided = () if policy.shards is None else policy.shards.divided
    parameters = [p for name, p in policy.trainable().items() if name not in divided]
    if not parameters:
        return
    having = processes.gather([parameter.grad is not None for parameter in parameters])
    touched = [p for p, *has in zip(parameters, *having, strict=True) if any(has)]
    for parameter in touched:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    processes.sum_([parameter.grad for parameter in touched if parameter.grad is not None])


def divide(policy: Policy, layout: str) -> None:
    """Shard a policy over the processes of this run, by fsdp, zero1, zero2 or zero3."""
    if policy.unpacked_bytes:
        raise ConfigError("quantized weights cannot be sharded; set run.parallel=ddp")
    policy.noisy = draws_noise(policy)  # can only be tested before sharding
    if layout == "fsdp":
        policy.shards = FSDPShards(policy.model, policy.decoder, device=policy.device)
    else:
        policy.zero = ZeroEngine(policy.model, policy.head, stage=int(layout.removeprefix("zero")))
