"""Load rows as examples: `Column` describes how a column is named in data files and how its values are read.

`split_rows` and `split_stream` divide examples into training and held-out ones.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.config.schema import TaskConfig
from groupwise.errors import ConfigError
from groupwise.files import READERS, Located, hub_reason, no_such_file, numbered, read_file
from groupwise.records import Example, ExampleStream, Split, is_unicode


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a task. Errors on bad values name the file, the line and the column."""

    read: Callable[[Any], Any]
    """Converts a value of the file to one that the task uses; raises ValueError with the reason."""
    names: tuple[str, ...] = ()
    """Names of the column in data files, in order of preference. Empty: its own name only."""
    judges: bool = True
    """Whether rewards read the column. Only the prompt reads a question, for example."""


Columns = Mapping[str, Column]


def text(value: Any) -> str:
    """Read non-blank text; numbers are converted."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"expected text, got {type(value).__name__}")
    if not str(value).strip():
        raise ValueError("expected non-empty text")
    return str(value)


def question_and_answer(read_answer: Callable[[Any], Any]) -> Columns:
    """Return the columns of a task with questions and gold answers, by their usual names."""
    return {
        "question": Column(read=text, names=("question", "problem"), judges=False),
        "answer": Column(read=read_answer, names=("answer", "ground_truth", "solution")),
    }


def renamed(columns: Columns, names: Mapping[str, str], *, task: str) -> Columns:
    """Return the columns with the names that they have in the user's data, `ours: theirs`."""
    result = dict(columns)
    for ours, theirs in names.items():
        if not isinstance(theirs, str):
            raise ConfigError(f"task.columns.{ours} must be the name of a column in the data; got {theirs!r}")
        if columns and ours not in columns:
            raise ConfigError(f"task.columns: {task} has no column {ours!r}; it has {', '.join(columns)}")
        known = result.get(ours, Column(read=lambda value: value))
        result[ours] = replace(known, names=(theirs,))
    return result


def read_columns(row: Mapping[str, Any], columns: Columns, *, where: str) -> dict[str, Any]:
    """Return the row with every column read and renamed to the task's name for it."""
    values = dict(row)
    for name, column in columns.items():
        candidates = column.names or (name,)
        source = next((candidate for candidate in candidates if candidate in row), None)
        if source is None:
            raise ConfigError(
                f"{where}: no column {' or '.join(map(repr, candidates))}; it has {', '.join(map(str, row))}"
            )
        try:
            values[name] = column.read(row[source])
        except ValueError as error:
            raise ConfigError(f"{where}, column {source!r}: {error}; got {str(row[source])[:60]!r}") from None
    return values


Rows = Iterable[Mapping[str, Any]]
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(:[\w.-]+)?(@[\w.-]+)?")


def load_examples(
    source: str | Path | Rows | Callable[[], Rows], *, split: str = "train", columns: Columns | None = None
) -> list[Example]:
    """Read every example of a source.

    A source is the path of a JSON list (.json), of JSON lines (.jsonl), of a table with a header (.csv,
    .tsv), each possibly gzipped (.gz), or of a Parquet file; the name of a Hugging Face dataset,
    `owner/name`, `owner/name:subset` or `owner/name:subset@split`; a list or generator of dicts; a pandas or
    polars data frame; a `Dataset` or `DatasetDict` of the package datasets, or the folder that its
    `save_to_disk` wrote (`FOLDER@SPLIT` names a split); or a function that returns one of these. `columns`
    are checked and renamed to the task's names.
    """
    name, rows = locate(source, split=split)
    examples = [as_example(row, where=where, columns=columns or {}) for where, row in rows]
    if not examples:
        raise ConfigError(f"{name}: there are no examples")
    return examples


def locate(source: str | Path | Rows | Callable[[], Rows], *, split: str) -> tuple[str, Located]:
    """Return the name of a source and its rows, which are read lazily."""
    if not isinstance(source, str | Path):
        rows: Any = source() if callable(source) else source
        name = getattr(source, "__name__", "examples")
        if is_dataset_dict(rows):
            rows = split_of(rows, split, source=name)
        return name, numbered(rows, source=name)
    path = Path(source).expanduser()
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind in READERS:
        return str(path), read_file(path, READERS[kind])
    folder, _, chosen = str(source).partition("@")
    if (Path(folder).expanduser() / DATASET_INFO).is_file() or is_saved_dict(folder):
        return str(source), read_saved(Path(folder).expanduser(), split=chosen or split)
    if path.exists():
        raise ConfigError(
            f"cannot read {path}: use a .json, .jsonl, .csv, .tsv or .parquet file, or a folder that "
            "datasets' save_to_disk wrote"
        )
    if isinstance(source, str) and HUB_NAME.fullmatch(source):
        return source, read_hub(source, split=split)
    raise no_such_file(path)


def as_examples(rows: Rows, *, source: str) -> list[Example]:
    """Convert rows to Examples. The error for a bad row names `source` and the row number, from 1."""
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
        raise ConfigError(f"{where}: the text is not valid Unicode")
    return Example(read_columns(row, columns or {}, where=where))


DATASET_INFO = "dataset_info.json"
"""File in the folder of a dataset that `save_to_disk` wrote."""
TEST_NAMES = ("test", "validation", "eval", "dev")
"""Usual names of the split that is held out, in order of preference."""


def is_saved_dict(folder: str) -> bool:
    return (Path(folder).expanduser() / "dataset_dict.json").is_file()


def read_saved(folder: Path, *, split: str) -> Located:
    """Read a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{folder} is a saved dataset of Hugging Face: pip install datasets to read it"
        ) from None
    try:
        rows = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise ConfigError(f"cannot read {folder}: {error}") from error
    if is_dataset_dict(rows):
        rows = split_of(rows, split, source=str(folder))
    return numbered(rows, source=str(folder))


def is_dataset_dict(rows: object) -> bool:
    """Whether this is a `DatasetDict` of the package datasets: tables by the name of their split."""
    return (
        isinstance(rows, Mapping)
        and bool(rows)
        and all(hasattr(table, "column_names") for table in rows.values())
    )


def split_of(rows: Any, split: str, *, source: str) -> Any:
    """Return a split of a `DatasetDict`. Of a single split, the name does not matter."""
    if split in rows:
        return rows[split]
    if split == "test" and (table := held_out_split(rows)) is not None:
        return table
    if len(rows) == 1:
        return next(iter(rows.values()))
    raise ConfigError(f"{source}: there is no split {split!r}; choose one of {', '.join(map(repr, rows))}")


def held_out_split(rows: Any) -> Any:
    """Return the held-out split of a `DatasetDict`, or None."""
    return next((rows[name] for name in TEST_NAMES if name in rows), None)


FILE_SUFFIXES = frozenset(
    (".txt", ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".gz", ".xlsx", ".py", ".yaml")
)
"""Endings of file names, which names of Hugging Face datasets do not have."""


def read_hub(source: str, *, split: str) -> Located:
    """Read a split of a Hugging Face dataset."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"no file {source!r}; to load it as a Hugging Face dataset: pip install datasets"
        ) from None
    if Path(source).suffix.lower() in FILE_SUFFIXES:
        raise no_such_file(Path(source))
    name, _, chosen_split = source.partition("@")
    name, _, subset = name.partition(":")
    try:
        rows = datasets.load_dataset(name, subset or None, split=chosen_split or split)
    except Exception as error:
        raise ConfigError(
            f"no file {source!r}, and it cannot be loaded as a Hugging Face dataset: {hub_reason(error)}; "
            "check the name, or give a file"
        ) from error
    return numbered(rows, source=source)


MAX_HELD_OUT_SHARE = 0.2
"""Largest share of finite data that is held out if a task has no held-out examples of its own."""


def by_fingerprint(rows: Iterable[Example]) -> dict[str, Example]:
    """Return the distinct rows in order, keyed by fingerprint."""
    unique: dict[str, Example] = {}
    for row in rows:
        unique.setdefault(row.fingerprint, row)
    return unique


def split_stream(stream: ExampleStream, *, config: TaskConfig, seed: int) -> Split:
    """Split a stream, which itself keeps both sides disjoint."""
    held_out = tuple(stream.held_out(config.held_out)) if config.held_out else ()
    return Split(train=stream, held_out=held_out, seed=seed, size=config.max_examples)


def split_rows(
    rows: Sequence[Example],
    *,
    held_out: Sequence[Example] | None,
    asks: Callable[[Example], str],
    key: Callable[[Example], str] | None = None,
    hides_state: bool = False,
    config: TaskConfig,
    seed: int,
) -> Split:
    """Split finite data so that no example, and no equivalent one, is on both sides.

    The task's own held-out examples are used as they are, and training rows that equal one are dropped.
    Otherwise the rows with the smallest fingerprints are held out. This choice does not depend on the order
    of rows and hardly changes when rows are added. Training rows with the same prompt (`asks`) or the same
    `key` as a held-out row are dropped; if rows with the same prompt may differ (`hides_state`), only the key
    counts.
    """
    unique = by_fingerprint(rows)
    if held_out is None:
        count = min(config.held_out, int(len(unique) * MAX_HELD_OUT_SHARE))
        evaluation = {fingerprint: unique.pop(fingerprint) for fingerprint in sorted(unique)[:count]}
        dropped = len(rows) - len(unique) - len(evaluation)
    else:
        evaluation = by_fingerprint(held_out)
        unique = {fingerprint: row for fingerprint, row in unique.items() if fingerprint not in evaluation}
        dropped = len(rows) - len(unique)
    if not unique:
        raise ConfigError("no training examples left: every one equals a held-out example")
    train = tuple(unique.values())[: config.max_examples]
    evaluated = tuple(evaluation.values())[: config.held_out]
    prompts = set(map(asks, evaluated))
    distinct = tuple(row for row in train if asks(row) not in prompts)
    keys = set(map(key, evaluated)) if key else set()
    candidates = train if hides_state else distinct
    disjoint = tuple(row for row in candidates if key(row) not in keys) if key else candidates
    if not disjoint:
        raise ConfigError("no training examples left: every one asks the same as a held-out example")
    dropped += len(train) - len(disjoint)
    sides: tuple[list[str], ...] = (
        list(unique)[: config.max_examples],
        list(evaluation)[: config.held_out],
    )
    if [*map(id, disjoint)] != [*map(id, distinct)]:  # otherwise keep the fingerprint of older checkpoints
        sides = (*sides, [row.fingerprint for row in disjoint])
    return Split(
        train=disjoint,
        held_out=evaluated,
        seed=seed,
        size=len(disjoint),
        dropped=dropped,
        fingerprint=hashlib.sha256(repr(sides).encode()).hexdigest()[:16],
    )
