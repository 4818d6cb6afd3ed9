"""Held-out accuracy before, during and after a run, kept in its folder."""

from __future__ import annotations

import json
from collections.abc import Sequence

from groupwise.config.sections import Config
from groupwise.evaluate.held_out import Evaluation, compare, evaluate, transcripts
from groupwise.invariants import check_undisturbed
from groupwise.learner.learner import Learner
from groupwise.model.policy import Policy
from groupwise.records import Example
from groupwise.rollout.collect import Generate
from groupwise.tasks import Task
from groupwise.tracking.files import write_atomically
from groupwise.tracking.run_folder import RunFolder
from groupwise.training.state import fingerprint

TRANSCRIPTS = 10


class Examiner:
    """Asks the same held-out questions with the same noise each time, so results can be paired."""

    def __init__(
        self,
        config: Config,
        *,
        task: Task,
        examples: Sequence[Example],
        codec: Policy,
        engine: Generate,
        folder: RunFolder,
    ) -> None:
        self.config = config
        self.task = task
        self.examples = examples
        self.codec = codec
        self.engine = engine
        self.folder = folder
        self.before: Evaluation | None = None
        self.latest: Evaluation | None = None

    def examine(self, name: str, *, learner: Learner, cursor: int) -> Evaluation:
        """Evaluate on all held-out examples, or on the first few during the run, and write the result."""
        whole = name in ("before", "after")
        state = fingerprint(self.codec, learner, cursor=cursor)
        result = evaluate(
            self.task,
            self.examples if whole else self.examples[: self.config.evaluate.during],
            codec=self.codec,
            engine=self.engine,
            sampling=self.config.rollout.sampling,
            samples=self.config.evaluate.samples,
            seed=self.config.run.seed,
            seconds=self.config.task.reward_seconds,
        )
        check_undisturbed(state, fingerprint(self.codec, learner, cursor=cursor))
        record = result.to_json()
        if name == "before":
            self.before = result
        if name == "after":
            self.latest = result
            if self.before is not None and len(self.examples) > 1:
                record["change"] = {k: str(v) for k, v in compare(self.before, result).items()}
        write_atomically(self.folder.evaluations / f"{name}.json", json.dumps(record, indent=1))
        write_atomically(self.folder.evaluations / f"{name}.txt", transcripts(result, count=TRANSCRIPTS))
        return result
