"""Time limits for user code in this process: an alarm signal, and a watchdog for code that ignores it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from groupwise.tracking.run_folder import LOGGER

REPEAT_SECONDS = 1.0
"""Interval at which a block that ignores its limit is interrupted again."""
GRACE_SECONDS = 30.0
"""How long past its limit a block may run before the process is stopped."""
STOPPED = 3
"""Exit code of a process that the watchdog stops."""


class TimeLimitReached(BaseException):
    """The block exceeded its time limit. A BaseException, so that `except Exception` does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeLimitReached` in a block of Python code that runs longer than `seconds`."""
    with TimeLimits(seconds) as limit, limit:
        yield


class TimeLimits:
    """One limit for many consecutive blocks: installs the signal handler once for all of them.

        with TimeLimits(seconds) as limit:
            for item in items:
                with limit:
                    …

    An alarm signal interrupts a block. The limit therefore has no effect outside the main thread or on
    platforms without alarms, and cannot interrupt a single call into C. A block can catch and ignore the
    interrupt: see `Watched`, and `worker` for processes that can be killed. Limits nest: the earliest
    deadline wins, and an alarm that was set before still fires on time.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> TimeLimit:
        self.possible = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
        self.limit = TimeLimit(self.seconds, possible=self.possible)
        if self.possible:
            outer, self.interval = signal.setitimer(signal.ITIMER_REAL, 0)
            self.limit.outer = time.monotonic() + outer if outer else None
            self.previous = signal.signal(signal.SIGALRM, self.limit.expire)
            around = getattr(self.previous, "__self__", None)
            if isinstance(around, TimeLimit):  # its pending alarm may belong to an earlier block
                self.limit.outer = around.due if around.armed else None
        return self.limit

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.possible:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self.previous)
            if self.limit.outer is not None:
                remaining = self.limit.outer - time.monotonic()
                signal.setitimer(signal.ITIMER_REAL, max(remaining, 1e-6), self.interval)


class TimeLimit:
    """Limits one block at a time; use it as a context manager.

    Setting an alarm takes longer than most blocks, so many blocks share one. If the alarm fires before the
    deadline of the current block, it is set again for that deadline. It never fires late, because deadlines
    only increase.
    """

    def __init__(self, seconds: float, *, possible: bool) -> None:
        self.seconds = seconds
        self.possible = possible
        self.armed = False
        self.due = 0.0
        """Deadline of the current block."""
        self.outer: float | None = None
        """When an alarm that was set before fires."""
        self._alarm_set = False
        self._expired = False

    def expire(self, number: int, frame: FrameType | None) -> None:
        self._alarm_set = False
        if not self.armed:
            return
        left = self.due - time.monotonic()
        if left <= 0:
            self._expired = True
            self._set_alarm(REPEAT_SECONDS)  # the block may catch this exception
            raise TimeLimitReached
        self._set_alarm(left)

    def _set_alarm(self, seconds: float) -> None:
        self._alarm_set = True
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))

    def _is_lost(self) -> bool:
        """Whether a block replaced our alarm by its own, as some libraries do."""
        return self._alarm_set and not signal.getitimer(signal.ITIMER_REAL)[0]

    def __enter__(self) -> None:
        if self.possible:
            now = time.monotonic()
            self.due = now + self.seconds if self.outer is None else min(now + self.seconds, self.outer)
            self.armed = True
            if self._is_lost():
                signal.signal(signal.SIGALRM, self.expire)
                self._alarm_set = False
            if not self._alarm_set:
                self._set_alarm(self.due - now)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The alarm may fire before this assignment: the block is left either way.
        self.armed = False
        if self._expired:  # cancel the repeated alarm, so that it does not hit the next block
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._alarm_set = self._expired = False


class Watched:
    """A limit that a block cannot ignore: running `GRACE_SECONDS` past it stops the process.

    For user code that must run in this process, where nothing else can interrupt it.
    """

    def __init__(self, limit: TimeLimit, what: str) -> None:
        self.limit, self.what = limit, what

    def __enter__(self) -> None:
        if self.limit.possible:
            watchdog.begin(self.what, self.limit.seconds)
        self.limit.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.limit.__exit__(kind, error, trace)
        if self.limit.possible:
            watchdog.end()


AnyLimit = TimeLimit | Watched


class Watchdog:
    """A thread that checks twice a second whether the main thread's block is far past its limit."""

    def __init__(self) -> None:
        self.process = 0
        """Id of the process that started the thread: a forked process has none."""
        self.block: tuple[str, float, float] | None = None
        """Description of the current block, its limit, and when to stop the process."""

    def begin(self, what: str, seconds: float) -> None:
        self.block = (what, seconds, time.monotonic() + seconds + GRACE_SECONDS)
        if self.process != os.getpid():
            self.process = os.getpid()
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def end(self) -> None:
        self.block = None

    def _watch(self) -> None:
        while True:
            time.sleep(0.5)
            block = self.block
            if block is not None and time.monotonic() > block[2]:
                stop_process(*block[:2])


def stop_process(what: str, seconds: float) -> None:
    """Log an error and exit: the block would catch any exception."""
    message = (
        f"{what} ran more than {GRACE_SECONDS:g} s past its time limit of {seconds:g} s and cannot be "
        "interrupted, so the run stops. Fix the function and resume from the last checkpoint"
    )
    LOGGER.error(message)
    with suppress(OSError, ValueError):
        os.write(2, f"error: {message}\n".encode(errors="replace"))
    os._exit(STOPPED)


watchdog = Watchdog()


def is_ours(function: Callable[..., Any]) -> bool:
    """Whether a function belongs to this package. Such functions are bounded and need no watchdog.

    An adapter of this package that calls another one has an attribute `third_party`.
    """
    inner = getattr(function, "func", function)  # unwrap functools.partial
    if getattr(inner, "third_party", False):
        return False
    home = getattr(inner, "__module__", None) or type(inner).__module__
    return home.partition(".")[0] == "groupwise"
