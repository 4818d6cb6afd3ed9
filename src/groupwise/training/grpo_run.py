"""A GRPO run: what each stage of a step does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from groupwise.algo.samples import keep_top_entropy
from groupwise.config import Config
from groupwise.learner.learner import Learner
from groupwise.model.attention.ulysses import UlyssesContext
from groupwise.parallel.processes import Processes, layout_of
from groupwise.rewards.runner import RewardContext, TrainerState
from groupwise.seeds import derive_seed
from groupwise.tasks import Split, Task
from groupwise.tasks.isolate import failures_on_trial
from groupwise.training.base_run import BaseRun
from groupwise.training.collector import Batch, BatchPrefetcher, Collector, check_failures, first_error
from groupwise.training.evaluator import Evaluator
from groupwise.training.prompt_lengths import PromptLimit
from groupwise.training.resume import RunStart
from groupwise.training.step_metrics import batch_metrics, speed_metrics


class GRPORun(BaseRun):
    """Everything a step needs."""

    task: Task
    learner: Learner

    def __init__(
        self, config: Config, *, task: Task, start: RunStart, processes: Processes | None = None
    ) -> None:
        self.task = task
        self.told_failures: set[str] = set()
        """Rewards whose first failure was shown."""
        super().__init__(config, title=task.name, start=start, processes=processes)

    def read_data(self) -> Split:
        return self.task.split(self.config.task, self.config.run.seed)

    def data_notices(self) -> Iterator[str]:
        if self.split.dropped:
            yield f"{self.split.dropped} examples are left out: each repeats another or is held out"
        if self.too_long:
            yield self.prompt_limit.notice(self.too_long)
        if not self.split.held_out:
            yield "there are no held-out examples: accuracy is not measured"

    def make_parts(self) -> None:
        config, task = self.config, self.task
        self.prompt_limit = PromptLimit(config, task=task, policy=self.policy)
        self.split, self.too_long = self.prompt_limit.leave_out(self.split)
        split = self.split
        overlap = config.rollout.overlap
        limit = config.algo.max_stale_gap if overlap else config.algo.max_gap
        self.ahead = BatchPrefetcher()
        self.learner = Learner(
            self.policy,
            algo=replace(config.algo, max_gap=limit),
            optim=config.optim,
            sampling=config.rollout.sampling,
            max_steps=config.run.max_steps,
            processes=self.processes,
            context=self._context(),
        )
        self.collector = Collector(
            config,
            task=task,
            split=split,
            codec=self.policy,
            engine=self.engine,
            processes=self.processes.aside() if overlap else self.processes,
            when_late=self.interrupt.end_hanging_step,
        )
        self.examiner = Evaluator(
            config,
            task=task,
            examples=split.held_out,
            codec=self.policy,
            engine=self.engine,
            folder=self.folder,
            processes=self.processes,
        )

    def _context(self) -> UlyssesContext | None:
        if self.processes.count == 1 or layout_of(self.config.run) != "context":
            return None
        context = UlyssesContext(rank=self.processes.rank, count=self.processes.count)
        context.check(self.policy)
        return context

    def collect(self, step: int) -> Batch:
        """Draw, score and compare answers, and write them down before anything else can go wrong."""
        self.began = time.perf_counter()
        batch = self.ahead.take()
        if batch is None:
            with self.engine.ready():
                batch = self.collector.collect(step, cursor=self.state.cursor, rates=self.state.rates)
        if step % self.config.track.rollouts_every == 0:
            self.recorder.rollouts(step, batch)
            self.recorder.completions(step, batch, is_perfect=self.task.is_perfect)
        self._tell_failures()
        self.recorder.last_error = first_error(batch) or self.recorder.last_error
        check_failures(batch, limit=self.config.task.max_failed)
        return batch

    def _tell_failures(self) -> None:
        """Show each reward's first failure, with its traceback, once."""
        for name in self.collector.failures.keys() - self.told_failures:
            self.told_failures.add(name)
            self.recorder.warn_at_length(f"reward {name} failed: {self.collector.failures[name]}")

    def early_warnings(self) -> Iterator[str]:
        """Try the rewards on one example: most mistakes in them show before the model loads."""
        if self.state.step == 0 and self.processes.leader:
            (example,), _ = self.split.take(0, 1)
            context = RewardContext(
                trainer_state=TrainerState(max_steps=self.config.run.max_steps),
                when_late=self.interrupt.end_hanging_step,
            )
            seconds = self.config.task.reward_seconds
            for name, failure in failures_on_trial(
                self.task, example, seconds=seconds, context=context
            ).items():
                self.told_failures.add(name)
                yield from f"reward {name} failed on a trial answer: {failure}".splitlines()

    def _draw_ahead(self, step: int, batch: Batch) -> None:
        """Begin the batch of this step, behind the one in hand, with the weights of now."""
        if step > self.config.run.max_steps:
            return
        with self.engine.ready():
            self.ahead.start(lambda: self.collector.collect(step, cursor=batch.cursor, rates=batch.rates))

    def learn(self, step: int, batch: Batch) -> dict[str, float]:
        """Update the policy and return what the update says of itself."""
        overlap = self.config.rollout.overlap
        if overlap:
            self._draw_ahead(step + 1, batch)
        # Dropout is the one noise that torch draws by itself: it derives from the step too.
        others = () if self.processes.leader else (self.processes.rank,)
        torch.manual_seed(derive_seed(self.config.run.seed, "update", step, *others))
        started = time.perf_counter()
        samples, sequences, tokens = self.collector.samples(batch)
        samples = keep_top_entropy(samples, share=self.config.algo.top_entropy)
        self.engine.make_room(self.learner.most_bytes)  # its cache may have taken what the update needs
        report = self.learner.update(samples, sequences=sequences, tokens=tokens)
        if step % self.config.track.rollouts_every == 0:
            self.recorder.updates(step, self.learner.seen_by_all())
        ended = time.perf_counter()
        whole = ended - self.began if overlap else None
        return {**report, **speed_metrics(batch, update_seconds=ended - started, step_seconds=whole)}

    def examine(self, step: int) -> dict[str, float]:
        """Measure held-out accuracy if it is time to; what is being drawn needs the servers' old weights."""
        if self.examiner.due(step):
            self.ahead.wait()
        return super().examine(step)

    def track(self, step: int, batch: Batch, report: dict[str, float]) -> None:
        """Log the step; evaluate and save when it is time to."""
        self.state = replace(self.state, rates=batch.rates)
        drawn = batch_metrics(
            batch,
            truncated=self.config.rollout.sampling.truncates,
            shown_reward=self.collector.shown_reward,
        )
        measured = self.end_step(step, cursor=batch.cursor, metrics={**drawn, **report})
        if measured:
            self.recorder.samples(step, batch)
