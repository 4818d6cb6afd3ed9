"""What the tests for a GPU share: error measures, a busy device, and repetition that looks for races."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

DEVICE = torch.device(os.environ.get("GROUPWISE_TEST_DEVICE", "cuda"))
"""`cpu` runs the kernel tests in Triton's interpreter: slow, but enough to write them without a GPU."""
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
if DEVICE.type == "cpu":
    DTYPES = [torch.float32]  # the interpreter truncates bfloat16 where a GPU rounds
HALF = DTYPES[-1]
"""The precision that models are trained in."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Relative error that rounding of the inputs and of the output may cause."""
REPETITIONS = 200 if DEVICE.type == "cuda" else 2


def relative(got: Tensor, expected: Tensor) -> float:
    """Return ‖got − expected‖ / ‖expected‖; NaN if anything is NaN."""
    difference = (got.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == expected.shape
    assert relative(got, expected) < TOLERANCE[dtype]
    # A norm over everything hides one wrong row.
    if got.dim() > 1:
        error = (got.double() - expected.double()).flatten(1).norm(dim=1)
        size = expected.double().flatten(1).norm(dim=1).clamp_min(1e-3 * float(expected.double().abs().max()))
        assert float((error / size).max()) < 4 * TOLERANCE[dtype]


@contextmanager
def busy_device() -> Iterator[None]:
    """Keep the device busy from another stream, so that blocks of a kernel start at varying times."""
    if DEVICE.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream()
    matrix = torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
    with torch.cuda.stream(stream):
        for _ in range(4000):
            torch.mm(matrix, matrix)
    yield
    torch.cuda.synchronize()


def assert_repeatable(compute: Callable[[], Sequence[Tensor]]) -> None:
    """Compute the same many times, beside other work on the device; all bits must be equal.

    A race between threads, warps or kernels shows as a difference here.
    """
    first = [x.clone() for x in compute()]
    differs = torch.zeros((), dtype=torch.int64, device=DEVICE)
    with busy_device():
        for _ in range(REPETITIONS):
            for one, other in zip(first, compute(), strict=True):
                differs += (_bits(one) != _bits(other)).any()
    assert int(differs) == 0, f"{int(differs)} of {REPETITIONS} repetitions differ"


def _bits(x: Tensor) -> Tensor:
    """View as integers, so that NaN equals NaN and 0 differs from -0."""
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    return x.contiguous().view(kinds[x.element_size()])
