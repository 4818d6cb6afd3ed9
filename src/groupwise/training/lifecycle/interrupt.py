"""Ctrl-C, SIGTERM and full disks. The first signal ends the run after the current step, a second at once."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

from groupwise.config import Config
from groupwise.errors import CheckpointError, RemoteRankError
from groupwise.tracking.run_folder import RunFolder
from groupwise.tracking.terminal import command
from groupwise.training.resume import command_of


class Interrupt:
    """While active, the first SIGINT or SIGTERM is deferred and sets `requested`; a second stops at once.

    A third has the system's default effect, which code that swallows exceptions cannot prevent. On exit the
    deferred signal has its usual effect, so that the caller sees an interrupted run: a KeyboardInterrupt, or
    the end of the process.
    """

    def __init__(self, say: Callable[[str], None], *, launched: bool = False) -> None:
        self.deferred: int | None = None
        self._echoes = 1 if launched else 0
        """Whether a launcher forwards signals that the terminal has sent already."""
        self._say = say
        self._before: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        return self.deferred is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if self._echoes:
                self._echoes -= 1
                return
            signal.signal(number, signal.SIG_DFL)
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            signal.raise_signal(number)
        self.deferred = number
        with suppress(RuntimeError):  # the signal arrived while another line was printed
            self._say("stopping after this step and saving; Ctrl-C again stops now and loses it")

    def end_hanging_step(self) -> None:
        """Act on the deferred signal now, because a call hangs."""
        if self.deferred is not None and threading.current_thread() is threading.main_thread():
            signal.signal(
                self.deferred,
                signal.default_int_handler if self.deferred == signal.SIGINT else signal.SIG_DFL,
            )
            signal.raise_signal(self.deferred)

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # other threads cannot catch signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self.deferred is not None and error is None:
            signal.raise_signal(self.deferred)


FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))
"""The system's error text. Libraries quote it in errors of many types, with and without its number."""


@contextmanager
def explain_full_disk(folder: RunFolder, config: Config) -> Iterator[None]:
    """Turn errors of a full disk into one sentence that says how to resume the run."""
    try:
        yield
    except RemoteRankError:
        raise  # the leader reports it
    except Exception as error:
        reason = next((words for words in FULL if words in str(error)), None)
        if reason is None:
            raise
        resume = command(command_of(config), "--resume", folder.path)
        then = f"then resume with {resume}" if folder.config.exists() else "and start again"
        raise CheckpointError(f"cannot write {folder.path}: {reason}; make room, {then}") from error
