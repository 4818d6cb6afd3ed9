"""What holds for Python while tokens are drawn."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_only_new() -> Iterator[None]:
    """Python's garbage collector leaves alone what was there before the block.

    Answers are many objects, which make it go through everything that was ever imported and loaded: that
    takes tenths of a second, in which a GPU has nothing to do.
    """
    if gc.get_freeze_count():  # the program has its own way, or a block around this one
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
