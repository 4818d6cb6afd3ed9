"""A run: its parts, where it stands, and what each stage of a step does with them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

import torch

from groupwise.algo.samples import keep_top_entropy
from groupwise.config import Config
from groupwise.engine.engine import Engine
from groupwise.engine.sampler import derive_seed
from groupwise.learner.checkpoint import prune
from groupwise.learner.learner import Learner
from groupwise.model.load import load_policy
from groupwise.tasks import Split, Task
from groupwise.training.batch import Batch, Collector, check_failures
from groupwise.training.data import split_for
from groupwise.training.ending import stats_of, summary_of
from groupwise.training.examiner import Examiner
from groupwise.training.interrupt import Interrupt
from groupwise.training.measures import batch_metrics, speed_metrics
from groupwise.training.recorder import Recorder
from groupwise.training.start import Start
from groupwise.training.state import load_learner, save_state


class Run:
    """Everything a step needs. Used as a context: leaving it writes the end of the run's story."""

    def __init__(self, config: Config, *, task: Task, start: Start) -> None:
        self.config = config
        self.folder = start.folder
        self.state = start.state
        with ExitStack() as resources:
            resources.callback(start.withdraw)
            resources.enter_context(start.lock)
            split = split_for(config, task)
            self.recorder = Recorder(
                start.folder,
                title=f"{task.name} · {config.model.name}",
                total=config.run.max_steps,
                done=start.state.step,
            )
            resources.callback(self.recorder.close)
            self.interrupt = resources.enter_context(Interrupt(self.recorder.display.message))
            self._load(task, split, start)
            self.recorder.begin(config, done=self.state.step)
            self.policy.save_tokenizer(self.folder.tokenizer)
            self._tell_the_beginning(split)
            self.resources = resources.pop_all()
        self.clock = time.monotonic()

    def _load(self, task: Task, split: Split, start: Start) -> None:
        """Make the parts: policy, engine and learner, and who collects and who examines."""
        config = self.config
        torch.manual_seed(derive_seed(config.run.seed, "adapters"))
        self.policy = load_policy(
            config.model, config.lora, trained=start.checkpoint, reference=config.algo.beta > 0
        )
        self.engine = engine = Engine(self.policy, config.engine)
        self.learner = Learner(
            self.policy,
            algo=config.algo,
            optim=config.optim,
            sampling=config.rollout.sampling,
            max_steps=config.run.max_steps,
        )
        if start.checkpoint is not None:
            load_learner(start.checkpoint, self.learner, start.state)
        self.collector = Collector(config, task=task, split=split, codec=self.policy, engine=engine)
        self.examiner = Examiner(
            config, task=task, examples=split.held_out, codec=self.policy, engine=engine, folder=start.folder
        )
        self.examiner.recall(start.state)

    def _tell_the_beginning(self, split: Split) -> None:
        for notice in self.config.notices():
            self.recorder.say(notice)
        if split.dropped:
            self.recorder.say(f"{split.dropped} examples are left out: each repeats another or is held out")
        if not split.held_out:
            self.recorder.say("there are no held-out examples: accuracy is not measured")
        if self.examiner.before is not None:
            self.recorder.evaluation("before", self.examiner.before)

    def steps(self) -> Iterator[int]:
        """Yield the steps that are left, measured before and after; stops early on Ctrl-C."""
        if self.state.step == 0 and not self.interrupt.asked:
            self.recorder.baseline(self._examine(0))
        while self.state.step < self.config.run.max_steps and not self.interrupt.asked:
            yield self.state.step + 1

    def collect(self, step: int) -> Batch:
        """Draw, score and compare answers, and write them down before anything else can go wrong."""
        batch = self.collector.collect(step, cursor=self.state.cursor)
        if step % self.config.track.rollouts_every == 0:
            self.recorder.rollouts(step, batch)
            self.recorder.completions(step, batch, perfect=self.collector.task.perfect)
        check_failures(batch, limit=self.config.task.max_failed)
        return batch

    def learn(self, step: int, batch: Batch) -> dict[str, float]:
        """Update the policy and return what the update says of itself."""
        # Dropout is the one noise that torch draws by itself: it derives from the step too.
        torch.manual_seed(derive_seed(self.config.run.seed, "update", step))
        started = time.perf_counter()
        samples, sequences, tokens = self.collector.samples(batch)
        samples = keep_top_entropy(samples, share=self.config.algo.top_entropy)
        if self.policy.device.type == "cuda":
            self.engine.release()  # its cache takes what is free of the GPU: the update needs that now
        report = self.learner.update(samples, sequences=sequences, tokens=tokens)
        if step % self.config.track.rollouts_every == 0:
            self.recorder.updates(step, self.learner.seen)
        return {**report, **speed_metrics(batch, update_seconds=time.perf_counter() - started)}

    def track(self, step: int, batch: Batch, report: dict[str, float]) -> None:
        """Log the step; evaluate and save when it is time to."""
        self.state = replace(self.state, step=step, cursor=batch.cursor, updates=self.learner.updates)
        measured = self._examine(step)
        self.recorder.step(step, {**batch_metrics(batch), **report, **measured})
        if measured:
            self.recorder.samples(step, batch)
        last = step == self.config.run.max_steps
        if last or step % self.config.run.save_every == 0 or self.interrupt.asked:
            self._save()

    def _examine(self, step: int) -> dict[str, float]:
        """Measure held-out accuracy if it is time to, without touching the training state."""
        if not self.examiner.due(step):
            return {}
        result = self.examiner.examine(step, learner=self.learner)
        last = step == self.config.run.max_steps
        self.recorder.evaluation("before" if step == 0 else "after" if last else f"at step {step}", result)
        if step > 0:
            self.state = self.state.with_accuracy(sum(result.averages) / len(result.averages))
        return result.metrics()

    def _save(self) -> None:
        now = time.monotonic()
        self.state = replace(self.state, seconds=self.state.seconds + now - self.clock)
        self.clock = now
        self.recorder.behind.flush()  # a checkpoint stands for everything before it, rollouts included
        save_state(self.folder.checkpoints, self.state, policy=self.policy, learner=self.learner)
        best = self.state.best_step if self.config.run.keep_best else None
        prune(self.folder.checkpoints, keep_last=self.config.run.keep_last, best=best)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.recorder.fail(error)
            self.resources.__exit__(kind, error, trace)
            return
        with self.resources:
            before, after = self.examiner.before, self.examiner.after
            self.recorder.end(
                summary_of(self.config, self.state, folder=self.folder, before=before, after=after),
                stats_of(self.state, before=before, after=after),
            )
