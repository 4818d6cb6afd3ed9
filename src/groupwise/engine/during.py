"""What holds while tokens are drawn."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout inside the block; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


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
