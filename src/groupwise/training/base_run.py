"""What every kind of run shares: run folder, policy, engine, held-out accuracy, checkpoints, summary.

The end of the module loads the teacher and sets the user's sampling rule, for populations and agents too.
"""

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
from groupwise.engine.cpu_runner import keeps_bits
from groupwise.engine.engine import Engine
from groupwise.engine.vllm.vllm_engine import VllmEngine
from groupwise.errors import ConfigError, ServersGoneError
from groupwise.evaluate.target import find_target
from groupwise.learner.checkpoint import prune
from groupwise.learner.teacher import SELF, ModelTeacher, SelfTeacher, ServerTeacher, Teacher, is_server
from groupwise.model.device import (
    CPUThreads,
    deterministic_kernels,
    device_of,
    free_memory,
    supports_fp8,
)
from groupwise.model.grammar import compiled_grammar, rollout_grammar
from groupwise.model.load import load_for_generation, load_policy, load_reward_models
from groupwise.model.policy import Policy
from groupwise.model.resolve import model_folder
from groupwise.parallel.processes import DIVIDING, Processes, as_launched, divide, layout_of
from groupwise.records import Rollout, derive_seed
from groupwise.report.model_card import CardSubject, model_card
from groupwise.rewards.llm_judge import RewardModel
from groupwise.tasks import Split, Task, UserFunctions
from groupwise.tasks.task import correct_rule
from groupwise.tasks.user_code import code_of
from groupwise.tracking.run_folder import LOGGER
from groupwise.training.callbacks import Callbacks, RunControl
from groupwise.training.evaluator import Evaluator
from groupwise.training.recorder import NullRecorder, Recorder
from groupwise.training.resources.model_shape import shape_of
from groupwise.training.resources.run_estimate import DeviceSpec, choose_recomputing
from groupwise.training.resume import (
    RunStart,
    TrainedState,
    command_of,
    same_code,
    same_data,
    save_state,
    with_recomputing,
)
from groupwise.training.run_end import Interrupt, resume_words, stats_of, summary_of

ENGINE_METHODS = ("generate", "ready", "make_room", "release")


class BaseRun(ABC):
    """A run, used as a context manager: entering opens its folder, leaving it writes the summary.

    A subclass reads its data in `read_data` and creates its learner in `make_parts`.
    """

    task: Task | None
    """The task that is evaluated. None: only the loss is measured."""
    learner: TrainedState
    evaluator: Evaluator
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
            resources.push(start.withdraw_after)
            resources.enter_context(start.lock)
            recomputing = ""
            with self.processes.together():
                self.split = self.read_data()
                data = same_data(start.state.data, self.split.fingerprint)
                code = same_code(start.state.code, self.code())
                self.state = replace(start.state, data=data, code=code)
                config, recomputing = settled(config, start)
            # Free memory may differ between processes: all use the leader's choice.
            config, recomputing = self.processes.gather((config, recomputing))[0]
            self.config = config
            self.threads = self._cpu_threads(resources)
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
                self._build(start, resources)
            self.processes.lead(self._begin)
            if start.starts_again:
                self.recorder.say("the run was stopped before its first checkpoint; starting again")
            if start.parent is not None:
                self.recorder.say(
                    f"{start.parent} continues after step {start.state.step} in a new folder: "
                    f"{self.folder.path}"
                )
            tell = self.recorder.say if config.model.gradient_checkpointing else LOGGER.info
            tell(recomputing)
            for notice in (*config.notices(), *self.policy.notices(), *self.data_notices()):
                self.recorder.say(notice)
            if self.evaluator.before is not None:
                self.recorder.evaluation("before", self.evaluator.before)
            self.callbacks.control.policy = self.policy
            self.resources = resources.pop_all()
        self.stopping = False
        """Whether a process received a request to stop. All processes have the same value after each step."""
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
        """Read the data before the model is loaded, so that mistakes in it are reported at once."""

    def early_warnings(self) -> Iterable[str]:
        """Return warnings that are known before the model is loaded."""
        return ()

    @abstractmethod
    def data_notices(self) -> Iterator[str]:
        """Yield notices about the data."""

    @abstractmethod
    def make_parts(self) -> None:
        """Create `learner`, `evaluator` and the other parts of a step from the policy and the engine."""

    def _build(self, start: RunStart, resources: ExitStack) -> None:
        """Create the policy, the engine and the parts of a step, and restore them from a checkpoint."""
        config = self.config
        model = on_own_device(config.model, self.processes)
        bfloat16 = model.dtype != "float32"
        config.engine.check_fp8(supported=supports_fp8(device_of(model.device)), bfloat16=bfloat16)
        resources.enter_context(deterministic_kernels(device_of(model.device), on=config.run.deterministic))
        torch.manual_seed(derive_seed(config.run.seed, "adapters"))
        reference = config.run.kind == "grpo" and config.algo.beta > 0
        self.policy = load_policy(model, config.lora, trained=start.checkpoint, reference=reference)
        if self.policy.unpacked_bytes and not self.policy.has_adapter:
            raise ConfigError(f"the weights of {config.model.name} are quantized: train adapters (lora.r=16)")
        if self.task is not None:
            load_reward_models(self.task.rewards, self.policy.device)
        layout = layout_of(config.run)
        if self.processes.count > 1 and layout in DIVIDING:
            divide(self.policy, layout)
        self.engine = self._make_engine(resources)
        self.make_parts()
        start.restore(self.learner)
        self.evaluator.recall(start.state)

    def _make_engine(self, resources: ExitStack) -> Engine | VllmEngine:
        if self.config.engine.kind == "own":
            return Engine(self.policy, self.config.engine)
        if self.config.engine.kind != "vllm":
            return self._make_custom_engine(self.config.engine)
        named, own = self.config.engine.exchange, self.folder.path / "serving"
        if not named and self.processes.leader:  # removes what a killed session left there, too
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

    def _make_custom_engine(self, config: EngineConfig) -> Engine:
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
        """Yield the remaining steps: a resumed run continues here, after its last checkpoint.

        A new run is evaluated before its first step. A signal or a callback ends the steps early.
        """
        self.callbacks.call("on_run_start", self.state.step)
        self.stopping = self._asked_to_stop()
        self._adapt_threads()
        if self.state.step == 0 and not self.stopping:
            self.recorder.baseline(self.evaluate(0))
            self.stopping = self._asked_to_stop()
        while self.state.step < self.config.run.max_steps and not self.stopping:
            self._adapt_threads()
            yield self.state.step + 1

    def _asked_to_stop(self) -> bool:
        """Whether a signal or a callback requested a stop in any process; equal in all processes."""
        return self.processes.any(self.interrupt.requested or self.callbacks.stopping)

    def end_step(self, step: int, *, cursor: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Log the step; evaluate and save a checkpoint if they are due. Return the evaluation metrics."""
        self.state = replace(self.state, step=step, cursor=cursor, updates=self.learner.updates)
        measured = self.evaluate(step)
        self.processes.lead(lambda: self.recorder.step(step, {**metrics, **measured}))
        run = self.config.run
        best = run.keep_best and step == self.state.best_step
        self.stopping = self._asked_to_stop()
        if step == run.max_steps or step % run.save_every == 0 or best or self.stopping:
            self._save()
            # A callback may request a stop when it is notified of the checkpoint.
            self.stopping = self._asked_to_stop() if self.callbacks.present else self.stopping
        return measured

    def _adapt_threads(self) -> None:
        """Use fewer threads while other processes need the cores, and say so the first time."""
        if self.threads is not None and (notice := self.threads.adapt()):
            self.recorder.say(notice)

    def _cpu_threads(self, resources: ExitStack) -> CPUThreads | None:
        """Return what adapts the number of threads: only for a single process on a CPU."""
        if device_of(self.config.model.device).type != "cpu" or self.processes.count > 1:
            return None
        threads = CPUThreads(self._keeps_bits)
        resources.callback(threads.restore)
        return threads

    def _keeps_bits(self, threads: int) -> bool:
        """Whether the run computes the same bits with so many threads. Code and models of others may not."""
        rewards = () if self.task is None else self.task.rewards.values()
        unknown = (
            self.engine_maker is not None
            or self.callbacks.present
            or self.policy.logits_processor is not None
            or ":" in self.config.algo.loss
            or self.config.algo.teacher not in (None, SELF)
            or any(isinstance(reward, RewardModel) for reward in rewards)
        )
        return not unknown and keeps_bits(self.policy, threads=threads)

    def evaluate(self, step: int) -> dict[str, float]:
        """Measure held-out accuracy if an evaluation is due. The training state does not change."""
        if not self.evaluator.due(step):
            return {}
        self.callbacks.call("before_evaluation", step)
        result = self.evaluator.evaluate(step, learner=self.learner)
        last = step == self.config.run.max_steps
        self.recorder.evaluation("before" if step == 0 else "after" if last else f"at step {step}", result)
        if step > 0:
            self.state = self.state.with_accuracy(sum(result.averages) / len(result.averages))
        scores = {
            **result.metrics(),
            **(self._evaluate_test_sets(step) if self.evaluator.at_end(step) else {}),
        }
        self.callbacks.call("after_evaluation", step, scores)
        return scores

    def _evaluate_test_sets(self, step: int) -> dict[str, float]:
        """Measure the further test sets; their metrics carry their names."""
        metrics: dict[str, float] = {}
        when = "before" if step == 0 else "after"
        for name, result in self.evaluator.evaluate_test_sets(step).items():
            self.recorder.say(f"test set {name}, {when}: {result.summary()}")
            own = result.metrics().items()
            metrics |= {key.replace("eval/", f"eval/{name}/", 1): value for key, value in own}
        return metrics

    def _save(self) -> None:
        now = time.monotonic()
        self.state = replace(self.state, seconds=self.state.seconds + now - self.clock)
        self.clock = now
        self.callbacks.call("before_checkpoint", self.state.step)
        # Everything before a checkpoint must be on disk, rollouts included.
        self.processes.lead(self.recorder.flush)
        save_state(
            self.folder.checkpoints,
            self.state,
            policy=self.policy,
            learner=self.learner,
            processes=self.processes,
            card=self._card,
        )
        self._prune()
        self.callbacks.call("after_checkpoint", self.state.step, self.folder.checkpoint_at(self.state.step))

    def _card(self) -> str:
        """Return the model card of the policy, with the last evaluation."""
        config, rank = self.config, self.config.lora.r or 0
        return model_card(
            CardSubject(
                name=self.folder.name, base=config.model.name, rank=rank, config=config, run=self.folder
            )
        )

    def _prune(self) -> None:
        best = self.state.best_step if self.config.run.keep_best else None
        keep = self.config.run.keep_last
        self.processes.lead(lambda: prune(self.folder.checkpoints, keep_last=keep, best=best))

    def _save_intact_state(self, error: BaseException) -> None:
        """Save the last step if the run ends because all servers are gone: nothing is wrong with its state.

        Several processes do not: those that wait for another one's answer could not take part.
        """
        unsaved = self.state.step > 0 and not self.folder.checkpoint_at(self.state.step).is_dir()
        if isinstance(error, ServersGoneError) and unsaved and self.processes.count == 1:
            self._save()
            self.recorder.say(f"saved a checkpoint after step {self.state.step}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._save_intact_state(error)
            self.recorder.fail(error, kind=command_of(self.config))
            self.callbacks.call("on_run_end", self.state.step)
            self.resources.__exit__(kind, error, trace)
            return
        with self.resources:
            self._prune()  # a session killed after its last checkpoint may leave one too many
            if (reason := self.callbacks.control.stop_reason) is not None:
                self.recorder.say(f"a callback stopped the run{f': {reason}' if reason else ''}")
            before, after = self.evaluator.before, self.evaluator.after
            self.recorder.end(
                summary_of(
                    self.config,
                    self.state,
                    folder=self.folder,
                    before=before,
                    after=after,
                    test_sets=self.evaluator.measured,
                    correct=correct_rule(self.task) if self.task else "",
                ),
                stats_of(self.state, before=before, after=after, test_sets=self.evaluator.measured),
            )
            self.callbacks.call("on_run_end", self.state.step)
            then = resume_words(self.config, self.folder)
            self.processes.lead(lambda: self.callbacks.raise_failure(then))


def on_own_device(model: ModelConfig, processes: Processes) -> ModelConfig:
    """Give each process its own GPU if there are several processes and GPUs."""
    if processes.count == 1 or model.device == "cpu" or not torch.cuda.is_available():
        return model
    return replace(model, device=f"cuda:{processes.local_rank}")


def settled(config: Config, start: RunStart) -> tuple[Config, str]:
    """Choose the settings that depend on free memory, and explain the choice. A resumed run keeps them."""
    config = with_recomputing(as_launched(config), start.recomputing)
    model = replace(config.model, name=str(model_folder(config.model.name)))
    device = device_of(model.device)
    return choose_recomputing(config, shape_of(model), DeviceSpec.of(device), free=free_memory(device))


def use_sampling_rules(policy: Policy, config: Config, functions: UserFunctions) -> None:
    """Give the grammar and the user's sampling rule to the policy. Sampler and trainer read them there."""
    policy.grammar = compiled_grammar(config, policy, policy.end_tokens)
    rule, name = functions.logits_processor, config.rollout.logits_processor
    if rule is not None and name is not None:
        policy.use_logits_processor(name, rule)


def check_single_turn(config: Config, *, multi_turn: bool) -> None:
    """Refuse settings that require tasks of one turn.

    A grammar holds for one turn. A policy that teaches itself is shown a right answer for one turn only.
    """
    rollout_grammar(config, multi_turn=multi_turn)
    if config.algo.teacher == SELF and multi_turn:
        raise ConfigError("algo.teacher=self requires a task of one turn; name another model as teacher")


def load_teacher(
    config: Config,
    policy: Policy,
    *,
    is_right: Callable[[Rollout], bool],
    processes: Processes | None = None,
) -> Teacher:
    """Load the teacher of on-policy distillation that the settings name.

    `is_right` tells which answers the policy may be shown as its own teacher.
    """
    name, sampling = config.algo.teacher, config.rollout.sampling
    assert name is not None
    if name == SELF:
        return SelfTeacher(policy, sampling, is_right=is_right)
    if is_server(name):
        return ServerTeacher(name, seconds=config.engine.request_seconds, patience=config.engine.patience)
    target = find_target(name)
    model = replace(
        on_own_device(config.model, processes or Processes()), name=target.base or config.model.name
    )
    teacher = load_for_generation(model, rank=target.rank, trained=target.trained)
    return ModelTeacher(teacher, sampling, student=policy, name=name)
