"""Kernel launches with programmatic dependent launch (PDL), and sizes padded to powers of two.

A GPU idles for 1-2 µs between two kernels, and a decode step has about 300. From compute capability 9.0 on, a
kernel launched `early` starts once every program of the previous kernel has called `let_next_start` or ended.
It must call `wait_for_previous` before it reads what that kernel writes. Every early kernel waits, so when it
ends, all earlier kernels have ended too.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

EARLY = tl.constexpr(
    torch.version.cuda is not None
    and torch.cuda.is_available()
    and not triton.knobs.runtime.interpret
    and all(torch.cuda.get_device_capability(n) >= (9, 0) for n in range(torch.cuda.device_count()))
)


@triton.jit
def wait_for_previous():
    if EARLY:
        gdc_wait()


@triton.jit
def let_next_start():
    if EARLY:
        gdc_launch_dependents()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, early: bool = False, **options: Any) -> None:
    if early and EARLY.value:
        options["launch_pdl"] = True
    kernel[grid](*args, **options)


def padded(size: int, *, least: int = 16) -> int:
    """Return the next power of two from `size` on, at least `least`: `tl.dot` needs 16."""
    return max(least, int(triton.next_power_of_2(size)))
