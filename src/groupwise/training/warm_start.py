"""The warm start: supervised steps on demonstrations, with the checkpoints and the story of any run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from groupwise.engine.sampler import derive_seed
from groupwise.errors import ConfigError
from groupwise.learner.imitation import check_chats, to_samples
from groupwise.learner.supervised import Imitator
from groupwise.parallel.processes import Processes, joined_processes
from groupwise.records import Sample
from groupwise.tasks import Split, isolated
from groupwise.tasks.demonstrations import Plan, held_out_of
from groupwise.tracking.display import open_display
from groupwise.tracking.trackers import tracker_names
from groupwise.training.examiner import Examiner
from groupwise.training.full_disk import told_when_full
from groupwise.training.measures import peak_memory
from groupwise.training.prompt_lengths import PromptLimit
from groupwise.training.session import Session
from groupwise.training.start import Start


def warm_start(plan: Plan, *, resume: Path | None = None) -> Path:
    """Imitate demonstrations, and return the run's folder. `resume` goes on, bit for bit."""
    config = plan.config
    tracker_names(config.track)
    with ExitStack() as resources:
        if plan.task is not None:
            plan = replace(plan, task=resources.enter_context(isolated(plan.task)))
        processes = resources.enter_context(joined_processes())
        return warm_start_with(processes, plan, resume)


def warm_start_with(processes: Processes, plan: Plan, resume: Path | None) -> Path:
    """Imitate as one of these processes."""
    config = plan.config
    start = Start.shared(
        processes,
        lambda: (
            Start.new(config, task=f"sft-{plan.title}") if resume is None else Start.again(resume, config)
        ),
    )
    if done := start.already_done(config):
        start.lock.close()
        if processes.leader:
            open_display().message(done)
        return start.folder.path

    with told_when_full(start.folder, config), WarmStart(plan, start=start, processes=processes) as run:
        for step in run.steps():
            batch = run.take(step)
            report = run.learn(step, batch)
            run.track(step, batch, report)
    return run.folder.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one step imitates."""

    samples: list[Sample]
    too_long: int
    cursor: int


class WarmStart(Session):
    """Everything a supervised step needs."""

    learner: Imitator

    def __init__(self, plan: Plan, *, start: Start, processes: Processes | None = None) -> None:
        self.task = plan.task
        self.demonstrations = plan.demonstrations
        super().__init__(plan.config, title=f"warm start · {plan.title}", start=start, processes=processes)

    def read_data(self) -> Split:
        """The plan has read it, to know how many steps there are."""
        return self.demonstrations.split

    def data_notices(self) -> Iterator[str]:
        if self.demonstrations.dropped:
            yield f"{self.demonstrations.dropped} rows are left out: each repeats another or is held out"
        if self.too_long:
            yield f"{self.too_long} held-out examples are left out: their prompts are too long to be answered"
        if self.task is None:
            yield "no task is named: accuracy is not measured"

    def make_parts(self) -> None:
        config, task = self.config, self.task
        self.learner = Imitator(
            self.policy, optim=config.optim, max_steps=config.run.max_steps, processes=self.processes
        )
        held_out = () if task is None else held_out_of(config, task)
        asked = PromptLimit(config, task=task, policy=self.policy).short(held_out) if task else ()
        self.too_long = len(held_out) - len(asked)
        self.examiner = Examiner(
            config,
            task=task,
            examples=asked,
            codec=self.policy,
            engine=self.engine,
            folder=self.folder,
            processes=self.processes,
        )
        self.longest = min(config.sft.max_length, self.policy.context_length)
        self.held_out = to_samples(self.policy, self.demonstrations.held_out(), longest=self.longest)
        # A mistake in the rows is found before anything is written or measured.
        self.take(self.state.step + 1)
        size = self.demonstrations.split.size
        if config.sft.data is not None and size is not None and self.state.step == 0:
            check_chats(self.policy, self.demonstrations.take(0, size)[0])

    def take(self, step: int) -> Taken:
        """Encode the next demonstrations; those that are too long are replaced, and counted."""
        wanted, cursor = self.config.sft.batch, self.state.cursor
        samples: list[Sample] = []
        too_long = 0
        while not samples:
            demonstrations, cursor = self.demonstrations.take(cursor, wanted)
            samples = to_samples(self.policy, demonstrations, longest=self.longest)
            too_long += len(demonstrations) - len(samples)
            if too_long >= MOST_TOO_LONG:
                context = self.policy.context_length
                remedy = (
                    "use a model with a longer context"
                    if self.longest == context
                    else f"raise sft.max_length, up to the model's context of {context}"
                )
                raise ConfigError(
                    f"{too_long} demonstrations in a row have more than {self.longest} tokens: {remedy}"
                )
        return Taken(samples=samples, too_long=too_long, cursor=cursor)

    def learn(self, step: int, taken: Taken) -> dict[str, float]:
        """Update the policy and return what the update says of itself."""
        torch.manual_seed(derive_seed(self.config.run.seed, "update", step))
        started = time.perf_counter()
        report = self.learner.update(taken.samples)
        seconds = time.perf_counter() - started
        tokens = sum(sample.length for sample in taken.samples)
        size = self.demonstrations.split.size
        return {
            **report,
            **({} if size is None else {"sft/epoch": taken.cursor / size}),
            "sft/tokens": float(tokens),
            "sft/too_long": float(taken.too_long),
            "speed/tokens_per_second": tokens / seconds,
            "time/step": seconds,
            "memory/peak_gb": peak_memory(),
        }

    def track(self, step: int, taken: Taken, report: dict[str, float]) -> None:
        """Log the step; evaluate and save when it is time to."""
        self.end_step(step, cursor=taken.cursor, metrics=report)

    def examine(self, step: int) -> dict[str, float]:
        """Measure the loss on held-out demonstrations beside the accuracy."""
        measured = super().examine(step)
        if measured and self.policy.device.type == "cuda":
            self.engine.release()  # imitation needs the memory that the generator's cache took
        every = self.config.evaluate.every
        ends = step in (0, self.config.run.max_steps)
        if not self.held_out or self.config.evaluate.skip or not (ends or (every and step % every == 0)):
            return measured
        loss = self.learner.loss(self.held_out)
        self.recorder.say(f"loss on {len(self.held_out)} held-out demonstrations: {loss:.4f}")
        return {**measured, "sft/held_out_loss": loss}


MOST_TOO_LONG = 10_000
"""Demonstrations skipped in one step after which they are taken to be all too long."""
