"""Log a run: to the terminal, to the files of its folder, and to trackers."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from groupwise.config import Config, dump_config
from groupwise.evaluate.held_out import Evaluation, as_text
from groupwise.files import write_atomically
from groupwise.learner.checkpoint import remove_leftovers
from groupwise.records import Example, ExampleStream, Group, Rollout
from groupwise.report.alarms import alarms
from groupwise.report.run_reader import EvaluationFiles, MetricsTail
from groupwise.report.static_report import write_all
from groupwise.tracking.rollout_files import RolloutSchema, write_rollouts, write_updates
from groupwise.tracking.run_files import (
    BackgroundWriter,
    MetricsFile,
    as_ranges,
    remove_steps_after,
    write_completions,
)
from groupwise.tracking.run_folder import RunFolder, log_to
from groupwise.tracking.terminal import Display, PlainDisplay, RunSummary, command, open_display
from groupwise.tracking.trackers import Tracker, open_trackers
from groupwise.training.collector import Batch

logger = logging.getLogger(__name__)

SAMPLE_GROUPS = 4
"""Number of groups whose best and worst rollout are sent to trackers at an evaluation."""


class Recorder:
    """Shows the run on the terminal. Writes files only after `begin`."""

    def __init__(self, folder: RunFolder, *, title: str, total: int, done: int) -> None:
        self.folder = folder
        self.metrics = MetricsFile(folder.metrics)
        self.rows = MetricsTail(folder.metrics).rows
        self.measured = EvaluationFiles(folder).read
        self.rollout_schema = RolloutSchema(folder=folder.rollouts)
        self.trackers: list[Tracker] = []
        self.first: Evaluation | None = None
        """The first evaluation: the baseline of later ones."""
        self.shown_alarms: set[str] = set()
        """Names of alarms that were shown."""
        self.last_error: str | None = None
        """Error of the most recent failed rollout."""
        self.reports = False
        self.writer = BackgroundWriter()
        self.resources = ExitStack()
        self.resources.callback(self.writer.close)
        self.display: Display = open_display()
        self.resources.callback(self.display.close)
        self.display.start(total, title, done=done)

    def begin(self, config: Config, *, done: int) -> None:
        """Open the folder's files. Remove what a killed session wrote after step `done`."""
        by_step = (self.folder.rollouts, self.folder.updates, self.folder.completions)
        for folder in (self.folder.path, self.folder.evaluations, self.folder.plots, *by_step):
            for leftover in folder.glob(".*.tmp-*"):
                leftover.unlink()
        remove_leftovers(self.folder.checkpoints)
        lost = self.metrics.truncate_after(done)
        for folder in by_step:
            remove_steps_after(folder, done)
        write_atomically(self.folder.config, dump_config(config))
        self.reports = config.track.report
        self.resources.enter_context(log_to(self.folder.log))
        self.trackers = open_trackers(
            config.track,
            run_name=self.folder.name,
            config=asdict(config),
            folder=self.folder.path,
            resumed_from=done or None,
            warn=self.warn,
        )
        for tracker in self.trackers:
            self.resources.callback(tracker.finish)
        logger.info("%s step %d", "resumed after" if done else "started at", done)
        if lost:
            self.warn(
                f"{self.folder.metrics} has no line for steps {as_ranges(lost)}: they were lost, and curves "
                "have a gap there; training is not affected"
            )

    def say(self, sentence: str) -> None:
        """Show a notice on the terminal and log it."""
        self.display.message(sentence)
        logger.info(sentence)

    def warn(self, sentence: str) -> None:
        """Show and log a failure that does not stop the run."""
        self.display.message(sentence)
        logger.warning(sentence)

    def warn_lines(self, text: str) -> None:
        """Show and log a warning of several lines, such as a traceback."""
        for line in text.splitlines():
            self.display.message(line)
        logger.warning(text)

    def expect(self, rewards: Iterable[str], examples: Sequence[Example] | ExampleStream) -> None:
        """Announce what rollouts will hold, so that their files have the same columns from the first on."""
        self.rollout_schema.rewards = tuple(rewards)
        if not isinstance(examples, ExampleStream):
            self.rollout_schema.examples = examples

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        self.writer.submit(write_rollouts, self.folder.rollouts_at(step), step, groups, self.rollout_schema)

    def updates(self, step: int, seen: Mapping[tuple[int, int], Sequence[float]]) -> None:
        self.writer.submit(write_updates, self.folder.updates_at(step), seen)

    def completions(self, step: int, batch: Batch, *, is_perfect: Callable[[Rollout], bool]) -> None:
        path = self.folder.completions_at(step)
        self.writer.submit(write_completions, path, batch.all_groups, is_perfect=is_perfect)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.append(step, metrics)
        self.display.update(step, metrics)
        logger.info(
            "step %d %s", step, json.dumps({name: round(value, 5) for name, value in metrics.items()})
        )
        for tracker in self.trackers:
            tracker.log(step, metrics)
        self.alarms()

    def alarms(self) -> None:
        """Show each alarm when it is first raised."""
        for alarm in alarms(self.rows(), self.measured()):
            if alarm.active and alarm.name not in self.shown_alarms:
                self.shown_alarms.add(alarm.name)
                reason = f" One of them: {self.last_error}" if alarm.name == "failures" else ""
                self.warn(f"alarm at step {alarm.last}: {alarm.title}. {alarm.saw}{reason}")

    def evaluation(self, when: str, result: Evaluation) -> None:
        # An evaluation during the run has fewer prompts than the first one: compare the common ones only.
        self.first = self.first or result
        same = self.first.on(result.examples)
        first = same.scores() if same.examples else None
        self.display.evaluation(when, result.scores(), first=first)
        logger.info("evaluation %s: %s", when, result.summary())

    def baseline(self, metrics: Mapping[str, float]) -> None:
        """Send the accuracy before training to trackers as step 0."""
        for tracker in self.trackers:
            tracker.log(0, metrics)

    def samples(self, step: int, batch: Batch) -> None:
        if batch.all_groups:
            self.display.note(sample_note(step, batch.all_groups[0].rollouts[0]), new=True)
        for tracker in self.trackers:
            tracker.samples(step, sample_rows(batch))

    def flush(self) -> None:
        """Wait until all pending writes are on disk."""
        self.writer.flush()

    def end(self, summary: RunSummary, stats: Mapping[str, object]) -> None:
        self.flush()
        raised = [asdict(alarm) for alarm in alarms(self.rows(), self.measured())]
        ended = {**stats, "history": history_of(self.rows()), "alarms": raised}
        if self.reports:
            self.report(ended)
        # Last, because it marks the run as finished: a run killed before it writes its report on resume.
        write_atomically(self.folder.stats, json.dumps(ended, indent=1))
        self.display.finish(summary)

    def report(self, stats: Mapping[str, object]) -> None:
        """Write report and plots. A failure here is logged and does not fail the run."""
        try:
            write_all(self.folder, own=True, stats=stats)
        except Exception as error:
            self.warn(
                f"the report is not complete: {error}; {command('report', self.folder.path)} tries again"
            )

    def fail(self, error: BaseException, *, kind: str) -> None:
        """Log why the run failed, and say how to resume it."""
        logger.error("stopped by %s: %s", type(error).__name__, error)
        if isinstance(error, KeyboardInterrupt):
            resume = command(kind, "--resume", self.folder.path)
            self.display.message(f"stopped at once; resume with {resume}")

    def close(self) -> None:
        self.resources.close()


def sample_rows(batch: Batch) -> list[dict[str, Any]]:
    """Return the best and the worst rollout of each of the first groups, for the tables of trackers."""
    rollouts = [rollout for group in batch.all_groups[:SAMPLE_GROUPS] for rollout in extremes(group)]
    rewards = dict.fromkeys(name for rollout in rollouts for name in rollout.rewards)
    logged = dict.fromkeys(name for rollout in rollouts for name in rollout.extra)
    return [
        {
            "prompt": as_text(rollout),
            "answer": rollout.transcript,
            "reward": rollout.reward,
            **{f"reward/{name}": rollout.rewards.get(name) for name in rewards},
            "advantage": round(rollout.advantage, 4),
            **{f"extra/{name}": as_cell(rollout.extra.get(name)) for name in logged},
            "error": rollout.error or "",
        }
        for rollout in rollouts
    ]


def extremes(group: Group) -> list[Rollout]:
    """Return the rollouts with the highest and the lowest reward, or the first one if none is valid."""
    ranked = sorted(group.valid, key=lambda rollout: rollout.reward)
    if not ranked:
        return [group.rollouts[0]]
    return [ranked[-1], ranked[0]] if len(ranked) > 1 else ranked


def as_cell(value: Any) -> Any:
    """Return a value as the tables of trackers take it."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


SAMPLE_LINES, SAMPLE_WIDTH = 4, 76
"""Size of the answer on the terminal."""


def sample_note(step: int, rollout: Rollout) -> str:
    """Return the beginning and the end of an answer of a step, to read on the terminal."""
    scored = f"reward {rollout.reward:.3g}" if rollout.error is None else "not scored"
    lines = [line for line in rollout.transcript.splitlines() if line.strip()]
    if len(lines) > SAMPLE_LINES:
        lines = [*lines[: SAMPLE_LINES - 2], "…", lines[-1]]
    shown = [line if len(line) <= SAMPLE_WIDTH else f"{line[: SAMPLE_WIDTH - 1]}…" for line in lines]
    return "\n".join([f"an answer of step {step}, {scored}:", *(f"  {line}" for line in shown)])


def history_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Return loss, KL and rewards as lists over the steps, for programs that read training_stats.json."""
    names = sorted({name for row in rows for name in row})
    rewards = {
        "reward" if name == "reward/mean" else name.removesuffix("/mean"): name
        for name in names
        if name.startswith("reward/") and name.endswith("/mean")
    }
    kept = {"step": "step", "loss": "policy/loss", "sft_loss": "sft/loss", "kl": "policy/kl", **rewards}
    return {key: [row.get(name) for row in rows] for key, name in kept.items() if name in names}


class NullRecorder(Recorder):
    """Records nothing: for processes other than the leader."""

    def __init__(self) -> None:
        self.display = PlainDisplay(sys.stdout, clock=time.monotonic)
        self.display.close()
        self.last_error = None

    def begin(self, config: Config, *, done: int) -> None: ...

    def say(self, sentence: str) -> None: ...

    def warn(self, sentence: str) -> None: ...

    def warn_lines(self, text: str) -> None: ...

    def expect(self, rewards: Iterable[str], examples: Sequence[Example] | ExampleStream) -> None: ...

    def rollouts(self, step: int, groups: Sequence[Group]) -> None: ...

    def updates(self, step: int, seen: Mapping[tuple[int, int], Sequence[float]]) -> None: ...

    def completions(self, step: int, batch: Batch, *, is_perfect: Callable[[Rollout], bool]) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluation(self, when: str, result: Evaluation) -> None: ...

    def baseline(self, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, batch: Batch) -> None: ...

    def flush(self) -> None: ...

    def end(self, summary: RunSummary, stats: Mapping[str, object]) -> None: ...

    def fail(self, error: BaseException, *, kind: str) -> None: ...

    def close(self) -> None: ...
