"""Three kinds of failure, three treatments.

1. The user's mistake: `ConfigError`. One sentence, exit code 2, before anything heavy loads.
2. Ours: a plain `assert`; or `InvariantError` when a check that runs in every step finds that what
   the run promises no longer holds. The run stops, the last checkpoint stays, exit code 3.
3. A rollout's (a reward that raises, a verifier that times out): `RolloutError`, recorded on the
   rollout, counted, left out of its group. It never becomes a reward of 0.

    GroupwiseError
    ├── ConfigError
    │   └── CheckpointError
    ├── InvariantError
    ├── RolloutError
    └── EchoError           in the other processes of a run, where the leader tells what went wrong
"""

from __future__ import annotations


class GroupwiseError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(GroupwiseError):
    """Something the user wrote cannot work; the message says what and what to write instead."""


class CheckpointError(ConfigError):
    """A checkpoint is damaged, incomplete or belongs to another run."""


class InvariantError(GroupwiseError):
    """A promise of the run broke (see `invariants`); training on would be training on a bug."""


class RolloutError(GroupwiseError):
    """One rollout failed; it is recorded and excluded, the run goes on."""


class RemoteRankError(GroupwiseError):
    """What went wrong in a run of several processes, raised in those that leave the telling to the leader."""

    def __init__(self, sentence: str, *, code: int) -> None:
        super().__init__(sentence)
        self.code = code
        """What the process ends with."""
