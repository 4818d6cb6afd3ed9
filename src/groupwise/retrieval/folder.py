"""The folder that a new index is built in: refused early, and left as it was when the build fails."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from groupwise.errors import ConfigError


def check_new(folder: Path) -> None:
    """Refuse a folder that holds anything, and one that nothing can be written to."""
    try:
        if (folder / "manifest.json").exists():
            raise ConfigError(f"{folder} already holds an index; give another folder, or delete it first")
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty and holds no finished index; give an empty folder")
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        os.rmdir(tempfile.mkdtemp(prefix=".groupwise-", dir=there))
    except OSError as error:
        raise _cannot_write(folder, error) from error


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Make a folder to fill; when that fails, take away what was made, so that it can be tried again."""
    check_new(folder)  # once more: what others put there meanwhile is not to be taken away
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        with suppress(OSError):
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            for place in missing:
                place.rmdir()
        if isinstance(error, OSError):
            raise _cannot_write(folder, error) from error
        raise


def _cannot_write(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {folder}: {error.strerror or error}; give another folder by --output")
