"""training.log: what the `groupwise` logger says, in plain text with the time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOGGER = logging.getLogger("groupwise")


@contextmanager
def log_to(path: Path) -> Iterator[logging.Logger]:
    """Append everything the package logs inside the block to a file, and nothing to the terminal."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level_before = LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield LOGGER
    finally:
        LOGGER.setLevel(level_before)
        LOGGER.removeHandler(handler)
        handler.close()
