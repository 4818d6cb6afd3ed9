"""The folder that a model is written to: there when it is whole, and nothing lost until then."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from groupwise.errors import ConfigError
from groupwise.files import let_read
from groupwise.model.resolve import first_line


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuse to write over anything, unless told to, and then only over a model; and where nothing can be."""
    try:
        if output.exists():
            _refuse_what_is_there(output, overwrite=overwrite)
        final = output.resolve()
        there = next(folder for folder in final.parents if folder.exists())
        os.rmdir(tempfile.mkdtemp(prefix=f".{final.name}-", dir=there))
    except OSError as error:
        raise _cannot_write(output, error) from error


def _refuse_what_is_there(output: Path, *, overwrite: bool) -> None:
    if not output.is_dir() or (any(output.iterdir()) and not (output / "config.json").is_file()):
        raise ConfigError(f"{output} exists and is not a model: choose another --output-path")
    if any(output.iterdir()) and not overwrite:
        raise ConfigError(f"{output} already holds a model: choose another --output-path, or --overwrite")


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Lend a hidden folder to fill; if all goes well it then takes the place of `output`.

    Where that is a link, what it points to is replaced.
    """
    try:
        final = output.resolve()
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{final.name}-", dir=final.parent, ignore_cleanup_errors=True
        ) as hidden:
            unfinished, replaced = Path(hidden) / "new", Path(hidden) / "old"
            unfinished.mkdir()
            yield unfinished
            let_read(unfinished)
            if final.exists():
                final.rename(replaced)
            try:
                unfinished.rename(final)
            except OSError:
                if replaced.exists():
                    replaced.rename(final)
                raise
    except (OSError, SafetensorError) as error:
        raise _cannot_write(output, error) from error


def _cannot_write(output: Path, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or first_line(error)
    return ConfigError(f"cannot write {output}: {reason}; choose another --output-path")
