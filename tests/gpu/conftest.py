"""Tests that need a CUDA device: `make test-gpu`. Elsewhere they are skipped.

Kernels are compared with plain torch in float32 or float64, and repeated beside other work on the device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.cuda_checks import DEVICE

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE.type == "cpu":
        import tests.support.triton_interpreter  # noqa: F401

        return
    reason = None
    if not torch.cuda.is_available():
        reason = "needs a CUDA device"
    else:
        import triton

        if triton.knobs.runtime.interpret:
            reason = "kernels are interpreted; run `make test-gpu`"
    if reason is not None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))
    # The longest tests begin at once, each on its own worker: a worker gets a contiguous share of the list.
    longest = [item for item in items if item.name.startswith("test_kernels_pass_the_sanitizer")]
    others = [item for item in items if item not in longest]
    for place, item in enumerate(longest):
        others.insert(place * len(others) // len(longest), item)
    items[:] = others


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
