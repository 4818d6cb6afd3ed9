from __future__ import annotations

import threading

import pytest

from groupwise.tracking.run_files import MOST_WAITING, BackgroundWriter


def test_everything_is_written_in_order() -> None:
    behind = BackgroundWriter()
    written: list[int] = []
    for number in range(10):
        behind.submit(written.append, number)
    behind.flush()
    assert written == list(range(10))
    behind.close()
    behind.close()


def test_a_failure_is_raised_by_the_next_flush_and_the_rest_is_written() -> None:
    behind = BackgroundWriter()
    written: list[int] = []

    def full_disk() -> None:
        raise OSError("disk full")

    behind.submit(full_disk)
    with pytest.raises(OSError, match="disk full"):
        behind.flush()
    behind.submit(written.append, 1)
    behind.submit(full_disk)
    with pytest.raises(OSError, match="disk full"):
        behind.close()
    assert written == [1]


def test_a_slow_disk_holds_the_run_up_rather_than_filling_the_memory() -> None:
    behind = BackgroundWriter()
    may_write = threading.Event()
    handed_over: list[int] = []

    def run() -> None:
        for number in range(MOST_WAITING + 1):
            behind.submit(may_write.wait)
            handed_over.append(number)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(0.2)
    assert len(handed_over) == MOST_WAITING
    may_write.set()
    thread.join(10)
    assert len(handed_over) == MOST_WAITING + 1
    behind.close()
