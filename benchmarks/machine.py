"""What every benchmark says of the machine it ran on, and how it writes tables."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Sequence
from pathlib import Path


def machine(*, threads: int, torch: str) -> str:
    """One line: processor, cores, load before the benchmark, versions."""
    load = os.getloadavg()[0]
    return (
        f"{processor()} · {os.cpu_count()} cores · load {load:.1f} before the start · "
        f"Python {platform.python_version()} · torch {torch} · {threads} threads"
    )


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def peak_rss() -> float:
    """The most memory this process has held, in GB.

    On Linux read from /proc: `getrusage` also counts what the parent held at the moment of the fork.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first to the left, numbers to the right."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    rule = ["-" * width if column == 0 else "-" * (width - 1) + ":" for column, width in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    return "\n".join([line(table[0]), line(rule), *(line(row) for row in table[1:])])


def held(device: str) -> float:
    """The most memory held, in GB: of the GPU since it was last reset, or of the process."""
    if device != "cuda":
        return peak_rss()
    import torch

    return torch.cuda.max_memory_allocated() / 1e9


def settle(device: str) -> None:
    """Wait until the device has done what it was asked."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
