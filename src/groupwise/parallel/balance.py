"""Who computes what of an update: shares of like size, whole groups where that is fair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from groupwise.records import Sample


def dealt_out(samples: Sequence[Sample], count: int) -> list[list[int]]:
    """Return for each of `count` processes the indices of its samples, in their order.

    The largest group goes first, each to whoever has least. A group larger than a fair share is divided, and
    its prompt computed by each who has a part of it.

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
    """Halve a group until no piece is larger than asked, or has one member."""
    if len(members) == 1 or cost(samples, members) <= at_most:
        yield members
        return
    middle = len(members) // 2
    yield from divided(samples, members[:middle], at_most=at_most)
    yield from divided(samples, members[middle:], at_most=at_most)


def cost(samples: Sequence[Sample], members: Sequence[int]) -> int:
    """Tokens of the packed row: the prompt once, and each answer."""
    prompt = samples[members[0]].prefix
    return prompt + sum(len(samples[i].tokens) - samples[i].prefix for i in members)
