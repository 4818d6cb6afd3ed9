"""What every kind of run shares: its folder and story, held-out accuracy, checkpoints, and an end."""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from groupwise.config import Config
from groupwise.config.schema import EngineConfig, ModelConfig
from groupwise.engine.engine import Engine
from groupwise.engine.vllm.vllm_engine import VllmEngine
from groupwise.errors import ConfigError
from groupwise.learner.checkpoint import prune
from groupwise.model.device import deterministic_kernels, device_of, free_memory
from groupwise.model.load import load_policy
from groupwise.model.resolve import model_folder
from groupwise.parallel.processes import DIVIDING, Processes, as_launched, divide, layout_of
from groupwise.seeds import derive_seed
from groupwise.tasks import Split, Task
from groupwise.tasks.code_fingerprint import code_of
from groupwise.tasks.task import correct_rule
from groupwise.tracking.run_log import LOGGER
from groupwise.training.callbacks import Callbacks, RunControl
from groupwise.training.evaluator import Evaluator
from groupwise.training.lifecycle.interrupt import Interrupt
from groupwise.training.lifecycle.run_summary import resume_words, stats_of, summary_of
from groupwise.training.recorder import NullRecorder, Recorder
from groupwise.training.resources.cpu_contention import CPUContention
from groupwise.training.resources.model_shape import shape_of
from groupwise.training.resources.run_estimate import DeviceSpec, choose_recomputing
from groupwise.training.resume import (
    RunStart,
    TrainedState,
    command_of,
    load_learner,
    same_code,
    same_data,
    save_state,
    with_recomputing,
)

ENGINE_METHODS = ("generate", "ready", "make_room", "release")


class BaseRun(ABC):
    """A run from its opening to its last word. Used as a context: leaving it writes the end of the story.

    A kind of run says in `read_data` what it learns from, and in `make_parts` how.
    """

    task: Task | None
    """What is measured; None: nothing but the loss."""
    learner: TrainedState
    examiner: Evaluator
    engine_maker: Callable[..., Any] | None = None
    """The user's function that makes the engine, if settings name one."""

    def __init__(
        self,
        config: Config,
        *,
        title: str,
        start: RunStart,
        processes: Processes | None = None,
        callbacks: Sequence[object] = (),
    ) -> None:
        self.config = config
        self.processes = processes or Processes()
        self.folder = start.folder
        control = RunControl(config, start.folder.path)
        self.callbacks = Callbacks(callbacks, control, leader=self.processes.leader)
        self.state = start.state
        with ExitStack() as resources:
            resources.callback(start.withdraw)
            resources.enter_context(start.lock)
            recomputing = ""
            with self.processes.together():
                self.split = self.read_data()
                data = same_data(start.state.data, self.split.fingerprint)
                code = same_code(start.state.code, self.code())
                self.state = replace(start.state, data=data, code=code)
                config, recomputing = settled(config, start)
            # Free memory may differ from process to process: all do what suits the leader.
            config, recomputing = self.processes.gather((config, recomputing))[0]
            self.config = config
            self.state = replace(self.state, settings=asdict(config))
            self.recorder = self._open_recorder(title)
            resources.callback(self.recorder.close)
            launched = self.processes.count > 1
            self.interrupt = resources.enter_context(
                Interrupt(self.recorder.display.message, launched=launched)
            )
            with self.processes.together():
                for line in self.early_warnings():
                    self.recorder.display.message(line)
                self._load(start, resources)
            self.processes.lead(self._begin)
            if start.begins_again:
                self.recorder.say("the run was stopped before its first checkpoint: it begins again")
            if start.parent is not None:
                self.recorder.say(
                    f"{start.parent} continues after step {start.state.step} in a new folder: "
                    f"{self.folder.path}"
                )
            tell = self.recorder.say if config.model.gradient_checkpointing else LOGGER.info
            tell(recomputing)
            for notice in (*config.notices(), *self.policy.notices(), *self.data_notices()):
                self.recorder.say(notice)
            if self.examiner.before is not None:
                self.recorder.evaluation("before", self.examiner.before)
            self.callbacks.control.policy = self.policy
            self.resources = resources.pop_all()
        self.stopping = False
        """Whether some process was asked to stop; known alike in all after each step."""
        alone = self.policy.device.type == "cpu" and not launched
        self.crowd = CPUContention(threads=torch.get_num_threads()) if alone else None
        self.clock = time.monotonic()

    def _open_recorder(self, title: str) -> Recorder:
        if not self.processes.leader:
            return NullRecorder()
        return Recorder(
            self.folder,
            title=f"{title} · {self.config.model.name}",
            total=self.config.run.max_steps,
            done=self.state.step,
        )

    def _begin(self) -> None:
        self.recorder.begin(self.config, done=self.state.step)
        self.policy.save_tokenizer(self.folder.tokenizer)

    def code(self) -> dict[str, str]:
        """Return fingerprints of the user's code, which a resumed run must not change."""
        return {} if self.task is None else code_of(self.task)

    @abstractmethod
    def read_data(self) -> Split:
        """Find out what is learned from, before the model is loaded: mistakes there are found at once."""

    def early_warnings(self) -> Iterable[str]:
        """Return what can be told to be wrong before the model is loaded."""
        return ()

    @abstractmethod
    def data_notices(self) -> Iterator[str]:
        """Yield what a reader should know of the data."""

    @abstractmethod
    def make_parts(self) -> None:
        """Make `learner` and `examiner`, and whatever else a step needs, of the policy and the engine."""

    def _load(self, start: RunStart, resources: ExitStack) -> None:
        """Make the policy, the engine and the parts that work with them, as they were at the checkpoint."""
        config = self.config
        model = on_own_device(config.model, self.processes)
        resources.enter_context(deterministic_kernels(device_of(model.device), on=config.run.deterministic))
        torch.manual_seed(derive_seed(config.run.seed, "adapters"))
        reference = config.run.kind == "grpo" and config.algo.beta > 0
        self.policy = load_policy(model, config.lora, trained=start.checkpoint, reference=reference)
        if self.policy.unpacked_bytes and not self.policy.has_adapter:
            raise ConfigError(f"the weights of {config.model.name} are quantized: train adapters (lora.r=16)")
        layout = layout_of(config.run)
        if self.processes.count > 1 and layout in DIVIDING:
            divide(self.policy, layout)
        self.engine = self._make_engine(resources)
        self.make_parts()
        if start.checkpoint is not None:
            load_learner(start.checkpoint, self.learner, start.state)
        self.examiner.recall(start.state)

    def _make_engine(self, resources: ExitStack) -> Engine | VllmEngine:
        if self.config.engine.kind == "own":
            return Engine(self.policy, self.config.engine)
        if self.config.engine.kind != "vllm":
            return self._make_own_engine(self.config.engine)
        named, own = self.config.engine.exchange, self.folder.path / "serving"
        if not named and self.processes.leader:  # with what a session that was killed left there
            resources.callback(shutil.rmtree, own, ignore_errors=True)
        engine = VllmEngine(
            self.policy,
            self.config.engine,
            exchange=Path(named or own),
            processes=self.processes,
            say=self.recorder.warn,
        )
        resources.callback(engine.close)
        return engine

    def _make_own_engine(self, config: EngineConfig) -> Engine:
        """Make the engine by the user's function."""
        if self.engine_maker is None:
            raise ConfigError(f"engine.kind={config.kind} requires groupwise train; set engine.kind=own")
        engine: Engine = self.engine_maker(self.policy, config)
        missing = [name for name in ENGINE_METHODS if not callable(getattr(engine, name, None))]
        if missing:
            raise ConfigError(
                f"engine.kind {config.kind} returned {type(engine).__name__}, which has no "
                f"{', '.join(missing)}; an engine has {', '.join(ENGINE_METHODS)}"
            )
        return engine

    def steps(self) -> Iterator[int]:
        """Yield the steps that are left, measured before and after; a signal or a callback stops early."""
        self.callbacks.call("on_run_start", self.state.step)
        self.stopping = self._asked_to_stop()
        if self.state.step == 0 and not self.stopping:
            self.recorder.baseline(self.examine(0))
            self.stopping = self._asked_to_stop()
        while self.state.step < self.config.run.max_steps and not self.stopping:
            yield self.state.step + 1

    def _asked_to_stop(self) -> bool:
        """Whether a signal or a callback asked some process to stop; known alike in all."""
        return self.processes.any(self.interrupt.asked or self.callbacks.stopping)

    def end_step(self, step: int, *, cursor: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Log the step; evaluate and save when it is time to. Returns what was measured."""
        self.state = replace(self.state, step=step, cursor=cursor, updates=self.learner.updates)
        measured = self.examine(step)
        self.processes.lead(lambda: self.recorder.step(step, {**metrics, **measured}))
        self._look_around()
        run = self.config.run
        best = run.keep_best and step == self.state.best_step
        self.stopping = self._asked_to_stop()
        if step == run.max_steps or step % run.save_every == 0 or best or self.stopping:
            self._save()
            # A callback that was told of the checkpoint may have asked to stop.
            self.stopping = self._asked_to_stop() if self.callbacks.present else self.stopping
        return measured

    def _look_around(self) -> None:
        """After the first step, tell who else computes here."""
        if self.crowd is not None and (notice := self.crowd.notice()):
            self.recorder.say(notice)
        self.crowd = None

    def examine(self, step: int) -> dict[str, float]:
        """Measure held-out accuracy if it is time to, without touching the training state."""
        if not self.examiner.due(step):
            return {}
        self.callbacks.call("before_evaluation", step)
        result = self.examiner.examine(step, learner=self.learner)
        last = step == self.config.run.max_steps
        self.recorder.evaluation("before" if step == 0 else "after" if last else f"at step {step}", result)
        if step > 0:
            self.state = self.state.with_accuracy(sum(result.averages) / len(result.averages))
        scores = {**result.metrics(), **(self._examine_test_sets(step) if self.examiner.at_end(step) else {})}
        self.callbacks.call("after_evaluation", step, scores)
        return scores

    def _examine_test_sets(self, step: int) -> dict[str, float]:
        """Measure the further test sets; their metrics carry their names."""
        metrics: dict[str, float] = {}
        when = "before" if step == 0 else "after"
        for name, result in self.examiner.examine_test_sets(step).items():
            self.recorder.say(f"test set {name}, {when}: {result.summary()}")
            own = result.metrics().items()
            metrics |= {key.replace("eval/", f"eval/{name}/", 1): value for key, value in own}
        return metrics

    def _save(self) -> None:
        now = time.monotonic()
        self.state = replace(self.state, seconds=self.state.seconds + now - self.clock)
        self.clock = now
        self.callbacks.call("before_checkpoint", self.state.step)
        # A checkpoint stands for everything before it, rollouts included.
        self.processes.lead(self.recorder.flush)
        save_state(
            self.folder.checkpoints,
            self.state,
            policy=self.policy,
            learner=self.learner,
            processes=self.processes,
        )
        self._prune()

    def _prune(self) -> None:
        best = self.state.best_step if self.config.run.keep_best else None
        keep = self.config.run.keep_last
        self.processes.lead(lambda: prune(self.folder.checkpoints, keep_last=keep, best=best))
        self.callbacks.call("after_checkpoint", self.state.step, self.folder.checkpoint_at(self.state.step))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.recorder.fail(error, kind=command_of(self.config))
            self.callbacks.call("on_run_end", self.state.step)
            self.resources.__exit__(kind, error, trace)
            return
        with self.resources:
            self._prune()  # a session killed after its last checkpoint left one too many
            if (reason := self.callbacks.control.stop_reason) is not None:
                self.recorder.say(f"a callback stopped the run{f': {reason}' if reason else ''}")
            before, after = self.examiner.before, self.examiner.after
            self.recorder.end(
                summary_of(
                    self.config,
                    self.state,
                    folder=self.folder,
                    before=before,
                    after=after,
                    test_sets=self.examiner.measured,
                    correct=correct_rule(self.task) if self.task else "",
                ),
                stats_of(self.state, before=before, after=after, test_sets=self.examiner.measured),
            )
            self.callbacks.call("on_run_end", self.state.step)
            then = resume_words(self.config, self.folder)
            self.processes.lead(lambda: self.callbacks.raise_failure(then))


def on_own_device(model: ModelConfig, processes: Processes) -> ModelConfig:
    """Of several processes on a machine with GPUs, each has one of its own."""
    if processes.count == 1 or model.device == "cpu" or not torch.cuda.is_available():
        return model
    return replace(model, device=f"cuda:{processes.local_rank}")


def settled(config: Config, start: RunStart) -> tuple[Config, str]:
    """Choose what depends on the memory that is free, and say why; a resumed run keeps what was chosen."""
    config = with_recomputing(as_launched(config), start.recomputing)
    model = replace(config.model, name=str(model_folder(config.model.name)))
    device = device_of(model.device)
    return choose_recomputing(config, shape_of(model), DeviceSpec.of(device), free=free_memory(device))
