"""The recorder of the processes that are not the leader: it takes everything in and says nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence

from groupwise.config import Config
from groupwise.evaluate.held_out import Evaluation
from groupwise.records import Rollout
from groupwise.tracking.display import PlainDisplay
from groupwise.tracking.summary import Summary
from groupwise.training.batch import Batch
from groupwise.training.recorder import Recorder


class SilentRecorder(Recorder):
    """Opens no file, no tracker and no terminal."""

    def __init__(self) -> None:
        self.display = PlainDisplay(sys.stdout, clock=time.monotonic)
        self.display.close()
        self.last_error = None

    def begin(self, config: Config, *, done: int) -> None: ...

    def say(self, sentence: str) -> None: ...

    def warn(self, sentence: str) -> None: ...

    def warn_at_length(self, text: str) -> None: ...

    def rollouts(self, step: int, batch: Batch) -> None: ...

    def updates(self, step: int, seen: Mapping[tuple[int, int], Sequence[float]]) -> None: ...

    def completions(self, step: int, batch: Batch, *, is_perfect: Callable[[Rollout], bool]) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluation(self, when: str, result: Evaluation) -> None: ...

    def baseline(self, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, batch: Batch) -> None: ...

    def flush(self) -> None: ...

    def end(self, summary: Summary, stats: Mapping[str, object]) -> None: ...

    def fail(self, error: BaseException, *, kind: str) -> None: ...

    def close(self) -> None: ...
