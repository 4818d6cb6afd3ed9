"""A run says when others take the cores that its threads need."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from groupwise.model.device import CPUUsage, contention_notice, our_cores, used

BEFORE = CPUUsage(clock=100.0, everyone=50.0, own=10.0)


@pytest.mark.parametrize(
    ("everyone", "own", "threads", "cores", "advice"),
    [
        (6.0, 2.0, 2, 2, "use 1.0 of 2 cores, and 2 threads .* OMP_NUM_THREADS=1 "),
        (14.0, 2.0, 8, 8, "use 3.0 of 8 cores, and 8 threads .* OMP_NUM_THREADS=5 "),
        (10.0, 2.0, 2, 2, "OMP_NUM_THREADS=1 "),  # both are taken: one thread is the least
        (3.0, 2.0, 2, 2, None),  # a quarter of a core
        (14.0, 2.0, 4, 8, None),  # there are enough for all
        (6.0, 2.0, 1, 2, None),
        (10.0, 2.0, 1, 2, None),  # no fewer than one
    ],
)
def test_others_are_mentioned_when_too_few_cores_are_left(everyone, own, threads, cores, advice):
    after = CPUUsage(clock=104.0, everyone=BEFORE.everyone + everyone, own=BEFORE.own + own)
    notice = contention_notice(BEFORE, after, threads=threads, cores=cores)
    if advice is None:
        assert notice is None
    else:
        assert notice is not None
        assert re.search(advice, notice)


def test_a_moment_is_too_short_to_tell():
    after = CPUUsage(clock=100.5, everyone=BEFORE.everyone + 1.0, own=BEFORE.own)
    assert contention_notice(BEFORE, after, threads=2, cores=2) is None


def test_a_system_that_does_not_tell_is_believed_to_be_idle(tmp_path: Path):
    assert used(tmp_path, cores=frozenset({0}), pid=1) is None
    (tmp_path / "stat").write_text("cpu0 none of it\n")
    assert used(tmp_path, cores=frozenset({0}), pid=1) is None
    assert contention_notice(None, None, threads=2, cores=2) is None


def planted(proc: Path, pid: int, *, name: str, parent: int, user: int, system: int) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(
        f"{pid} ({name}) S {parent} 0 0 0 0 0 0 0 0 0 {user} {system} 0 0 20"
    )


def test_only_our_cores_count_and_children_are_no_others(tmp_path: Path):
    #          user nice system idle waiting, interrupts: hard, soft; then stolen
    lines = ["cpu  9 9 9 9 9 9 9 9", "cpu0 1000 200 300 90000 5000 10 90 7", "cpu1 50 0 50 1 1 0 0 0"]
    (tmp_path / "stat").write_text("\n".join([*lines, "cpu2 7000 0 0 0 0 0 0 0", "intr 5 5"]))
    planted(tmp_path, 7, name="python", parent=1, user=100, system=20)
    planted(tmp_path, 8, name="worker (of) 7", parent=7, user=30, system=3)
    planted(tmp_path, 9, name="its own", parent=8, user=4, system=0)
    planted(tmp_path, 10, name="a stranger", parent=1, user=999, system=0)
    found = used(tmp_path, cores=frozenset({0, 1}), pid=7)
    assert found is not None
    second = os.sysconf("SC_CLK_TCK")
    assert found.everyone == pytest.approx((1600 + 100) / second)
    assert found.own == pytest.approx((120 + 33 + 4) / second)


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="only Linux tells")
def test_this_machine_tells():
    found = used(cores=our_cores(), pid=os.getpid())
    assert found is not None
    assert found.everyone > 0
    assert found.own > 0
