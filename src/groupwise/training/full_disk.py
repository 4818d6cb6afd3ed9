"""A disk that is full: one sentence, whichever library came upon it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from groupwise.config import Config
from groupwise.errors import CheckpointError, EchoError
from groupwise.tracking.run_folder import RunFolder
from groupwise.tracking.summary import command
from groupwise.training.start import command_of

FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))
"""What the system calls it. Libraries quote that in errors of many kinds, with and without its number."""


@contextmanager
def told_when_full(folder: RunFolder, config: Config) -> Iterator[None]:
    """Say in a sentence that nothing more fits into the run's folder, and how to go on."""
    try:
        yield
    except EchoError:
        raise  # the leader of the processes says it
    except Exception as error:
        reason = next((words for words in FULL if words in str(error)), None)
        if reason is None:
            raise
        resume = command(command_of(config), "--resume", folder.path)
        then = f"then {resume} goes on" if folder.config.exists() else "and start again"
        raise CheckpointError(f"cannot write {folder.path}: {reason}; make room, {then}") from error
