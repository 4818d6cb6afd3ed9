"""A time limit for code that may hang."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeLimitReached(BaseException):
    """The block ran out of time. Not an `Exception`, so that the code it interrupts does not swallow it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeLimitReached` in a block of Python code that runs longer than this.

    An alarm signal does it, so there is no limit outside the main thread or on a platform without
    alarms, nor can a single call into C be interrupted before it returns. Limits nest: the earlier
    deadline wins, and an alarm that was set before goes off when it should.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    armed = True

    def expire(number: int, frame: FrameType | None) -> None:
        if armed:
            raise TimeLimitReached

    outer, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    started = time.monotonic()
    previous = signal.signal(signal.SIGALRM, expire)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, min(seconds, outer) if outer else seconds)
            yield
        finally:
            # The alarm may go off between here and the next line; it does so only once, and the
            # outer `finally` restores what was there either way.
            armed = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if outer:
            remaining = outer - (time.monotonic() - started)
            signal.setitimer(signal.ITIMER_REAL, max(remaining, 1e-6), interval)
