"""Which device a model is on."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.errors import ConfigError


def device_of(name: str | None) -> torch.device:
    """The device of that name, or the GPU when there is one; refuses one that is not there."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        here = f"GPUs are numbered from 0 to {count - 1} here" if count else "torch sees no GPU here"
        raise ConfigError(f"model.device={name}: {here}")
    return device


def has_kernels(x: Tensor) -> bool:
    """Whether Triton can work on this tensor."""
    return x.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor there.

    A copy from memory that may be swapped out makes the host wait until the GPU has done all it was given;
    from pinned memory it takes its place behind that, and the host can give it more.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


TILE = 4096
"""About how many tokens at a time have a layer's inner width where it keeps nothing: enough for a GPU."""


def total_memory(device: torch.device) -> int:
    """Bytes that this process may hold on a device, all of them: what torch was limited to, if it was."""
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        share = torch.cuda.memory.get_per_process_memory_fraction(number)
        return int(share * torch.cuda.get_device_properties(number).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory(device: torch.device) -> int:
    """Bytes that could be taken on a device now."""
    if device.type == "cuda":
        held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        return min(torch.cuda.mem_get_info(device)[0] + held, total_memory(device)) - used
    return _available()


def _available() -> int:
    """Main memory that is free, or that the system would free for the asking, where it tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def return_freed_memory() -> None:
    """Give the system back what was freed in the heap, where the C library can: it keeps it else."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def kept_numbers(width: int, inner: int, layers: int, *, recomputed: bool) -> int:
    """About how many numbers of a token a forward pass keeps for the backward pass, at most.

    A layer keeps some ten vectors of its width and some four of its inner width; with gradient
    checkpointing, one vector, and the rest of one layer at a time.
    """
    layer = 10 * width + 4 * inner
    return layer + layers * width if recomputed else layers * layer


def tile_count(tokens: int) -> int:
    """In how many tiles some tokens come. Example: 5120 -> 1, where two would cost time; 8192 -> 2"""
    return max(1, round(tokens / TILE))
