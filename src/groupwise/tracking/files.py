"""Writing a file so that a crash leaves either the old content or the new, never a mixture."""

from __future__ import annotations

import os
from pathlib import Path


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
