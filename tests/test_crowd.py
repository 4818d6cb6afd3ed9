"""A run says when others take the cores that its threads need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from groupwise.training.crowd import Used, crowd_notice, used

BEFORE = Used(clock=100.0, everyone=50.0, own=10.0)


@pytest.mark.parametrize(
    ("everyone", "own", "threads", "cores", "advice"),
    [
        (6.0, 2.0, 2, 2, "keep 1.0 of 2 cores busy, and 2 threads .* OMP_NUM_THREADS=1 "),
        (14.0, 2.0, 8, 8, "keep 3.0 of 8 cores busy, and 8 threads .* OMP_NUM_THREADS=5 "),
        (10.0, 2.0, 2, 2, "OMP_NUM_THREADS=1 "),  # both are taken: one thread is the least
        (3.0, 2.0, 2, 2, None),  # a quarter of a core
        (14.0, 2.0, 4, 8, None),  # there are enough for all
        (6.0, 2.0, 1, 2, None),
        (10.0, 2.0, 1, 2, None),  # no fewer than one
    ],
)
def test_others_are_mentioned_when_too_few_cores_are_left(everyone, own, threads, cores, advice):
    after = Used(clock=104.0, everyone=BEFORE.everyone + everyone, own=BEFORE.own + own)
    notice = crowd_notice(BEFORE, after, threads=threads, cores=cores)
    if advice is None:
        assert notice is None
    else:
        assert notice is not None
        assert re.search(advice, notice)


def test_a_system_that_does_not_tell_is_not_asked_again(tmp_path: Path):
    assert used(tmp_path / "stat") is None
    (tmp_path / "stat").write_text("cpu  none of it\n")
    assert used(tmp_path / "stat") is None
    assert crowd_notice(None, None, threads=2, cores=2) is None


def test_waiting_and_idle_cores_are_not_in_use(tmp_path: Path):
    stat = tmp_path / "stat"
    #                      user nice system idle waiting interrupts: hard, soft; then stolen
    stat.write_text("cpu  1000 200 300 90000 5000 10 90 7 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    found = used(stat)
    assert found is not None
    assert found.everyone == pytest.approx(16.0)  # at 100 a second
    assert found.own > 0
