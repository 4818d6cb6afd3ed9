"""Measure held-out accuracy before, during and after a run, and save it in the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from groupwise.config.schema import Config
from groupwise.engine.engine import Engine
from groupwise.engine.vllm.vllm_engine import VllmEngine
from groupwise.evaluate.held_out import Evaluation, compare, evaluate, read_evaluation, write_evaluation
from groupwise.invariants import check_undisturbed
from groupwise.model.policy import Policy
from groupwise.parallel.processes import Processes
from groupwise.records import Example
from groupwise.serve.agent_endpoint import multi_turn
from groupwise.tasks import Task
from groupwise.tasks.examples import as_examples
from groupwise.tracking.run_folder import RunFolder, step_name
from groupwise.training.resume import RunState, TrainedState, fingerprint

BEFORE, AFTER = "before", "after"


class Evaluator:
    """Evaluates the same held-out examples with the same seeds each time, so that results can be paired."""

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
        self.tools = None if task is None else multi_turn(task, config.tools, config.agent)
        self.folder = folder
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None
        sets = {} if task is None or config.evaluate.skip else task.test_sets
        self.test_sets = {name: as_examples(rows, source=name) for name, rows in sets.items()}
        self.measured: dict[str, tuple[Evaluation | None, Evaluation | None]] = {}
        """Each test set's evaluations before and after training."""

    def recall(self, state: RunState) -> None:
        """Load the evaluations of an earlier session."""
        if state.step > 0:
            self.before = read_evaluation(self.folder, BEFORE)
        if state.step >= self.config.run.max_steps:
            self.after = read_evaluation(self.folder, AFTER)
        for name in self.test_sets if state.step > 0 else ():
            done = state.step >= self.config.run.max_steps
            after = read_evaluation(self.folder, f"{name}/{AFTER}") if done else None
            self.measured[name] = (read_evaluation(self.folder, f"{name}/{BEFORE}"), after)

    def due(self, step: int) -> bool:
        """Whether to evaluate now: before the first step, after the last, every `evaluate.every` steps."""
        return bool(self.examples) and (self.at_end(step) or self._at_interval(step))

    def _at_interval(self, step: int) -> bool:
        every = self.config.evaluate.every
        return every > 0 and step % every == 0

    def at_end(self, step: int) -> bool:
        """Whether a step is the first or the last: then the further test sets are measured, too."""
        return step in (0, self.config.run.max_steps)

    def evaluate_test_sets(self, step: int) -> dict[str, Evaluation]:
        """Evaluate on the further test sets, and write the results into a folder for each."""
        results: dict[str, Evaluation] = {}
        for name, rows in self.test_sets.items():
            with self.engine.ready():
                result = self._evaluate(rows[: self.config.task.held_out])
            results[name] = result
            before = self.measured.get(name, (None, None))[0]
            self.measured[name] = (result, None) if step == 0 else (before, result)
            about: dict[str, object] = {"step": step, "seed": self.config.run.seed, "test_set": name}
            if step > 0 and before is not None:
                about["change"] = {key: asdict(one) for key, one in compare(before, result).items()}
            folder, file = self.folder.evaluations / name, BEFORE if step == 0 else AFTER
            self.processes.lead(partial(write_evaluation, folder, file, result, about=about))
        return results

    def _evaluate(self, examples: Sequence[Example]) -> Evaluation:
        assert self.task is not None, "without a task there are no examples"
        return evaluate(
            self.task,
            examples,
            codec=self.codec,
            engine=self.engine,
            sampling=self.config.rollout.sampling,
            samples=self.config.evaluate.samples,
            seed=self.config.run.seed,
            seconds=self.config.task.reward_seconds,
            concurrency=self.config.task.reward_concurrency,
            tools=self.tools,
            processes=self.processes,
        )

    def evaluate(self, step: int, *, learner: TrainedState) -> Evaluation:
        """Evaluate on all held-out examples, or on the first few during the run, and write the result."""
        ends = {0: BEFORE, self.config.run.max_steps: AFTER}
        untouched = fingerprint(self.codec, learner)
        with self.engine.ready():
            result = self._evaluate(
                self.examples if step in ends else self.examples[: self.config.evaluate.during]
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
