"""Held-out accuracy before, during and after a run, kept in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from groupwise.config.schema import Config
from groupwise.engine.engine import Engine
from groupwise.engine.vllm.vllm_engine import VllmEngine
from groupwise.evaluate.held_out import Evaluation, compare, evaluate, read_evaluation, write_evaluation
from groupwise.invariants import check_undisturbed
from groupwise.model.policy import Policy
from groupwise.parallel.processes import Processes
from groupwise.records import Example
from groupwise.tasks import Task
from groupwise.tracking.run_folder import RunFolder, step_name
from groupwise.training.resume import RunState, TrainedState, fingerprint

BEFORE, AFTER = "before", "after"


class Evaluator:
    """Asks the same held-out questions with the same noise each time, so results can be paired."""

    def __init__(
        self,
        config: Config,
        *,
        task: Task | None,
        examples: Sequence[Example],
        codec: Policy,
        engine: Engine | VllmEngine,
        folder: RunFolder,
        processes: Processes | None = None,
    ) -> None:
        self.config = config
        self.processes = processes or Processes()
        self.task = task
        self.examples = () if config.evaluate.skip else examples
        self.codec = codec
        self.engine = engine
        self.tools = None if task is None else task.multi_turn(config.tools)
        self.folder = folder
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None

    def recall(self, state: RunState) -> None:
        """Read back what an earlier session measured."""
        if state.step > 0:
            self.before = read_evaluation(self.folder, BEFORE)
        if state.step >= self.config.run.max_steps:
            self.after = read_evaluation(self.folder, AFTER)

    def due(self, step: int) -> bool:
        """Whether there is something to measure, and now is the time: before, after and every few steps."""
        every = self.config.evaluate.every
        ends = step in (0, self.config.run.max_steps)
        return bool(self.examples) and (ends or (every > 0 and step % every == 0))

    def examine(self, step: int, *, learner: TrainedState) -> Evaluation:
        """Evaluate on all held-out examples, or on the first few during the run, and write the result."""
        assert self.task is not None, "without a task there are no examples"
        ends = {0: BEFORE, self.config.run.max_steps: AFTER}
        untouched = fingerprint(self.codec, learner)
        with self.engine.ready():
            result = evaluate(
                self.task,
                self.examples if step in ends else self.examples[: self.config.evaluate.during],
                codec=self.codec,
                engine=self.engine,
                sampling=self.config.rollout.sampling,
                samples=self.config.evaluate.samples,
                seed=self.config.run.seed,
                seconds=self.config.task.reward_seconds,
                tools=self.tools,
                processes=self.processes,
            )
        with self.processes.together():
            check_undisturbed(untouched, fingerprint(self.codec, learner))
        about: dict[str, object] = {"step": step, "seed": self.config.run.seed}
        if step == 0:
            self.before = result
        elif self.before is not None:
            about["change"] = {name: asdict(change) for name, change in compare(self.before, result).items()}
        if step in ends and step > 0:
            self.after = result
        name = ends.get(step, step_name(step))
        self.processes.lead(lambda: write_evaluation(self.folder.evaluations, name, result, about=about))
        return result
