"""Others on the same cores: threads of a product wait for each other, and so for whoever runs in between.

On two cores, with one other process busy, two threads draw a third of what one thread alone draws. The number
of threads is not changed here: sums of floats depend on it, and a run is to be repeatable.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
WORTH_SAYING = 0.5
"""Cores that others keep busy."""


class Used(NamedTuple):
    """Seconds since the machine started: of the clock, of all cores, and of this process."""

    clock: float
    everyone: float
    own: float


def used(stat: Path = STAT) -> Used | None:
    """Read what was used so far; None where the system does not tell."""
    try:
        user, nice, system, _idle, _waiting, *interrupts = map(int, stat.read_text().split()[1:8])
    except (OSError, ValueError):
        return None
    ticks = user + nice + system + sum(interrupts)
    own = os.times()
    return Used(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own.user + own.system)


def crowd_notice(before: Used | None, after: Used | None, *, threads: int, cores: int) -> str | None:
    """Say so when others keep so many cores busy that too few are left for these threads."""
    if before is None or after is None or after.clock <= before.clock:
        return None
    everyone, own = after.everyone - before.everyone, after.own - before.own
    others = (everyone - own) / (after.clock - before.clock)
    if others < WORTH_SAYING or threads + others < cores + WORTH_SAYING:
        return None
    fewer = max(1, round(cores - others))
    if fewer >= threads:
        return None
    return (
        f"other processes keep {others:.1f} of {cores} cores busy, and {threads} threads wait for them again "
        f"and again: until they end, OMP_NUM_THREADS={fewer} is faster"
    )
