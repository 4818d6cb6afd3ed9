"""A GRPO run: what each stage of `training.loop` does, and the parts it uses.

With `rollout.overlap`, a thread collects the next batch while this one trains. That batch is sampled from the
policy before the current update: it is one update off-policy. `algo.correction` weighs its tokens by the
ratio of the two policies, and `algo.max_stale_gap` bounds how far they may differ.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import torch

from groupwise.config import Config
from groupwise.learner.learner import Learner
from groupwise.learner.micro_batch import MicroBatchInputs
from groupwise.model.attention.ulysses import UlyssesContext
from groupwise.model.tokenizer import unread_calls
from groupwise.parallel.processes import Processes, layout_of
from groupwise.records import derive_seed
from groupwise.rewards.runner import RewardContext, TrainerState
from groupwise.rollout.tool_calls import read_calls
from groupwise.tasks import Split, Task, UserFunctions
from groupwise.tasks.isolate import failures_on_trial
from groupwise.tasks.user_code import code_of
from groupwise.training.base_run import BaseRun, check_single_turn, load_teacher, use_sampling_rules
from groupwise.training.collector import Batch, Collector, check_failures, first_error
from groupwise.training.evaluator import Evaluator
from groupwise.training.prompt_selection import PromptLimit, Rates
from groupwise.training.resume import RunStart
from groupwise.training.sft_run import WorkedAnswers
from groupwise.training.step_metrics import batch_metrics, speed_metrics


class GRPORun(BaseRun):
    """A run that trains by GRPO."""

    task: Task
    learner: Learner

    def __init__(
        self,
        config: Config,
        *,
        task: Task,
        start: RunStart,
        processes: Processes | None = None,
        functions: UserFunctions | None = None,
    ) -> None:
        self.task = task
        self.functions = functions or UserFunctions()
        self.engine_maker = self.functions.engine
        self.reported_failures: set[str] = set()
        """Names of rewards whose first failure was shown."""
        super().__init__(
            config, title=task.name, start=start, processes=processes, callbacks=self.functions.callbacks
        )

    def code(self) -> dict[str, str]:
        return code_of(self.task) | self.functions.code

    def read_data(self) -> Split:
        check_single_turn(self.config, multi_turn=self.task.is_multi_turn)
        return self.task.split(self.config.task, self.config.run.seed)

    def data_notices(self) -> Iterator[str]:
        rollout, run = self.config.rollout, self.config.run
        yield (
            f"{run.max_steps} steps of {rollout.prompts} prompts × {rollout.group_size} completions of at "
            f"most {rollout.max_tokens} tokens (--max-steps, --batch-size, --group-size, --max-tokens)"
        )
        if self.split.dropped:
            yield f"{self.split.dropped} examples are left out: each repeats another or is held out"
        if self.too_long:
            yield self.prompt_limit.notice(self.too_long)
        if self.task.tools and (reason := unread_calls(self.policy.tokenizer, read_calls)):
            yield reason
        if not self.split.held_out:
            yield "there are no held-out examples: accuracy is not measured"

    def make_parts(self) -> None:
        config, task = self.config, self.task
        use_sampling_rules(self.policy, config, self.functions)
        self.prompt_limit = PromptLimit(config, task=task, policy=self.policy)
        self.split, self.too_long = self.prompt_limit.leave_out(self.split)
        split = self.split
        self.recorder.expect(task.rewards, split.train)
        overlap = config.rollout.overlap
        limit = config.algo.max_stale_gap if overlap else config.algo.max_gap
        self.prefetcher = BatchPrefetcher()
        self.learner = Learner(
            self.policy,
            algo=replace(config.algo, max_gap=limit),
            optim=config.optim,
            sampling=config.rollout.sampling,
            max_steps=config.run.max_steps,
            processes=self.processes,
            context=self._context(),
            teacher=load_teacher(config, self.policy, is_right=task.is_right, processes=self.processes)
            if config.algo.teacher
            else None,
        )
        self.worked_answers = WorkedAnswers(config, task=task, policy=self.policy)
        self.learner.entropy_coefficient = self.state.entropy_coefficient
        self.collector = Collector(
            config,
            task=task,
            split=split,
            codec=self.policy,
            engine=self.engine,
            processes=self.processes.aside() if overlap else self.processes,
            when_late=self.interrupt.end_hanging_step,
            callbacks=self.callbacks,
        )
        self.evaluator = Evaluator(
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

    def next_batch(self, step: int, collect: CollectBatch) -> Batch:
        """Return the batch of this step: prefetched, or collected now.

        Its rollouts are written before anything else can go wrong. With `rollout.overlap`, the next batch is
        then collected with the weights as they are, while this one trains.
        """
        self.began = time.perf_counter()
        batch = self.prefetcher.take()
        if batch is None:
            with self.engine.ready():
                batch = collect(self.collector, step, cursor=self.state.cursor, rates=self.state.rates)
        if step % self.config.track.rollouts_every == 0:
            self.recorder.rollouts(step, batch.all_groups)
            self.recorder.completions(step, batch, is_perfect=self.task.is_perfect)
        self._report_failures()
        self.recorder.last_error = first_error(batch) or self.recorder.last_error
        check_failures(batch, limit=self.config.task.max_failed)
        more = self.config.rollout.overlap and step < self.config.run.max_steps
        if more and not self._asked_to_stop():
            with self.engine.ready():
                self.prefetcher.start(
                    lambda: collect(self.collector, step + 1, cursor=batch.cursor, rates=batch.rates)
                )
        return batch

    def _report_failures(self) -> None:
        """Show the first failure of each reward once, with its traceback."""
        for name in self.collector.failures.keys() - self.reported_failures:
            self.reported_failures.add(name)
            self.recorder.warn_lines(f"reward {name} failed: {self.collector.failures[name]}")

    def early_warnings(self) -> Iterator[str]:
        """Call the rewards on one example, to find most mistakes in them before the model loads."""
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
                self.reported_failures.add(name)
                yield from f"reward {name} failed on a trial answer: {failure}".splitlines()

    def minibatches(self, step: int, batch: Batch) -> Iterator[list[MicroBatchInputs]]:
        """Return the mini-batches that this step trains on."""
        # Dropout is the only randomness that torch generates itself: derive its seed from the step.
        others = () if self.processes.leader else (self.processes.rank,)
        torch.manual_seed(derive_seed(self.config.run.seed, "update", step, *others))
        self.update_began = time.perf_counter()
        self.callbacks.call("before_update", step, batch.groups)
        self.engine.make_room(self.learner.most_bytes)  # the KV cache may hold memory that the update needs
        return self.learner.minibatches(batch.groups, self.worked_answers.samples(batch.groups))

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate if it is due. Wait for prefetching first: it needs the servers' old weights."""
        if self.evaluator.due(step):
            self.prefetcher.wait()
        return super().evaluate(step)

    def log(self, step: int, batch: Batch) -> None:
        """Log the step; evaluate and save a checkpoint if they are due."""
        report = self.learner.report()
        if step % self.config.track.rollouts_every == 0:
            self.recorder.updates(step, self.learner.all_logprobs())
        ended = time.perf_counter()
        speed = speed_metrics(
            batch,
            update_seconds=ended - self.update_began,
            step_seconds=ended - self.began if self.config.rollout.overlap else None,
        )
        self.state = replace(
            self.state, rates=batch.rates, entropy_coefficient=self.learner.entropy_coefficient
        )
        rollouts = batch_metrics(
            batch,
            truncated=self.config.rollout.sampling.truncates or self.policy.has_sampling_rules,
            shown_reward=self.collector.shown_reward,
        )
        metrics = {**rollouts, **report, **speed}
        self.callbacks.call("after_update", step, metrics)
        measured = self.end_step(step, cursor=batch.cursor, metrics=metrics)
        if measured:
            self.recorder.samples(step, batch)


class BatchPrefetcher:
    """Collects at most one batch at a time, in a thread that mostly waits for inference servers."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._batch: Batch | None = None
        self._error: BaseException | None = None

    def start(self, collect: Callable[[], Batch]) -> None:
        """Start collecting a batch. The previous one must have been taken."""
        assert self._thread is None, "the previous batch has not been taken"

        def work() -> None:
            try:
                self._batch = collect()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the batch is complete. Servers may then receive new weights."""
        if self._thread is not None:
            self._thread.join()

    def take(self) -> Batch | None:
        """Return the prefetched batch, or None if none was started. Raise the error of the thread, if any."""
        if self._thread is None:
            return None
        self.wait()
        self._thread = None
        batch, error = self._batch, self._error
        self._batch = self._error = None
        if error is not None:
            raise error
        return batch


class CollectBatch(Protocol):
    """Runs stages 1 to 4: see `training.loop.collect_batch`."""

    def __call__(self, collector: Collector, step: int, *, cursor: int, rates: Rates) -> Batch: ...
