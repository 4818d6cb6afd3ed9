"""Our kernels under CUDA's compute-sanitizer: accesses out of bounds, and races in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SANITIZER = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
KERNELS = (
    "(idle_rows or keys_are_stored or soft_caps or residual_sum or gated or rotated or own_adapter"
    " or at_an_end_token or two_attentions or swiglu or rotary or excludes or log_probabilities_and)"
    " and not dtype0 and not dtype1 and not 151936 and not 49153"
)
"""Tests that launch each kernel once or a few times: one precision and small logits, as the tool is slow."""
OWN_PROCESS = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}


@pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer, which comes with the CUDA toolkit")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_kernels_pass_the_sanitizer(tool: str):
    assert SANITIZER is not None
    names = ("decode_attention", "generation_kernels", "training_kernels", "token_masks")
    done = subprocess.run(
        [
            *(SANITIZER, "--tool", tool, "--error-exitcode", "86", "--print-limit", "3"),
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", KERNELS),
            *(f"tests/gpu/test_{name}_gpu.py" for name in names),
        ],
        cwd=ROOT,
        # Without torch's cache every tensor is an allocation of its own, and an access beyond it shows.
        env={**OWN_PROCESS, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
