"""Writing files behind the run's back: in order, on a thread of its own, nothing lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

MOST_WAITING = 2
"""Writes that may wait: a slow disk holds the run up rather than filling the memory."""


class WriteBehind:
    """Does what it is given, one after the other; a failure is raised at the next call."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="groupwise-writer")
        self._waiting: deque[Future[None]] = deque()

    def submit(self, write: Callable[..., None], *values: Any, **named: Any) -> None:
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= MOST_WAITING):
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(write, *values, **named))

    def flush(self) -> None:
        """Wait until everything is written."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """Write what is left and end; more than once does no harm."""
        try:
            self.flush()
        finally:
            self._thread.shutdown(wait=True)
