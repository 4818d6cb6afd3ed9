"""Where kernels of our own can run."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor


def has_kernels(x: Tensor) -> bool:
    """Whether Triton can work on this tensor."""
    return x.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
