"""The next step's batch, drawn while this step trains: one update off-policy, and never more."""

from __future__ import annotations

import threading
from collections.abc import Callable

from groupwise.training.batch import Batch


class Ahead:
    """At most one batch under way, in a thread that mostly waits for servers."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._batch: Batch | None = None
        self._error: BaseException | None = None

    def start(self, draw: Callable[[], Batch]) -> None:
        """Begin to draw a batch; the one before must have been taken."""
        assert self._thread is None, "a batch is still under way"

        def work() -> None:
            try:
                self._batch = draw()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being drawn any more: servers may then get other weights."""
        if self._thread is not None:
            self._thread.join()

    def take(self) -> Batch | None:
        """Return the batch that was started, or raise what went wrong there; None: none was started."""
        if self._thread is None:
            return None
        self.wait()
        self._thread = None
        batch, error = self._batch, self._error
        self._batch = self._error = None
        if error is not None:
            raise error
        return batch
