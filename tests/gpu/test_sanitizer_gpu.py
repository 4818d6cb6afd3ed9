"""Our kernels under CUDA's compute-sanitizer: accesses out of bounds, and races in shared memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SANITIZER = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
FOUND = 86
"""Exit code of the sanitizer when it found something."""
KERNELS = (
    "(idle_rows or keys_are_stored or soft_caps or residual_sum or gated_activation or rotated_and_stored"
    " or own_adapter or sequences_begin or a_step_opens or penalties_on or at_an_end_token or two_attentions"
    " or swiglu_and_its or rotary_embeddings or excludes or log_probabilities_and or plain_memory"
    " or rows_in_fp8 or stored_in_fp8 or values_in_fp8)"
    " and not dtype0 and not dtype1 and not 151936 and not 49153 and not 49159"
)
"""Tests that launch every kernel once or a few times: one precision and small logits, as the tool is slow."""
LIMIT = 300
"""Seconds for one run of the sanitizer; the limit of the test is longer, so that this one ends it."""
OURS = sorted(
    name
    for module in (ROOT / "src").rglob("*.py")
    for name in re.findall(r"@triton\.jit.*\ndef (\w+)", module.read_text(encoding="utf-8"))
)
"""Names of our kernels. The tool skips the kernels of torch, which take most of its time otherwise."""
FAULTY = """
import torch
import triton
import triton.language as tl

@triton.jit
def write_beyond(out, count: tl.constexpr):
    tl.store(out + tl.arange(0, count) + 4096, 1.0)

write_beyond[(1,)](torch.zeros(16, device="cuda"), count=16)
torch.cuda.synchronize()
"""

pytestmark = [
    pytest.mark.skipif(
        SANITIZER is None, reason="needs compute-sanitizer, which comes with the CUDA toolkit"
    ),
    pytest.mark.timeout(LIMIT + 60),
]


def sanitized(
    tool: str, kernels: Sequence[str], *python: str, place: int
) -> subprocess.CompletedProcess[str]:
    """Run a Python program under a tool of the sanitizer, which watches the kernels of these names.

    The tool waits ten seconds for a program to use the device, and a program whose tool has given up hangs.
    Beside other tests the imports take longer, so it waits without limit. `place`: the number of this run
    among those that go on together, for ports of its own.
    """
    assert SANITIZER is not None
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(
        [
            *(SANITIZER, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "3"),
            *("--port", str(49152 + 16 * place), "--max-connections", "10"),
            *("--target-processes", "application-only", "--launch-timeout", "0"),
            *(f"--kernel-name=kernel_name={name}" for name in kernels),
            *(sys.executable, *python),
        ],
        cwd=ROOT,
        # Without torch's cache every tensor is an allocation of its own, and an access beyond it shows.
        env={**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )


TOOLS = ("memcheck", "racecheck")
MODULES = ("decode_attention", "generation_kernels", "training_kernels", "token_masks", "speculation")


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("module", MODULES)
def test_kernels_pass_the_sanitizer(module: str, tool: str):
    if module == "token_masks":
        pytest.importorskip("llguidance")
    options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:benchmark", "--timeout", "0", "-k", KERNELS)
    tests = f"tests/gpu/test_{module}_gpu.py"
    place = 1 + MODULES.index(module) * len(TOOLS) + TOOLS.index(tool)
    done = sanitized(tool, OURS, "-m", "pytest", *options, tests, place=place)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert re.search(r"\d+ passed", done.stdout), "no test ran"


def test_the_sanitizer_finds_a_kernel_that_writes_beyond_its_tensor(tmp_path: Path):
    program = tmp_path / "faulty.py"
    program.write_text(FAULTY, encoding="utf-8")
    watched = sanitized("memcheck", ["write_beyond"], str(program), place=0)
    assert watched.returncode == FOUND, watched.stdout + watched.stderr
    assert "write_beyond" in watched.stdout
