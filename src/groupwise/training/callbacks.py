"""Callbacks: the user's code at the stages of a run.

A callback may read everything and stop the run. If it raises, the run ends after the current step, with a
checkpoint. Hooks run in the leader process only.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.config import Config
from groupwise.errors import CallbackError, ConfigError, StopTraining
from groupwise.records import Group
from groupwise.tasks.task import closest

if TYPE_CHECKING:
    from groupwise.model.policy import Policy

logger = logging.getLogger(__name__)


class RunControl:
    """What a callback sees of the run, and how it stops it."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.step = 0
        """The step that the hook belongs to; 0 before the first."""
        self.policy: Policy | None = None
        """The model with its tokenizer, from `on_run_start` on."""
        self.stop_reason: str | None = None

    @property
    def max_steps(self) -> int:
        return self.config.run.max_steps

    def stop(self, reason: str = "") -> None:
        """End the run after the current step, with a checkpoint, as `raise gw.StopTraining(reason)` does."""
        self.stop_reason = reason


class Callback:
    """Base class of callbacks: override the hooks that you need. Any object with such methods works.

    With several processes the leader calls the hooks, on its share of the groups. With rollout.overlap, the
    hooks of rollout and score run in the thread that collects the next batch; never two hooks at a time.
    """

    def on_run_start(self, run: RunControl) -> None:
        """Before the first evaluation and step, and when a run is resumed."""

    def on_run_end(self, run: RunControl) -> None:
        """After the last step, however the run ended."""

    def before_rollout(self, run: RunControl) -> None:
        """Before answers are generated, and again for each refill (`rollout.refill`)."""

    def after_rollout(self, run: RunControl, groups: Sequence[Group]) -> None:
        """With the answers, not yet scored."""

    def before_score(self, run: RunControl, groups: Sequence[Group]) -> None:
        """Before the rewards are called."""

    def after_score(self, run: RunControl, groups: Sequence[Group]) -> None:
        """With every answer's rewards."""

    def before_update(self, run: RunControl, groups: Sequence[Group]) -> None:
        """With the groups that the step trains on, of all processes."""

    def after_update(self, run: RunControl, metrics: Mapping[str, float]) -> None:
        """With the metrics of the step, as in metrics.jsonl."""

    def before_evaluation(self, run: RunControl) -> None:
        """Before held-out accuracy is measured."""

    def after_evaluation(self, run: RunControl, scores: Mapping[str, float]) -> None:
        """With the scores by name, such as `eval/greedy`."""

    def before_checkpoint(self, run: RunControl) -> None:
        """Before a checkpoint is written."""

    def after_checkpoint(self, run: RunControl, path: Path) -> None:
        """With the folder of the checkpoint."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith(("on_", "before_", "after_")))


def check_callback(callback: object) -> None:
    """Refuse an object without hooks, or with a misspelled hook."""
    name = type(callback).__qualname__
    looks_like_one = [
        method
        for method in dir(callback)
        if method.startswith(("on_", "before_", "after_")) and callable(getattr(callback, method))
    ]
    for method in looks_like_one:
        if method not in HOOKS:
            raise ConfigError(f"callback {name}: there is no hook {method!r}{closest(method, HOOKS)}")
    if not looks_like_one:
        raise ConfigError(f"callback {name} has no hook; it must define one of {', '.join(HOOKS)}")


class Callbacks:
    """Calls the hooks of all callbacks, and stores their stop requests and errors."""

    def __init__(self, callbacks: Sequence[object], control: RunControl, *, leader: bool = True) -> None:
        self.callbacks = tuple(callbacks) if leader else ()
        self.present = bool(callbacks)
        """Whether the run has callbacks; equal in all processes."""
        self.control = control
        self.failure: CallbackError | None = None
        self._lock = threading.Lock()

    @property
    def stopping(self) -> bool:
        """Whether a callback requested a stop or failed. Only set in the leader."""
        return self.control.stop_reason is not None or self.failure is not None

    def call(self, hook: str, step: int, *arguments: Any) -> None:
        """Call a hook of every callback. An exception stops the run after the current step."""
        for callback in self.callbacks:
            self._call(callback, hook, step, arguments)

    def _call(self, callback: object, hook: str, step: int, arguments: tuple[Any, ...]) -> None:
        method = getattr(callback, hook, None)
        if method is None:
            return
        with self._lock:
            self.control.step = step
            try:
                method(self.control, *arguments)
            except StopTraining as request:
                self.control.stop(str(request))
            except Exception as error:
                self._failed(callback, hook, error)

    def _failed(self, callback: object, hook: str, error: Exception) -> None:
        logger.error("callback %s failed in %s", type(callback).__qualname__, hook, exc_info=error)
        frames = traceback.extract_tb(error.__traceback__)[1:]
        place = f" ({frames[0].filename}, line {frames[0].lineno})" if frames else ""
        sentence = (
            f"callback {type(callback).__qualname__}{place} failed in {hook} at step {self.control.step}: "
            f"{type(error).__name__}: {error}"
        )
        if self.failure is None:
            self.failure = CallbackError(sentence)
            self.failure.__cause__ = error

    def raise_failure(self, then: str) -> None:
        """Raise the error of a callback, with how to resume the run."""
        if self.failure is not None:
            raise CallbackError(f"{self.failure}; {then}") from self.failure.__cause__
