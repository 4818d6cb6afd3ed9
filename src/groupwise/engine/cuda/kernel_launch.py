"""How kernels are launched, and how one starts before the one before it has ended.

Between two kernels a GPU idles for a microsecond or two, and a decoding step has some 300 of them. From
compute capability 9.0 on, a kernel launched `early` starts when every program of the kernel before it has
called `let_next_start` or has ended, and reads what that one writes only after `wait_for_previous`. Every
kernel that is launched early waits, so that all earlier ones have ended too when it has.
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
    """The power of two, and no less than a matrix unit takes, that holds `size`."""
    return max(least, int(triton.next_power_of_2(size)))
