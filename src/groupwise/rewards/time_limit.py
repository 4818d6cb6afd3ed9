"""A time limit for code that may hang."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

from groupwise.tracking.run_log import LOGGER

REPEAT_SECONDS = 1.0
"""A block that swallows its limit is interrupted again after this long."""
GRACE_SECONDS = 30.0
"""How far past its limit a block may go before it stops the run."""
STOPPED = 3
"""The exit code of a process that such a block stops."""


class TimeLimitReached(BaseException):
    """The block ran out of time. Not an `Exception`, so that the code it interrupts does not swallow it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeLimitReached` in a block of Python code that runs longer than this."""
    with TimeLimits(seconds) as limit, limit:
        yield


class TimeLimits:
    """The same limit for many blocks, one after the other: the signal handler is set once for all of them.

        with TimeLimits(seconds) as limit:
            for item in items:
                with limit:
                    …

    An alarm signal ends a block, so there is no limit outside the main thread or on a platform without
    alarms, nor can a single call into C be interrupted before it returns. A block can swallow the limit: see
    `Watched`, and `worker` for processes that can be killed. Limits nest: the earlier
    deadline wins, and an alarm that was set before goes off when it should.
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
            if isinstance(around, TimeLimit):  # its alarm may be that of an earlier block
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
    """One block at a time.

    Setting an alarm takes longer than most blocks, so one is set for many: when it goes off before the block
    under way is due, it is set again for then. It never goes off late, as no block is due before those
    that it follows.
    """

    def __init__(self, seconds: float, *, possible: bool) -> None:
        self.seconds = seconds
        self.possible = possible
        self.armed = False
        self.due = 0.0
        """When the block under way has had its time."""
        self.outer: float | None = None
        """When an alarm goes off that was set before."""
        self._alarm_set = False
        self._expired = False

    def expire(self, number: int, frame: FrameType | None) -> None:
        self._alarm_set = False
        if not self.armed:
            return
        left = self.due - time.monotonic()
        if left <= 0:
            self._expired = True
            self._set_alarm(REPEAT_SECONDS)  # the block may swallow this one
            raise TimeLimitReached
        self._set_alarm(left)

    def _set_alarm(self, seconds: float) -> None:
        self._alarm_set = True
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))

    def _is_lost(self) -> bool:
        """Whether a block has set an alarm of its own, as some libraries do, and with it taken ours away."""
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
        # The alarm may go off before this line is done: it leaves the block either way.
        self.armed = False
        if self._expired:  # the next block must not wait for the repetition
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._alarm_set = self._expired = False


class Watched:
    """A limit that cannot be swallowed: a block that goes on for `GRACE_SECONDS` past it stops the process.

    For code of the user's that has to run in this process, where nothing else can end it.
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
    """A thread that looks twice a second whether the block of the main thread is far past its limit."""

    def __init__(self) -> None:
        self.process = 0
        """In which the thread was started: a fork has none."""
        self.block: tuple[str, float, float] | None = None
        """What runs, its limit, and when the process is stopped."""

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
    """End this process with a sentence: no exception would get past the block."""
    sentence = (
        f"{what} did not end at its time limit of {seconds:g} s, nor {GRACE_SECONDS:g} s later: it swallows "
        "the limit, so the run stops. Mend the function; the last checkpoint can be resumed"
    )
    LOGGER.error(sentence)
    with suppress(OSError, ValueError):
        os.write(2, f"error: {sentence}\n".encode(errors="replace"))
    os._exit(STOPPED)


watchdog = Watchdog()
