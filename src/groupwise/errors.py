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
"""

from __future__ import annotations


class GroupwiseError(Exception):
    """Base class of all errors that this package raises deliberately."""


class ConfigError(GroupwiseError):
    """Invalid user input; the message says what is wrong and what to do."""


class CheckpointError(ConfigError):
    """A checkpoint is damaged, incomplete or belongs to another run."""


class InvariantError(GroupwiseError):
    """A check in `invariants` failed. The run stops, because continuing would train on a bug."""


class ServersGoneError(InvariantError):
    """No rollout server responds any more. The training state is intact, and the run saves it."""


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
