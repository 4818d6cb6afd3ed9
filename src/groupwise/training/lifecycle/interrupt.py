"""Ctrl-C and SIGTERM, gently: the step in hand is finished and saved; a second one stops at once."""

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
    """While active, the first SIGINT or SIGTERM is held back and sets `asked`; a second one stops at once.

    A third takes the system's own effect: code that swallows exceptions cannot swallow that.
    The signal that was held back takes its usual effect on leaving, so that whoever called sees the
    run as interrupted: a KeyboardInterrupt, or the end of the process.
    """

    def __init__(self, say: Callable[[str], None], *, launched: bool = False) -> None:
        self.held_back: int | None = None
        self._echoes = 1 if launched else 0
        """A launcher passes on what the terminal has told its processes already."""
        self._say = say
        self._before: dict[int, object] = {}

    @property
    def asked(self) -> bool:
        return self.held_back is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            if self._echoes:
                self._echoes -= 1
                return
            signal.signal(number, signal.SIG_DFL)
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            signal.raise_signal(number)
        self.held_back = number
        with suppress(RuntimeError):  # the signal came in the middle of printing another line
            self._say("stopping after this step and saving; Ctrl-C again stops now and loses it")

    def end_hanging_step(self) -> None:
        """Let the signal that was held back take effect now: a call hangs, and others may follow it."""
        if self.held_back is not None and threading.current_thread() is threading.main_thread():
            signal.signal(
                self.held_back,
                signal.default_int_handler if self.held_back == signal.SIGINT else signal.SIG_DFL,
            )
            signal.raise_signal(self.held_back)

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # elsewhere signals cannot be caught
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self.held_back is not None and error is None:
            signal.raise_signal(self.held_back)


FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))
"""What the system calls it. Libraries quote that in errors of many kinds, with and without its number."""


@contextmanager
def explain_full_disk(folder: RunFolder, config: Config) -> Iterator[None]:
    """Say in a sentence that nothing more fits into the run's folder, and how to go on."""
    try:
        yield
    except RemoteRankError:
        raise  # the leader of the processes says it
    except Exception as error:
        reason = next((words for words in FULL if words in str(error)), None)
        if reason is None:
            raise
        resume = command(command_of(config), "--resume", folder.path)
        then = f"then {resume} goes on" if folder.config.exists() else "and start again"
        raise CheckpointError(f"cannot write {folder.path}: {reason}; make room, {then}") from error
