"""Files of rows, JSON or Parquet, read so that a mistake is named with its line or row."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from groupwise.errors import ConfigError

Located = Iterator[tuple[str, object]]
"""Rows as they were found, each with where that was: "rows.jsonl, line 3"."""


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
        except RecursionError as error:
            raise ConfigError(f"{path}: the JSON is nested too deeply to be read") from error
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
            except RecursionError as error:
                raise ConfigError(f"{where}: the JSON is nested too deeply to be read") from error
            yield where, row


def read_parquet(path: Path) -> Located:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return numbered(rows, source=str(path))


def numbered(rows: Any, *, source: str) -> Located:
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        raise ConfigError(f"{source}: expected a list of dicts, got {type(rows).__name__}")
    for number, row in enumerate(rows, start=1):
        yield f"{source}, row {number}", row


READERS: dict[str, Callable[[Path], Located]] = {
    "json": read_json,
    "jsonl": read_json_lines,
    "parquet": read_parquet,
}


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content` in one step, making its folder when needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    data = content.encode() if isinstance(content, str) else content
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Force a file, or the list of names in a folder, onto the disk.

    A rename is only as durable as the folder it happened in.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporaries(folder: Path) -> None:
    """Remove what killed processes left of `write_atomically`; a process that still runs keeps its own."""
    for leftover in folder.glob(".*.tmp-*"):
        process = leftover.name.rpartition("-")[2]
        if not (process.isdecimal() and alive(int(process))) or int(process) == os.getpid():
            leftover.unlink(missing_ok=True)


def alive(process: int) -> bool:
    """Whether a process of this machine still runs."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def let_read(folder: Path) -> None:
    """Let all who may read a folder read the weights in it: safetensors writes them for their owner alone."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*.safetensors"):
        path.chmod(mode)
