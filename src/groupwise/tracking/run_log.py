"""Write training.log: the messages of the `groupwise` logger with timestamps."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOGGER = logging.getLogger("groupwise")


class LogFile(logging.FileHandler):
    """A file handler that ignores OS errors: a full disk is reported when the run writes its other files."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


@contextmanager
def log_to(path: Path) -> Iterator[logging.Logger]:
    """Log to a file, and not to the terminal, inside the block."""
    handler = LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level_before = LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    # A reward that calls `logging.warning(…)` adds a terminal handler to the root logger.
    propagated, LOGGER.propagate = LOGGER.propagate, False
    try:
        yield LOGGER
    finally:
        LOGGER.propagate = propagated
        LOGGER.setLevel(level_before)
        LOGGER.removeHandler(handler)
        handler.close()
