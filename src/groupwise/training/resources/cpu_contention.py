"""CPU contention: the threads of a matrix product wait for each other, and so for other busy processes.

On two cores, with one other process busy, two threads draw a third of what one thread alone draws. The number
of threads is not changed here: sums of floats depend on it, and a run is to be repeatable.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
WORTH_SAYING = 0.5
"""Number of cores used by other processes."""
SECONDS = 1.0
"""Minimum measuring time, because short bursts do not matter."""


class CPUUsage(NamedTuple):
    """Seconds since boot: wall clock, CPU time of our cores, CPU time of this process and its children."""

    clock: float
    everyone: float
    own: float


class CPUContention:
    """Measures the CPU time of other processes from its creation on."""

    def __init__(self, *, threads: int) -> None:
        self._threads, self._cores = threads, our_cores()
        self._before = self._used()

    def _used(self) -> CPUUsage | None:
        return used(cores=self._cores, pid=os.getpid())

    def notice(self) -> str | None:
        return crowd_notice(self._before, self._used(), threads=self._threads, cores=len(self._cores))


def our_cores() -> frozenset[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def used(proc: Path = PROC, *, cores: frozenset[int], pid: int) -> CPUUsage | None:
    """Read the CPU time used so far; None if the system does not report it."""
    try:
        ticks = 0
        for line in (proc / "stat").read_text().splitlines():
            name, *fields = line.split()
            if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in cores:
                user, nice, system, _idle, _waiting, *interrupts = map(int, fields[:7])
                ticks += user + nice + system + sum(interrupts)
        own = ticks_of_family(proc, pid)
    except (OSError, ValueError):
        return None
    second = os.sysconf("SC_CLK_TCK")
    return CPUUsage(time.monotonic(), ticks / second, own / second)


def ticks_of_family(proc: Path, pid: int) -> int:
    """Return the CPU time of a process and its descendants."""
    ticks, children = {}, dict[int, list[int]]()
    for stat in proc.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # after the name
        except OSError:
            continue  # the process has ended
        number, parent = int(stat.parent.name), int(fields[1])
        ticks[number] = int(fields[11]) + int(fields[12])
        children.setdefault(parent, []).append(number)
    family = [pid]
    for member in family:
        family += children.get(member, [])
    return sum(ticks.get(member, 0) for member in family)


def crowd_notice(before: CPUUsage | None, after: CPUUsage | None, *, threads: int, cores: int) -> str | None:
    """Return a notice if other processes leave too few cores for these threads."""
    if before is None or after is None or after.clock < before.clock + SECONDS:
        return None
    everyone, own = after.everyone - before.everyone, after.own - before.own
    others = (everyone - own) / (after.clock - before.clock)
    fewer = max(1, round(cores - others))
    if others < WORTH_SAYING or threads + others < cores + WORTH_SAYING or fewer >= threads:
        return None
    return (
        f"other processes keep {others:.1f} of {cores} cores busy, and {threads} threads wait for them again "
        f"and again: until they end, OMP_NUM_THREADS={fewer} is faster"
    )
