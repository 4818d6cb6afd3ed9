"""The columns a task needs: what each may be called in a data file, and how its values are read."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from groupwise.config.schema import TaskConfig
from groupwise.errors import ConfigError
from groupwise.files import READERS, Located, no_such_file, numbered, read_file
from groupwise.records import Example, is_unicode


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column: a bad value is refused with the file, the line and the column it stands in."""

    read: Callable[[Any], Any]
    """From what the file holds to what the task uses; raises ValueError with the reason."""
    names: tuple[str, ...] = ()
    """What data files call it, the likeliest first; none: its own name alone."""
    judges: bool = True
    """Whether rewards read it: a question only asks."""


Columns = Mapping[str, Column]


def text(value: Any) -> str:
    """Read text that is not blank; a number will do."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"expected text, got {type(value).__name__}")
    if not str(value).strip():
        raise ValueError("it is empty")
    return str(value)


def renamed(columns: Columns, names: Mapping[str, str], *, task: str) -> Columns:
    """Return the columns under the names that the user's data gives them, `ours: theirs`."""
    wanted = dict(columns)
    for ours, theirs in names.items():
        if not isinstance(theirs, str):
            raise ConfigError(f"task.columns.{ours} must name a column of the data; got {theirs!r}")
        if columns and ours not in columns:
            raise ConfigError(f"task.columns: {task} has no column {ours!r}, only {', '.join(columns)}")
        known = wanted.get(ours, Column(read=lambda value: value))
        wanted[ours] = replace(known, names=(theirs,))
    return wanted


def read_columns(row: Mapping[str, Any], columns: Columns, *, where: str) -> dict[str, Any]:
    """Return the row with every column read, under the task's own name for it."""
    values = dict(row)
    for name, column in columns.items():
        tried = column.names or (name,)
        found = next((candidate for candidate in tried if candidate in row), None)
        if found is None:
            raise ConfigError(
                f"{where}: no column {' or '.join(map(repr, tried))}; it has {', '.join(map(str, row))}"
            )
        try:
            values[name] = column.read(row[found])
        except ValueError as error:
            raise ConfigError(f"{where}, column {found!r}: {error}; got {str(row[found])[:60]!r}") from None
    return values


Rows = Iterable[Mapping[str, Any]]
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(:[\w.-]+)?(@[\w.-]+)?")


def load_examples(
    source: str | Path | Rows | Callable[[], Rows], *, split: str = "train", columns: Columns | None = None
) -> list[Example]:
    """Read every example of a source.

    A source is the path of a JSON list (.json), of JSON lines (.jsonl), either gzipped (.gz), or of
    a Parquet file; the name of a Hugging Face dataset, `owner/name`, `owner/name:subset` or
    `owner/name:subset@split`; a list or generator of dicts; or a function that returns one.
    `columns` are checked and brought under the names they have here.
    """
    name, rows = locate(source, split=split)
    examples = [as_example(row, where=where, columns=columns or {}) for where, row in rows]
    if not examples:
        raise ConfigError(f"{name}: there are no examples")
    return examples


def locate(source: str | Path | Rows | Callable[[], Rows], *, split: str) -> tuple[str, Located]:
    """Return what to call a source and its rows, read as they are asked for."""
    if not isinstance(source, str | Path):
        rows = source() if callable(source) else source
        name = getattr(source, "__name__", "examples")
        return name, numbered(rows, source=name)
    path = Path(source).expanduser()
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind in READERS:
        return str(path), read_file(path, READERS[kind])
    if path.exists():
        raise ConfigError(f"cannot read {path}: give a .json, .jsonl, .jsonl.gz or .parquet file")
    if isinstance(source, str) and HUB_NAME.fullmatch(source):
        return source, read_hub(source, split=split)
    raise no_such_file(path)


def as_examples(rows: Rows, *, source: str) -> list[Example]:
    """Turn rows into Examples; the error for a bad one names `source` and the row, counted from 1."""
    examples = [as_example(row, where=where) for where, row in numbered(rows, source=source)]
    if not examples:
        raise ConfigError(f"{source}: there are no examples")
    return examples


def as_example(row: object, *, where: str, columns: Columns | None = None) -> Example:
    if isinstance(row, Example) and not columns:
        return row
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: expected a dict of columns, got {type(row).__name__}")
    if not all(isinstance(column, str) for column in row):
        raise ConfigError(f"{where}: column names must be strings, got {list(row)}")
    if not is_unicode(row):
        raise ConfigError(f"{where}: its text is not Unicode")
    return Example(read_columns(row, columns or {}, where=where))


def read_hub(source: str, *, split: str) -> Located:
    """Read a split of a Hugging Face dataset."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"no file named {source!r}; to read it as a Hugging Face dataset: pip install datasets"
        ) from None
    name, _, chosen_split = source.partition("@")
    name, _, subset = name.partition(":")
    try:
        rows = datasets.load_dataset(name, subset or None, split=chosen_split or split)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"no file named {source!r}, nor can the Hugging Face dataset be loaded: {reason}"
        ) from error
    return numbered(rows, source=source)


MAX_HELD_OUT_SHARE = 0.2
"""Of finite data without held-out examples of its own, the most that evaluation may take."""


@runtime_checkable
class ExampleStream(Protocol):
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

    train: Sequence[Example] | ExampleStream
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
            self.train.train(index, seed=self.seed)
            if isinstance(self.train, ExampleStream)
            else self.train[index]
        )


@lru_cache(maxsize=4)
def epoch_order(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return the order in which an epoch visits its examples."""
    order = list(range(size))
    random.Random(f"epoch {seed} {epoch}").shuffle(order)
    return tuple(order)


def split_stream(stream: ExampleStream, *, config: TaskConfig, seed: int) -> Split:
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
