"""The end of a run: Ctrl-C, SIGTERM, full disks, training_stats.json, and the summary on the terminal.

The first signal ends the run after the current step, a second at once.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType, TracebackType

from groupwise.config import Config
from groupwise.config.schema import NO_TASK
from groupwise.errors import CheckpointError, RemoteRankError
from groupwise.evaluate.held_out import Evaluation
from groupwise.tasks import is_loadable
from groupwise.tracking.run_folder import RunFolder
from groupwise.tracking.terminal import RunSummary, command, headline
from groupwise.training.resume import RunState, command_of


class Interrupt:
    """While active, the first SIGINT or SIGTERM is deferred and sets `requested`; a second stops at once.

    A third has the system's default effect, which code that swallows exceptions cannot prevent. On exit the
    deferred signal has its usual effect, so that the caller sees an interrupted run: a KeyboardInterrupt, or
    the end of the process.
    """

    def __init__(self, say: Callable[[str], None], *, launched: bool = False) -> None:
        self.deferred: int | None = None
        self._echoes = 1 if launched else 0
        """Whether a launcher forwards signals that the terminal has sent already."""
        self._say = say
        self._before: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        return self.deferred is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if self._echoes:
                self._echoes -= 1
                return
            signal.signal(number, signal.SIG_DFL)
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            signal.raise_signal(number)
        self.deferred = number
        with suppress(RuntimeError):  # the signal arrived while another line was printed
            self._say("stopping after this step and saving; Ctrl-C again stops now and loses it")

    def end_hanging_step(self) -> None:
        """Act on the deferred signal now, because a call hangs."""
        if self.deferred is not None and threading.current_thread() is threading.main_thread():
            signal.signal(
                self.deferred,
                signal.default_int_handler if self.deferred == signal.SIGINT else signal.SIG_DFL,
            )
            signal.raise_signal(self.deferred)

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # other threads cannot catch signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self.deferred is not None and error is None:
            signal.raise_signal(self.deferred)


FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))
"""The system's error text. Libraries quote it in errors of many types, with and without its number."""


@contextmanager
def explain_full_disk(folder: RunFolder, config: Config) -> Iterator[None]:
    """Turn errors of a full disk into one sentence that says how to resume the run."""
    try:
        yield
    except RemoteRankError:
        raise  # the leader reports it
    except Exception as error:
        reason = next((words for words in FULL if words in str(error)), None)
        if reason is None:
            raise
        resume = command(command_of(config), "--resume", folder.path)
        then = f"then resume with {resume}" if folder.config.exists() else "and start again"
        raise CheckpointError(f"cannot write {folder.path}: {reason}; make room, {then}") from error


TestSets = Mapping[str, tuple[Evaluation | None, Evaluation | None]]
"""Each further test set's evaluations before and after training."""


def stats_of(
    state: RunState, *, before: Evaluation | None, after: Evaluation | None, test_sets: TestSets
) -> dict[str, object]:
    """Return what training_stats.json holds, without the history of the steps."""
    sets = {
        name: {"before": one.metrics() if one else None, "after": other.metrics() if other else None}
        for name, (one, other) in test_sets.items()
    }
    return {
        "steps": state.step,
        "optimizer_steps": state.updates,
        "seconds": round(state.seconds, 3),
        "best_step": state.best_step,
        "before": before.metrics() if before else None,
        "after": after.metrics() if after else None,
        **({"test_sets": sets} if sets else {}),
    }


def summary_of(
    config: Config,
    state: RunState,
    *,
    folder: RunFolder,
    before: Evaluation | None,
    after: Evaluation | None,
    test_sets: TestSets | None = None,
    correct: str = "",
) -> RunSummary:
    """Return the summary that the terminal shows last."""
    done = state.step >= config.run.max_steps
    return RunSummary(
        headline=headline(state.step, done=done),
        seconds=state.seconds,
        folder=folder.path,
        before=before.scores() if before else {},
        after=after.scores() if after else {},
        test_sets={
            name: (one.scores() if one else {}, other.scores())
            for name, (one, other) in (test_sets or {}).items()
            if other
        },
        correct=correct,
        next_commands=next_commands(config, folder, done=done)
        if state.step
        else (beginning(config, folder),),
    )


def beginning(config: Config, folder: RunFolder) -> tuple[str, str]:
    """Return the commands for a run that has no checkpoint yet."""
    if made_in_python(config):
        words = f"groupwise.train(task, resume={str(folder.path)!r})"
        return words, "starts again, in the program that defines the task"
    return command(command_of(config), "--resume", folder.path), "starts again"


def resume_words(config: Config, folder: RunFolder) -> str:
    """Say how to resume a run that stopped early."""
    if made_in_python(config):
        return f"groupwise.train(task, resume={str(folder.path)!r}) resumes it"
    return f"{command(command_of(config), '--resume', folder.path)} resumes it"


def made_in_python(config: Config) -> bool:
    """Whether the task is defined in the caller's program, so that no command can load it."""
    return config.run.kind != "sft" and not is_loadable(config.task.name)


def next_commands(config: Config, folder: RunFolder, *, done: bool) -> tuple[tuple[str, str], ...]:
    """Return commands to try, each with what it does; one where the task is the caller's own."""
    if config.run.kind == "sft":
        return after_warm_start(config, folder, done=done)
    if made_in_python(config):
        words = command("eval", folder.path, "--task", "FILE.py")
        measure = (words, "measures it again; FILE.py is the file that defines the task")
        resume = f"groupwise.train(task, resume={str(folder.path)!r})"
        if done:
            return measure, *(with_adapter(config, folder) if config.lora.r else ())
        return (resume, "continues from here, in the program that defines the task"), measure
    resume = command("train", "--resume", folder.path)
    look = (command("watch", folder.path), "shows it in the browser: curves, groups, tokens, alarms")
    measure = (command("eval", folder.path), "measures it again on held-out examples")
    again = (same_again(config, folder), "the same with other noise: is the gain real?")
    if not done:
        return (resume, "continues from here"), look, measure
    if config.lora.r:
        return look, *with_adapter(config, folder), again
    if config.optim.schedule != "constant":
        return look, measure, again
    longer = (f"{resume} run.max_steps={2 * config.run.max_steps}", "trains on from here")
    return look, longer, again


def with_adapter(config: Config, folder: RunFolder) -> tuple[tuple[str, str], ...]:
    """Return what to do with an adapter: try it, serve it, or merge it into its model."""
    adapter = folder.checkpoint_at(config.run.max_steps)
    merge = command("merge", folder.path, "--output-path", f"{folder.path}-merged")
    return (
        (command("chat", folder.path), f"talks to it; the adapter is in {adapter}"),
        (command("serve", folder.path), "serves it through an OpenAI-compatible API"),
        (merge, "adds the adapter into its model, as a folder for transformers, vLLM and others"),
    )


def after_warm_start(config: Config, folder: RunFolder, *, done: bool) -> tuple[tuple[str, str], ...]:
    """Return the commands for a warm start: continue with GRPO."""
    if not done:
        return ((command("sft", "--resume", folder.path), "continues from here"),)
    model = folder.checkpoint_at(config.run.max_steps)
    task = [] if config.task.name == NO_TASK else task_words(config)
    if config.lora.r:
        merged = f"{folder.path}-merged"
        return (
            (command("merge", folder.path, "--output-path", merged), "adds the adapter into its model"),
            (command("train", "--model", merged, *task), "reinforces what it learned"),
        )
    return ((command("train", "--model", model, *task), "reinforces what it learned"),)


def task_words(config: Config) -> list[str]:
    """Return the command-line arguments that name the task and its options."""
    options = (f"task.options.{name}={value}" for name, value in config.task.options.items())
    return ["--task", config.task.name, *options]


def same_again(config: Config, folder: RunFolder) -> str:
    """Return the command for a run with the same settings and the next seed."""
    seed = config.run.seed + 1
    usual = replace(config, run=replace(config.run, seed=0)) == Config().resolve()
    settings = () if usual else ("--config", folder.config)
    name = () if config.run.name is None else ("--run-name", f"{config.run.name}-seed-{seed}")
    return command("train", *settings, "--seed", seed, *name)
