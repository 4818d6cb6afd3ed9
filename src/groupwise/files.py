"""Read data files (JSON, JSONL, CSV, TSV, Parquet) with each row's location, and write files atomically."""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from groupwise.errors import ConfigError

Located = Iterator[tuple[str, object]]
"""Rows with their locations: ("rows.jsonl, line 3", row)."""


def package_version() -> str:
    """Return the version of this package, also where its source is used without an installation."""
    # Slow to import, and --help needs no version.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("groupwise")
    except PackageNotFoundError:
        return "0+source"


def read_file(path: Path, read: Callable[[Path], Located]) -> Located:
    """Yield the rows of a file; raise `ConfigError` if it cannot be read."""
    if not path.is_file():
        raise no_such_file(path)
    try:
        yield from read(path)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def no_such_file(path: Path) -> ConfigError:
    """Return the error for a missing file, with the working directory for a relative path."""
    return ConfigError(f"no such file: {path}" + ("" if path.is_absolute() else f" in {Path.cwd()}"))


def hub_reason(error: Exception) -> str:
    """Return in a few words why something could not be loaded from the Hugging Face Hub."""
    names = {kind.__name__ for one in causes(error) for kind in type(one).__mro__}
    if "GatedRepoError" in names:
        return "access to it is restricted; accept its terms on the Hub and log in with `hf auth login`"
    if names & {"RepositoryNotFoundError", "DatasetNotFoundError"} and "OfflineModeIsEnabled" not in names:
        return "the Hub has nothing of this name, or it is private (log in with `hf auth login`)"
    text = " ".join(map(str, causes(error)))
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") or "OfflineMode" in text:
        return "downloads are off (HF_HUB_OFFLINE is set)"
    if names & {"LocalEntryNotFoundError", "ConnectionError", "ConnectError", "TimeoutException"} or (
        "couldn't connect" in text.lower() or "couldn't reach" in text.lower()
    ):
        return "the Hugging Face Hub cannot be reached"
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it."""
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def open_text(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def read_json(path: Path) -> Located:
    with open_text(path) as file:
        try:
            rows = json.load(file)
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON{where_in(error)}") from error
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
                row = json.loads(line.strip())
            except ValueError as error:
                raise ConfigError(
                    f"{where} is not valid JSON{where_in(error)}; each line must be one JSON object"
                ) from error
            except RecursionError as error:
                raise ConfigError(f"{where}: the JSON is nested too deeply to be read") from error
            yield where, row


def read_csv(path: Path, delimiter: str = ",") -> Located:
    """Read a table with a header line; every value is text."""
    with open_text(path) as file:
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        try:
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise ConfigError(
                        f"{where}: the row does not have the {len(reader.fieldnames or ())} values that the "
                        "header names; put quotes around values that contain the delimiter"
                    )
                yield where, {name.lstrip("\ufeff"): value for name, value in row.items()}
        except csv.Error as error:
            raise ConfigError(f"{path}, line {reader.line_num}: {error}") from error


def read_tsv(path: Path) -> Located:
    return read_csv(path, delimiter="\t")


def where_in(error: ValueError) -> str:
    """Return the place of a JSON error: ": column 5" or ": line 3, column 5"."""
    if not isinstance(error, json.JSONDecodeError):
        return ""
    line = f"line {error.lineno}, " if "\n" in error.doc.rstrip() else ""
    return f": {line}column {error.colno}"


def read_parquet(path: Path) -> Located:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return numbered(rows, source=str(path))


def rows_of_frame(rows: Any) -> Any:
    """Return the rows of a pandas or polars data frame, or anything else as it is. NaN becomes None."""
    if hasattr(rows, "to_dicts"):  # polars
        return rows.to_dicts()
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # pandas
        return [{name: plain_cell(cell) for name, cell in row.items()} for row in rows.to_dict("records")]
    return rows


def plain_cell(cell: Any) -> Any:
    """Return the cell of a data frame as a plain Python value: arrays become lists."""
    if isinstance(cell, float) and cell != cell:
        return None
    if type(cell).__module__ == "numpy" and hasattr(cell, "tolist"):
        cell = cell.tolist()
    if isinstance(cell, list):
        return [plain_cell(part) for part in cell]
    return {name: plain_cell(part) for name, part in cell.items()} if isinstance(cell, dict) else cell


def numbered(rows: Any, *, source: str) -> Located:
    rows = rows_of_frame(rows)
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        raise ConfigError(f"{source}: expected a list of dicts, got {type(rows).__name__}")
    for number, row in enumerate(rows, start=1):
        yield f"{source}, row {number}", row


READERS: dict[str, Callable[[Path], Located]] = {
    "json": read_json,
    "jsonl": read_json_lines,
    "csv": read_csv,
    "tsv": read_tsv,
    "parquet": read_parquet,
}


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` atomically; create its folder if needed."""
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
    """Flush a file or a folder to disk.

    A rename is durable only after its folder has been synced.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporaries(folder: Path) -> None:
    """Remove temporary files of `write_atomically` that killed processes left behind."""
    for leftover in folder.glob(".*.tmp-*"):
        process = leftover.name.rpartition("-")[2]
        if not (process.isdecimal() and alive(int(process))) or int(process) == os.getpid():
            leftover.unlink(missing_ok=True)


def alive(process: int) -> bool:
    """Whether a process with this id is running on this machine."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def sign_weights(folder: Path) -> None:
    """Add what wrote them to the metadata of safetensors files. Their tensors are copied byte for byte."""
    for path in sorted(folder.glob("*.safetensors")):
        signed = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        with path.open("rb") as source, signed.open("wb") as target:
            length = int.from_bytes(source.read(8), "little")
            header = json.loads(source.read(length))
            metadata = {**header.pop("__metadata__", {}), "made_by": f"groupwise {package_version()}"}
            text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)  # tensors are aligned
            target.write(len(text).to_bytes(8, "little") + text)
            shutil.copyfileobj(source, target, 2**24)
        signed.replace(path)


def let_read(folder: Path) -> None:
    """Give weight files the permissions of their folder; safetensors writes them for the owner only."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*.safetensors"):
        path.chmod(mode)
