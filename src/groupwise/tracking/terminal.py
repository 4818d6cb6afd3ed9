"""Terminal output of a run: progress state, the live panel, plain log lines and the final summary.

`open_display` chooses the live panel on a terminal or in a notebook, and plain lines elsewhere.
"""

from __future__ import annotations

import html
import io
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.live import Live
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from groupwise.tracking.number_format import duration, number, printable, share, sparkline


class ShownInterval(Protocol):
    """A measured value. `str` shows its 95 % interval, as in "41.0 % [36.8, 45.3]"; `brief` leaves it out."""

    @property
    def mean(self) -> float: ...

    def brief(self) -> str: ...

    def gain(self, since: float) -> str: ...


Scores = Mapping[str, ShownInterval]
"""The scores of one evaluation by name: greedy, avg@8, pass@8."""

FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("length", "rollout/length", number),
    ("entropy", "policy/entropy", number),
    ("tokens/s", "speed/tokens_per_second", number),
    ("truncated", "rollout/truncated", share),
    ("KL", "policy/kl", number),
    ("s/step", "time/step", number),
    ("no signal", "advantage/zero_variance", share),
    ("gap", "policy/gap", number),
    ("grad norm", "policy/grad_norm", number),
    ("loss", "sft/loss", number),
    ("held-out", "sft/held_out_loss", number),
    ("epoch", "sft/epoch", number),
)
"""Label, metric and format of the figures in the panel, in rows of three; rows without values are hidden."""

WIDTH = 78
LAYOUTS = ((18, 16, True), (18, 8, True), (18, 8, False), (18, 0, False), (7, 0, False))
"""Width of names, width of sparklines, and whether to show the first score; widest layout first."""


@dataclass(slots=True)
class Progress:
    """The progress of a run, updated by the display."""

    title: str
    total: int
    step: int
    now: float
    """Time at the end of the last step, in seconds."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    rewards: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The history of each "reward/…mean" metric."""
    evaluations: Sequence[Scores] = ()
    first: Scores = field(default_factory=dict)
    """The first evaluation, on the prompts of the last one."""
    paces: Sequence[float] = ()
    """Seconds taken by each recent step, including evaluations and checkpoints."""
    note: str = ""
    """Text at the bottom of the panel."""

    def advance(self, step: int, metrics: Mapping[str, float], *, now: float) -> None:
        """Record a finished step."""
        # Replace values instead of modifying them: another thread may be drawing the panel.
        self.paces = [*self.paces, now - self.now][-20:]
        self.step, self.now = step, now
        self.metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        rewards = dict(self.rewards)
        for name, value in self.metrics.items():
            if name.startswith("reward/") and name.endswith("/mean"):
                rewards[name] = [*rewards.get(name, ()), value]
        self.rewards = rewards

    def evaluated(self, scores: Scores, *, first: Scores | None = None, now: float) -> None:
        """Record an evaluation. Time spent before the first step does not count as step time."""
        self.evaluations = [*self.evaluations, scores]
        self.first = first or self.evaluations[0]
        if not self.paces:
            self.now = now

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated remaining time; None before the first step."""
        if not self.paces:
            return None
        pace = sum(self.paces) / len(self.paces)
        return max(0.0, pace * (self.total - self.step) - (now - self.now))

    def position(self, now: float) -> str:
        """Return the current step and the remaining time as text."""
        step = f"step {self.step}/{self.total}"
        left = self.seconds_left(now)
        if left is None:
            return f"{step} · {duration(now - self.now)} so far"
        return f"{step} · {duration(left)} left" if self.step < self.total else step

    def reward_parts(self) -> list[str]:
        """Return the names of the individual rewards."""
        return [
            name.removeprefix("reward/").removesuffix("/mean")
            for name in self.rewards
            if name != "reward/mean"
        ]


def live_panel(progress: Progress, *, now: float) -> RenderableType:
    """Render the panel, at most 80 columns wide."""
    parts: list[RenderableType] = [Text(printable(progress.title), style="bold"), bar(progress, now=now)]
    if progress.evaluations or progress.metrics:
        parts += ["", FirstFittingTable(scores(progress, *layout) for layout in LAYOUTS)]
    if progress.metrics:
        parts += ["", FirstFittingTable(figures(progress.metrics, pairs) for pairs in (3, 2, 1))]
    if progress.note:
        parts += ["", Text("\n".join(map(printable, progress.note.splitlines())), no_wrap=True)]
    return Constrain(Padding(Group(*parts), (1, 0, 0, 1)), WIDTH + 1)


class FirstFittingTable:
    """Renders the first table that fits the terminal, because a truncated number would be misread."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self.tables = tuple(tables)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update_width(10 * WIDTH)
        for table in self.tables:
            if Measurement.get(console, unbounded, table).maximum <= options.max_width:
                yield table
                return


def bar(progress: Progress, *, now: float) -> Table:
    grid = Table.grid(expand=True, padding=(0, 3, 0, 0))
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    done = ProgressBar(
        total=progress.total, completed=progress.step, complete_style="green", finished_style="green"
    )
    grid.add_row(done, progress.position(now))
    return grid


def scores(progress: Progress, names: int, courses: int, firsts: bool) -> Table:
    """Render held-out accuracy and rewards: last value, sparkline, and the first accuracy."""
    grid = Table.grid(padding=(0, 3, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(no_wrap=True, max_width=names, overflow="ellipsis")
    grid.add_column(no_wrap=True, min_width=20)
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(style="dim", no_wrap=True)
    for index, name in enumerate(progress.evaluations[-1] if progress.evaluations else ()):
        course = [evaluated[name].mean for evaluated in progress.evaluations if name in evaluated]
        last = Text(str(progress.evaluations[-1][name]), style="bold green" if index == 0 else "")
        start = ""
        if firsts and len(course) > 1 and name in progress.first:
            start = f"was {progress.first[name].brief()}"
        grid.add_row("" if index else "held-out", name, last, sparkline(course, width=courses), start)
    rewards = [("total", "reward"), *((part, f"reward/{part}") for part in progress.reward_parts())]
    for index, (label, metric) in enumerate(rewards if progress.metrics else ()):
        history = progress.rewards.get(f"{metric}/mean", ())
        value = spread(progress.metrics, metric)
        grid.add_row(
            "" if index else "reward", printable(label), value, sparkline(history, width=courses), ""
        )
    return grid


def spread(metrics: Mapping[str, float], metric: str) -> str:
    """Format a mean with its standard deviation: "0.421 ± 0.490"."""
    mean, deviation = metrics.get(f"{metric}/mean"), metrics.get(f"{metric}/std")
    if mean is None:
        return ""
    return f"{mean:.3f}" if deviation is None else f"{mean:.3f} ± {deviation:.3f}"


def figures(metrics: Mapping[str, float], pairs: int) -> Table:
    """Render the figures of the last step, with `pairs` pairs of label and number per row."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(pairs):
        grid.add_column(style="dim", no_wrap=True, min_width=9)
        grid.add_column(justify="right", no_wrap=True, min_width=9)
        grid.add_column(min_width=2)
    threes = [FIGURES[start : start + 3] for start in range(0, len(FIGURES), 3)]
    shown = [one for three in threes if any(metric in metrics for _, metric, _ in three) for one in three]
    for start in range(0, len(shown), pairs):
        cells: list[str] = []
        for label, metric, notation in shown[start : start + pairs]:
            cells += [label, notation(metrics[metric]) if metric in metrics else "", ""]
        grid.add_row(*cells)
    return grid


def plain_step(progress: Progress, *, now: float) -> str:
    """Format a step as one line, for output that is not a terminal."""
    metrics = progress.metrics
    parts = [progress.position(now)]
    if "reward/mean" in metrics:
        single = ", ".join(f"{part} {metrics[f'reward/{part}/mean']:.3f}" for part in reported(progress))
        parts.append(f"reward {metrics['reward/mean']:.3f}" + (f" ({single})" if single else ""))
    parts += [
        f"{label} {notation(metrics[metric])}" for label, metric, notation in FIGURES if metric in metrics
    ]
    if metrics.get("rollout/failed"):
        parts.append(f"failed {share(metrics['rollout/failed'])}")
    return " · ".join(parts)


def reported(progress: Progress) -> list[str]:
    """Return the rewards with a mean in the last step."""
    return [part for part in progress.reward_parts() if f"reward/{part}/mean" in progress.metrics]


def plain_scores(name: str, scores: Scores) -> str:
    """Format an evaluation as one line."""
    return " · ".join([f"evaluation {name}", *(f"{label} {score}" for label, score in scores.items())])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The contents of the final summary."""

    headline: str
    """How the run ended: "60 steps done", "stopped after step 23"."""
    seconds: float
    """Training time; 0 if nothing was saved."""
    folder: Path
    before: Scores
    """Held-out accuracy before training; empty if not measured."""
    after: Scores
    test_sets: Mapping[str, tuple[Scores, Scores]] = field(default_factory=dict)
    """Scores before and after on each further test set."""
    correct: str = ""
    """What counts as a correct answer."""
    next_commands: tuple[tuple[str, str], ...]
    """Suggested commands, each with its purpose."""


def command(*words: object) -> str:
    """Return a `groupwise` command line, quoted for the shell."""
    return shlex.join(["groupwise", *map(str, words)])


def headline(step: int, *, done: bool) -> str:
    """Return how a run ended."""
    if done:
        return f"{step} step{'s' * (step != 1)} done"
    return f"stopped after step {step}" if step else "stopped before the first step, nothing was trained"


def summary_lines(summary: RunSummary) -> Iterator[tuple[str, str]]:
    """Yield the lines of the final summary, each with its terminal style."""
    if summary.seconds:
        yield f"{summary.headline} in {duration(summary.seconds)}, saved in {summary.folder}", "bold"
    else:
        yield f"{summary.headline}; the run folder is {summary.folder}", "bold"
    if summary.after:
        yield "", ""
        yield "held-out accuracy, with 95 % intervals", "dim"
        for line in accuracy_lines(summary.before, summary.after):
            yield f"  {line}", "green"
        if summary.correct:
            yield f"  (an answer is correct if {summary.correct})", "dim"
    for name, (before, after) in summary.test_sets.items():
        yield f"test set {name}", "dim"
        for line in accuracy_lines(before, after):
            yield f"  {line}", "green"
    yield "", ""
    yield "next", "dim"
    for command, purpose in summary.next_commands:
        yield f"  {command}", "cyan"
        yield f"      {purpose}", "dim"


def accuracy_lines(before: Scores, after: Scores) -> Iterator[str]:
    """Yield a line per score: before → after, and the gain."""
    width = max(map(len, after))
    for name, score in after.items():
        if name in before:
            gain = score.gain(before[name].mean)
            yield f"{name:<{width}}  {before[name]!s:>22}  →  {score!s:<22}  {gain}"
        else:
            yield f"{name:<{width}}  {score}"


Clock = Callable[[], float]


class Display(Protocol):
    """The interface between the training loop and the terminal."""

    def start(self, total_steps: int, title: str, *, done: int = 0) -> None:
        """Start the display; `done` is the number of finished steps of a resumed run."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step."""

    def evaluation(self, name: str, scores: Scores, *, first: Scores | None = None) -> None:
        """Show held-out accuracy; `name` is "before", "at step 20" or "after".

        `first` is the first evaluation restricted to the same prompts, if it had more.
        """

    def message(self, text: str) -> None:
        """Print a permanent message."""

    def note(self, text: str, *, new: bool) -> None:
        """Show a block of text in the panel until the next note. Without a panel, print it if it is new."""

    def finish(self, summary: RunSummary) -> None:
        """Show the final summary."""

    def close(self) -> None:
        """Restore the terminal, however the run ended. Safe to call more than once."""


def open_display(stream: TextIO | None = None, *, clock: Clock = time.monotonic) -> Display:
    """Return the live panel on a terminal or in a notebook, plain lines anywhere else."""
    if stream is None and in_notebook():
        return NotebookDisplay(sys.stdout, clock=clock)
    stream = stream or sys.stdout
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return LiveDisplay(stream, clock=clock)
    return PlainDisplay(stream, clock=clock)


class PlainDisplay:
    """One line per step, without control characters."""

    def __init__(self, stream: TextIO, *, clock: Clock) -> None:
        self.stream = stream
        self.clock = clock
        self.progress: Progress | None = None
        self.closed = False

    def start(self, total_steps: int, title: str, *, done: int = 0) -> None:
        self.progress = Progress(title=title, total=total_steps, step=done, now=self.clock())
        self.message(title)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self.progress is not None, "start comes before update"
        self.progress.advance(step, metrics, now=self.clock())
        self.message(plain_step(self.progress, now=self.progress.now))

    def evaluation(self, name: str, scores: Scores, *, first: Scores | None = None) -> None:
        assert self.progress is not None, "start comes before evaluation"
        self.progress.evaluated(scores, first=first, now=self.clock())
        self.message(plain_scores(name, scores))

    def message(self, text: str) -> None:
        if self.closed:
            return
        encoding = self.stream.encoding or "utf-8"
        line = printable(text).encode(encoding, errors="replace").decode(encoding)
        try:
            print(line, file=self.stream, flush=True)
        except OSError:
            # The reader of a pipe has closed it (`| head`): the run continues without output.
            self.closed = True

    def note(self, text: str, *, new: bool) -> None:
        for line in text.splitlines() if new else ():
            self.message(line)

    def finish(self, summary: RunSummary) -> None:
        for line, _ in summary_lines(summary):
            self.message(line)

    def close(self) -> None:
        self.closed = True


def in_notebook() -> bool:
    """Whether this is a Jupyter kernel, whose cells can show a panel that changes."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class PanelDisplay:
    """A display that shows the progress of the run in a panel, and redraws it after every change."""

    clock: Clock
    progress: Progress | None

    def refresh(self) -> None:
        raise NotImplementedError

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self.progress is not None, "start comes before update"
        self.progress.advance(step, metrics, now=self.clock())
        self.refresh()

    def evaluation(self, name: str, scores: Scores, *, first: Scores | None = None) -> None:
        assert self.progress is not None, "start comes before evaluation"
        self.progress.evaluated(scores, first=first, now=self.clock())
        self.refresh()

    def note(self, text: str, *, new: bool) -> None:
        assert self.progress is not None, "start comes before note"
        self.progress.note = text
        self.refresh()


class NotebookDisplay(PanelDisplay, PlainDisplay):
    """A panel in the output of a notebook's cell, redrawn after every step; messages are printed."""

    def start(self, total_steps: int, title: str, *, done: int = 0) -> None:
        self.progress = Progress(title=title, total=total_steps, step=done, now=self.clock())
        show: Any = import_module("IPython.display").display  # untyped
        self.handle = show(self.panel(), raw=True, display_id=True)

    def refresh(self) -> None:
        if not self.closed and self.handle is not None:
            self.handle.update(self.panel(), raw=True)

    def panel(self) -> dict[str, str]:
        """Return the panel in the formats that notebooks show."""
        assert self.progress is not None, "start comes before the panel"
        output = io.StringIO()
        # Otherwise rich shows each panel in the cell by itself, one below the other.
        console = Console(file=output, width=WIDTH + 2, force_jupyter=False, force_terminal=False)
        console.print(live_panel(self.progress, now=self.clock()))
        text = output.getvalue()
        return {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}


class LiveDisplay(PanelDisplay):
    """A panel at the bottom of the terminal, redrawn once a second and after every step."""

    def __init__(self, stream: TextIO, *, clock: Clock) -> None:
        self.clock = clock
        # Keep the stream, so that code that redirects or replaces sys.stdout does not affect the panel.
        self.console = Console(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        self.progress: Progress | None = None
        self.live: Live | None = None

    def start(self, total_steps: int, title: str, *, done: int = 0) -> None:
        progress = Progress(title=title, total=total_steps, step=done, now=self.clock())
        self.progress = progress
        self.live = Live(
            get_renderable=lambda: live_panel(progress, now=self.clock()),
            console=self.console,
            refresh_per_second=1,
        )
        self.live.start()

    def message(self, text: str) -> None:
        with suppress(OSError):
            self.console.print(Text(printable(text)), soft_wrap=True)

    def finish(self, summary: RunSummary) -> None:
        self.close()
        with suppress(OSError):
            self.console.print()
            for line, style in summary_lines(summary):
                self.console.print(Text(f" {printable(line)}", style=style), soft_wrap=True)

    def refresh(self) -> None:
        # The terminal may disappear (a lost connection): the run continues without it.
        if self.live is not None:
            with suppress(OSError):
                self.live.refresh()

    def close(self) -> None:
        if self.live is not None:
            with suppress(OSError):
                self.live.stop()
            self.live = None
