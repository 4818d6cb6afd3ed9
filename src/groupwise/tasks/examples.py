"""Reading examples from files, the Hugging Face hub, lists and generators."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from groupwise.errors import ConfigError
from groupwise.records import Example, is_unicode
from groupwise.tasks.columns import Columns, read_columns

Rows = Iterable[Mapping[str, Any]]
Located = Iterator[tuple[str, object]]
"""Rows as they were found, each with where that was: "rows.jsonl, line 3"."""

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


def numbered(rows: Any, *, source: str) -> Located:
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        raise ConfigError(f"{source}: expected a list of dicts, got {type(rows).__name__}")
    for number, row in enumerate(rows, start=1):
        yield f"{source}, row {number}", row


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


def read_file(path: Path, read: Callable[[Path], Located]) -> Located:
    if not path.is_file():
        raise no_such_file(path)
    try:
        yield from read(path)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def no_such_file(path: Path) -> ConfigError:
    """Name the folder that was searched: a task file's own folder is another one."""
    return ConfigError(f"no such file: {path}" + ("" if path.is_absolute() else f" in {Path.cwd()}"))


def open_text(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def read_json(path: Path) -> Located:
    with open_text(path) as file:
        try:
            rows = json.load(file)
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON: {error}") from error
    return numbered(rows, source=str(path))


def read_json_lines(path: Path) -> Located:
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{where}: not JSON: {error}") from error
            yield where, row


def read_parquet(path: Path) -> Located:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return numbered(rows, source=str(path))


READERS: dict[str, Callable[[Path], Located]] = {
    "json": read_json,
    "jsonl": read_json_lines,
    "parquet": read_parquet,
}


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
