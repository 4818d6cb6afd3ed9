"""The exceptions of this package, for three kinds of failure.

1. User errors raise `ConfigError`: one sentence, exit code 2, before torch loads where possible.
2. Bugs raise `AssertionError`, or `InvariantError` if a check that runs in every step fails. The run
   stops with exit code 3; the last checkpoint remains valid.
3. Failures of a single rollout (a reward that raises, a verifier that times out) raise `RolloutError`.
   The rollout is recorded as failed and excluded from its group. It never gets a reward of 0.

    GroupwiseError
    ├── ConfigError
    │   ├── CheckpointError
    │   └── CallbackError
    ├── InvariantError
    │   └── ServersGoneError
    ├── RolloutError
    └── RemoteRankError     on ranks other than 0, if rank 0 reports the error

`as_rollout_error` describes what a function of the user raised. `requires` guards imports of an extra.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_ERROR_CHARACTERS = 1000
"""Longest error message that is recorded."""
MAX_FRAMES = 20
PACKAGE = str(Path(__file__).parent)


class GroupwiseError(Exception):
    """Base class of all errors that this package raises deliberately."""


class ConfigError(GroupwiseError):
    """Invalid user input; the message says what is wrong and what to do."""


class CheckpointError(ConfigError):
    """A checkpoint is damaged, incomplete or belongs to another run."""


class InvariantError(GroupwiseError):
    """A check in `invariants` failed. The run stops, because continuing would train on a bug."""


class ServersGoneError(InvariantError):
    """No rollout server responds any more, or no teacher. The training state is intact; the run saves it."""


class RolloutError(GroupwiseError):
    """One rollout failed. It is recorded and excluded; the run continues."""


class RemoteRankError(GroupwiseError):
    """An error in a multi-process run, raised on the ranks that leave printing it to rank 0."""

    def __init__(self, sentence: str, *, code: int) -> None:
        super().__init__(sentence)
        self.code = code
        """Exit code of the process."""


class CallbackError(ConfigError):
    """A callback of the user raised. The run ended after the current step, with a checkpoint."""


class StopTraining(Exception):
    """Raised by a callback to end the run after the current step."""


@contextmanager
def requires(extra: str, what: str) -> Iterator[None]:
    """Raise ConfigError if an import in this context fails: `what` then requires an extra of this package."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{what} require: pip install 'groupwise[{extra}]' ({error})") from None


def as_rollout_error(error: BaseException) -> RolloutError:
    """Describe an exception of user code with its file and line; attach the traceback as a note."""
    try:
        message = readable(str(error))
    except Exception:
        message = ""  # str() of the exception raises
    name = "" if isinstance(error, RolloutError) and message else type(error).__name__
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [n for n, (frame, _) in enumerate(frames) if not frame.f_code.co_filename.startswith(PACKAGE)]
    where = ""
    trace = error.__traceback__
    if own:
        frame, line = frames[own[-1]]
        where = f" ({Path(frame.f_code.co_filename).name}, line {line})"
        for _ in range(own[0]):
            trace = trace.tb_next if trace is not None else None
    failure = RolloutError(f"{name}{': ' if name and message else ''}{message}{where}")
    try:
        lines = traceback.format_exception(type(error), error, trace, limit=-MAX_FRAMES)
    except Exception:
        lines = []
    failure.add_note(readable("".join(lines), most=4 * MAX_ERROR_CHARACTERS))
    return failure


def copy_notes(one: BaseException, other: RolloutError) -> RolloutError:
    for note in getattr(one, "__notes__", ()):
        other.add_note(note)
    return other


def readable(text: str, *, most: int = MAX_ERROR_CHARACTERS) -> str:
    """Return text that is safe to print: truncated, with "?" for lone surrogates."""
    text = text if len(text) <= most else f"{text[:most]} …"
    return text.encode(errors="replace").decode()
