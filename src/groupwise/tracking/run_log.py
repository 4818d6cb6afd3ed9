"""training.log: what the `groupwise` logger says, in plain text with the time."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOGGER = logging.getLogger("groupwise")


class LogFile(logging.FileHandler):
    """A file whose full disk is no news: what else the run writes there says so in a sentence."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


@contextmanager
def log_to(path: Path) -> Iterator[logging.Logger]:
    """Append everything the package logs inside the block to a file, and nothing to the terminal."""
    handler = LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level_before = LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    # A reward that says `logging.warning(…)` gives the root logger a handler that writes to the terminal.
    propagated, LOGGER.propagate = LOGGER.propagate, False
    try:
        yield LOGGER
    finally:
        LOGGER.propagate = propagated
        LOGGER.setLevel(level_before)
        LOGGER.removeHandler(handler)
        handler.close()
