"""A run: its parts, where it stands, and its folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType

from groupwise.algo.samples import keep_top_entropy
from groupwise.config import Config, differences, dump_config, read_config
from groupwise.engine.engine import Engine
from groupwise.errors import CheckpointError
from groupwise.evaluate.held_out import Evaluation
from groupwise.learner.checkpoint import latest_checkpoint, prune
from groupwise.learner.learner import Learner
from groupwise.model.load import load_policy
from groupwise.tasks import Task
from groupwise.tracking.display import open_display
from groupwise.tracking.files import write_atomically
from groupwise.tracking.log import log_to
from groupwise.tracking.metrics import MetricsFile
from groupwise.tracking.rollouts import remove_rollouts_after, write_rollouts
from groupwise.tracking.run_folder import RunFolder
from groupwise.tracking.summary import Summary
from groupwise.tracking.trackers import open_trackers
from groupwise.training.batch import Batch, Collector
from groupwise.training.examiner import Examiner
from groupwise.training.interrupt import Interrupt
from groupwise.training.measures import batch_metrics, speed_metrics
from groupwise.training.state import State, load_learner, read_state, save_state

MAY_CHANGE = ("run.max_steps", "run.save_every", "run.keep_", "run.output_dir", "run.name", "evaluate.", "track.")
"""Settings that a resumed run may give anew: none of them changes what a step computes."""


class Run:
    """Everything a step needs. Used as a context: leaving it writes the end of the run's story."""

    def __init__(self, config: Config, *, task: Task, folder: RunFolder, checkpoint: Path | None) -> None:
        self.config = config
        self.task = task
        self.folder = folder
        self.state = State() if checkpoint is None else read_state(checkpoint)
        self.resources = ExitStack()
        self.resources.enter_context(folder.lock())
        self.log = self.resources.enter_context(log_to(folder.log))
        self.display = open_display()
        self.resources.callback(self.display.close)
        self.interrupt = self.resources.enter_context(Interrupt(self.display.message))
        self.started = time.monotonic()
        split = task.split(config.task, config.run.seed)
        self.display.start(config.run.max_steps, f"{task.name} · {config.model.name}", done=self.state.step)
        self.policy = load_policy(config.model, config.lora, trained=checkpoint, reference=config.algo.beta > 0)
        self.engine = Engine(self.policy, config.engine)
        self.learner = Learner(
            self.policy,
            algo=config.algo,
            optim=config.optim,
            sampling=config.rollout.sampling,
            max_steps=config.run.max_steps,
        )
        if checkpoint is not None:
            load_learner(checkpoint, self.learner, self.state)
        self.collector = Collector(config, task=task, split=split, codec=self.policy, engine=self.engine)
        self.examiner = Examiner(
            config, task=task, examples=split.held_out, codec=self.policy, engine=self.engine, folder=folder
        )
        self.metrics = MetricsFile(folder.metrics)
        self._forget_after_checkpoint()
        self.trackers = open_trackers(
            config.track,
            run_name=folder.name,
            config=asdict(config),
            folder=folder.path,
            resumed_from=self.state.step or None,
        )
        for tracker in self.trackers:
            self.resources.callback(tracker.finish)
        self.log.info("%s step %d", "resumed after" if checkpoint else "started at", self.state.step)

    @classmethod
    def open(cls, config: Config, *, task: Task, resume: Path | None) -> Run:
        """A new run in a new folder, or an old one at its last checkpoint."""
        if resume is None:
            folder = RunFolder.create(
                config.run.output_dir, name=config.run.name, task=task.name, model=config.model.name
            )
            write_atomically(folder.config, dump_config(config))
            return cls(config, task=task, folder=folder, checkpoint=None)
        folder = RunFolder.open(resume)
        refuse_other_settings(folder, config)
        write_atomically(folder.config, dump_config(config))
        return cls(config, task=task, folder=folder, checkpoint=latest_checkpoint(folder.checkpoints))

    def steps(self) -> Iterator[int]:
        """Yield the steps that are left, measured before and after; stops early on Ctrl-C."""
        if self.state.step == 0:
            self._examine("before", step=0)
        while self.state.step < self.config.run.max_steps and not self.interrupt.asked:
            yield self.state.step + 1

    def collect(self, step: int) -> Batch:
        return self.collector.collect(step, cursor=self.state.cursor)

    def learn(self, batch: Batch) -> dict[str, float]:
        """Update the policy and return what the update says of itself."""
        started = time.perf_counter()
        samples, sequences, tokens = self.collector.samples(batch)
        samples = keep_top_entropy(samples, share=self.config.algo.top_entropy)
        report = self.learner.update(samples, sequences=sequences, tokens=tokens)
        return {**report, **speed_metrics(batch, update_seconds=time.perf_counter() - started)}

    def track(self, step: int, batch: Batch, report: dict[str, float]) -> None:
        """Log the step; evaluate and save when it is time to."""
        metrics = {**batch_metrics(batch), **report}
        now = time.monotonic()
        self.state = replace(
            self.state,
            step=step,
            cursor=batch.cursor,
            updates=self.learner.updates,
            seconds=self.state.seconds + now - self.started,
        )
        self.started = now
        last = step == self.config.run.max_steps
        if last or (self.config.evaluate.every and step % self.config.evaluate.every == 0):
            metrics |= self._examine("after" if last else f"step-{step:06d}", step=step)
        if step % self.config.track.rollouts_every == 0:
            write_rollouts(self.folder.rollouts_at(step), step, batch.drawn)
        self.metrics.append(step, metrics)
        self.display.update(step, metrics)
        self.log.info("step %d %s", step, json.dumps({k: round(v, 5) for k, v in metrics.items()}))
        for tracker in self.trackers:
            tracker.log(step, metrics)
        if last or step % self.config.run.save_every == 0 or self.interrupt.asked:
            self._save()

    def _examine(self, name: str, *, step: int) -> dict[str, float]:
        """Measure held-out accuracy without touching the training state."""
        if self.config.evaluate.skip or not self.examiner.examples:
            return {}
        result = self.examiner.examine(name, learner=self.learner, cursor=self.state.cursor)
        self.display.evaluation(name, result.intervals())
        self.log.info("evaluation %s: %s", name, result.summary())
        if step:
            self.state = self.state.with_accuracy(result.average.mean)
        return result.metrics()

    def _save(self) -> None:
        path = save_state(self.folder.checkpoints, self.state, policy=self.policy, learner=self.learner)
        best = self.state.best_step if self.config.run.keep_best else None
        prune(self.folder.checkpoints, keep_last=self.config.run.keep_last, best=best)
        self.log.info("saved %s", path)

    def _forget_after_checkpoint(self) -> None:
        """Drop what a killed session wrote after its last checkpoint: those steps are made again."""
        self.metrics.truncate_after(self.state.step)
        remove_rollouts_after(self.folder.rollouts, self.state.step)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.resources:
            if error is not None:
                self.log.error("stopped by %s: %s", type(error).__name__, error)
                return
            summary = self._summary()
            write_atomically(self.folder.stats, json.dumps(self._stats(summary), indent=1))
            self.display.finish(summary)

    def _summary(self) -> Summary:
        done = self.state.step == self.config.run.max_steps
        run = self.folder.path
        before, after = self.examiner.before, self.examiner.latest
        resume = (f"groupwise train --resume {run}", "goes on from here")
        commands = (
            (f"groupwise eval {run}", "measures it again on held-out examples"),
            (
                f"groupwise train --resume {run} run.max_steps={2 * self.config.run.max_steps}",
                "trains on, exactly as if it had not stopped",
            ),
            ("groupwise train --seed 1", "the same with other noise: is the gain real?"),
        )
        return Summary(
            headline=f"{self.state.step} steps done" if done else f"stopped after step {self.state.step}",
            seconds=self.state.seconds,
            folder=run,
            before=before.intervals() if before else {},
            after=after.intervals() if after else {},
            next_commands=commands if done else (resume, commands[0], commands[2]),
        )

    def _stats(self, summary: Summary) -> dict[str, object]:
        def as_json(result: Evaluation | None) -> dict[str, float] | None:
            return result.metrics() if result else None

        return {
            "steps": self.state.step,
            "optimizer_steps": self.state.updates,
            "seconds": round(summary.seconds, 3),
            "best_step": self.state.best_step,
            "before": as_json(self.examiner.before),
            "after": as_json(self.examiner.latest),
        }


def refuse_other_settings(folder: RunFolder, config: Config) -> None:
    """A resumed run computes what it computed before: only settings around it may change."""
    stored = read_config(folder.config)
    changed = [line for line in differences(stored, config) if not line.startswith(MAY_CHANGE)]
    if changed:
        raise CheckpointError(
            f"a resumed run keeps its settings, but these differ: {'; '.join(changed)}; start a new run instead"
        )
