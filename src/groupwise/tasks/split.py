"""Training and held-out examples that never meet, and a cursor through the former."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

from groupwise.config.sections import TaskConfig
from groupwise.errors import ConfigError
from groupwise.records import Example

MAX_HELD_OUT_SHARE = 0.2
"""Of finite data without held-out examples of its own, the most that evaluation may take."""


@runtime_checkable
class Stream(Protocol):
    """Examples without end, made when asked for. No training example equals a held-out one."""

    def train(self, index: int, *, seed: int) -> Example:
        """Return the training example at any index, always the same for the same seed."""
        ...

    def held_out(self, count: int) -> Sequence[Example]:
        """Return up to `count` different held-out examples, the same ones for every run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What a run trains on and what it is judged by."""

    train: Sequence[Example] | Stream
    held_out: tuple[Example, ...]
    seed: int
    size: int | None
    """Training examples in an epoch; None: endless."""
    dropped: int = 0
    """Rows left out because they repeat another row or equal a held-out example."""
    fingerprint: str = ""
    """The same for the same rows on either side; "" of a stream, which settings alone decide."""

    def take(self, cursor: int, count: int) -> tuple[list[Example], int]:
        """Return the `count` training examples at the cursor, and the cursor after them.

        The cursor counts examples from the start of the run, so that this one number is all a
        checkpoint needs. Each epoch has an order of its own that depends on seed and epoch alone.
        """
        return [self.at(position) for position in range(cursor, cursor + count)], cursor + count

    def at(self, position: int) -> Example:
        """Return the training example at one position of the run."""
        index = position
        if self.size is not None:
            epoch, offset = divmod(position, self.size)
            index = epoch_order(self.size, self.seed, epoch)[offset]
        return (
            self.train.train(index, seed=self.seed) if isinstance(self.train, Stream) else self.train[index]
        )


@lru_cache(maxsize=4)
def epoch_order(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return the order in which an epoch visits its examples."""
    order = list(range(size))
    random.Random(f"epoch {seed} {epoch}").shuffle(order)
    return tuple(order)


def split_stream(stream: Stream, *, config: TaskConfig, seed: int) -> Split:
    """Split a stream, which is disjoint by its own promise."""
    held_out = tuple(stream.held_out(config.held_out)) if config.held_out else ()
    return Split(train=stream, held_out=held_out, seed=seed, size=config.max_examples)


def split_rows(
    rows: Sequence[Example],
    *,
    held_out: Sequence[Example] | None,
    asks: Callable[[Example], str],
    key: Callable[[Example], str] | None = None,
    config: TaskConfig,
    seed: int,
) -> Split:
    """Split finite data so that no example is on both sides, nor one that asks the same.

    Held-out examples of the task's own are used as they are, and training rows that equal one are
    dropped. Otherwise the rows with the smallest fingerprints are held out: a choice that does not
    depend on their order and hardly changes when rows are added. Rows that ask what a held-out one asks,
    in the same words (`asks`) or by the same `key`, are dropped, whatever else tells them apart.
    """
    unique = by_fingerprint(rows)
    if held_out is None:
        count = min(config.held_out, int(len(unique) * MAX_HELD_OUT_SHARE))
        kept_back = {fingerprint: unique.pop(fingerprint) for fingerprint in sorted(unique)[:count]}
        dropped = len(rows) - len(unique) - len(kept_back)
    else:
        kept_back = by_fingerprint(held_out)
        unique = {fingerprint: row for fingerprint, row in unique.items() if fingerprint not in kept_back}
        dropped = len(rows) - len(unique)
    if not unique:
        raise ConfigError("no training example is left: each one equals a held-out example")
    train = tuple(unique.values())[: config.max_examples]
    judged_by = tuple(kept_back.values())[: config.held_out]
    asked = set(map(asks, judged_by))
    different = tuple(row for row in train if asks(row) not in asked)
    keys = set(map(key, judged_by)) if key else set()
    apart = tuple(row for row in different if key(row) not in keys) if key else different
    if not apart:
        raise ConfigError("no training example is left: each one asks what a held-out example asks")
    dropped += len(train) - len(apart)
    sides: tuple[list[str], ...] = (
        list(unique)[: config.max_examples],
        list(kept_back)[: config.held_out],
    )
    if len(apart) < len(different):  # else as it is in checkpoints from before there were keys
        sides = (*sides, [row.fingerprint for row in apart])
    return Split(
        train=apart,
        held_out=judged_by,
        seed=seed,
        size=len(apart),
        dropped=dropped,
        fingerprint=hashlib.sha256(repr(sides).encode()).hexdigest()[:16],
    )


def by_fingerprint(rows: Iterable[Example]) -> dict[str, Example]:
    """Return the different rows in order, the first of each kind."""
    unique: dict[str, Example] = {}
    for row in rows:
        unique.setdefault(row.fingerprint, row)
    return unique
