"""Reading examples from files, the Hugging Face hub, lists and generators."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError
from groupwise.records import Example, is_unicode
from groupwise.row_files import READERS, Located, no_such_file, numbered, read_file
from groupwise.tasks.columns import Columns, read_columns

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
