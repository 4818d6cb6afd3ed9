"""Prefetching: with `rollout.overlap`, a thread collects the next batch while this one trains.

The prefetched batch is sampled with the weights from before the current update, so it is one update
off-policy. `algo.correction` weighs its tokens by the ratio of the two policies, and `algo.max_stale_gap`
bounds how far they may differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from groupwise.training.collector import Batch, Collector
from groupwise.training.prompt_selection import Rates


class BatchPrefetcher:
    """Collects at most one batch at a time, in a thread that mostly waits for inference servers."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._batch: Batch | None = None
        self._error: BaseException | None = None

    def start(self, collect: Callable[[], Batch]) -> None:
        """Start collecting a batch. The previous one must have been taken."""
        assert self._thread is None, "the previous batch has not been taken"

        def work() -> None:
            try:
                self._batch = collect()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the batch is complete. Servers may then receive new weights."""
        if self._thread is not None:
            self._thread.join()

    def take(self) -> Batch | None:
        """Return the prefetched batch, or None if none was started. Raise the error of the thread, if any."""
        if self._thread is None:
            return None
        self.wait()
        self._thread = None
        batch, error = self._batch, self._error
        self._batch = self._error = None
        if error is not None:
            raise error
        return batch


class CollectBatch(Protocol):
    """Runs stages 1 to 4: see `training.loop.collect_batch`."""

    def __call__(self, collector: Collector, step: int, *, cursor: int, rates: Rates) -> Batch: ...
