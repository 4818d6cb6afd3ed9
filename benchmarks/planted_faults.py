"""Does the GPU suite catch faults? Plants each fault in a copy of the source and runs its tests.

    python benchmarks/planted_faults.py                # a minute on one GPU
    python benchmarks/planted_faults.py --list

The first fault is one that the project once had: a kernel that overwrote what its other warps still read. It
gave wrong log-probabilities in training on a GPU, and an interpreter, which runs one program after the other,
cannot show it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from machine import markdown

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Fault:
    """A change of one place in the source, and the tests that must notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    select: str


FAULTS = (
    Fault(
        "merged log-sum-exp written where warps read it",
        "model/ops/triton_kernels.py",
        "tl.store(MERGED_LSE + token * HEADS + heads, merged_lse, mask=head_live)",
        "tl.store(MERGED_LSE + token * HEADS + heads, merged_lse, mask=head_live)\n"
        "    tl.store(LSE + token * lse_token + heads * lse_head, merged_lse, mask=head_live)",
        "test_training_kernels_gpu.py",
        "merge",
    ),
    Fault(
        "decode attention reads one key too many",
        "engine/cuda/attention_kernels.py",
        "live = at < end",
        "live = at <= end",
        "test_decode_attention_gpu.py",
        "every_length",
    ),
    Fault(
        "attention does not wait for the kernel that reads prompts",
        "engine/cuda/attention_kernels.py",
        "    wait_for_previous()\n    if WHOLE:",
        "    if WHOLE:",
        "test_decode_attention_gpu.py",
        "same_bits",
    ),
    Fault(
        "keys stored under the wrong head",
        "engine/cuda/fused_layers.py",
        "to = KEYS + (place * KEY_HEADS + heads[:, None] - HEADS) * SIZE + low[None, :]",
        "to = KEYS + (place * KEY_HEADS + (heads[:, None] - HEADS) // 2 * 2) * SIZE + low[None, :]",
        "test_generation_kernels_gpu.py",
        "rotated",
    ),
    Fault(
        "graphs survive weights that move",
        "engine/cuda/graph_runner.py",
        "if addresses != self._addresses:",
        "if not self._addresses:",
        "test_engine_gpu.py",
        "follow",
    ),
    Fault(
        "a deterministic run uses any kernel",
        "model/device.py",
        "torch.use_deterministic_algorithms(True)",
        "torch.use_deterministic_algorithms(False)",
        "test_update_gpu.py",
        "deterministic",
    ),
)


def outcome(fault: Fault) -> tuple[str, str]:
    """Return whether the suite catches this fault, and its last line."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("src", "tests", "benchmarks"):
            shutil.copytree(ROOT / name, copy / name)
        shutil.copy(ROOT / "pyproject.toml", copy)
        file = copy / "src" / "groupwise" / fault.file
        text = file.read_text(encoding="utf-8")
        assert text.count(fault.old) >= 1, f"{fault.file} does not contain the place of '{fault.name}'"
        file.write_text(text.replace(fault.old, fault.new, 1), encoding="utf-8")
        inherited = os.environ.get("PYTHONPATH", "")
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider"),
                *(f"tests/gpu/{fault.tests}", "-k", fault.select),
            ],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": f"{copy / 'src'}:{inherited}", "TRITON_INTERPRET": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in ended.stdout.splitlines() if line.strip()]
        last = lines[-1] if lines else ""
        match ended.returncode:
            case 0:
                return "missed", last
            case 1:
                return "caught", last
            case code:
                return f"did not run (exit code {code})", (ended.stderr.strip() or last)[-200:]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the faults and stop")
    options = parser.parse_args()
    if options.list:
        print("\n".join(fault.name for fault in FAULTS))
        return
    with ThreadPoolExecutor(max_workers=3) as pool:
        results = list(pool.map(outcome, FAULTS))
    rows = [[fault.name, *result] for fault, result in zip(FAULTS, results, strict=True)]
    print(markdown(("fault", "suite", "last line"), rows))
    sys.exit(0 if all(verdict == "caught" for verdict, _ in results) else 1)


if __name__ == "__main__":
    main()
