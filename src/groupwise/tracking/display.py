"""The terminal while a run goes on: a live panel, or one plain line a step where there is no terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from groupwise.tracking.notation import printable
from groupwise.tracking.panel import Progress, Scores, live_panel, plain_scores, plain_step
from groupwise.tracking.summary import Summary, summary_lines

Clock = Callable[[], float]


class Display(Protocol):
    """What the training loop tells whoever watches."""

    def start(self, total_steps: int, title: str, *, done: int = 0) -> None:
        """Begin; `done` steps lie behind a resumed run."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step ended."""

    def evaluation(self, name: str, scores: Scores, *, first: Scores | None = None) -> None:
        """Held-out accuracy was measured: `name` is "before", "at step 20" or "after".

        `first`: the first evaluation on the same prompts, where that one had others too.
        """

    def message(self, text: str) -> None:
        """Say something that stays on the screen."""

    def note(self, text: str, *, new: bool) -> None:
        """Show a block of text in the panel until the next one; where there is no panel, if there is news."""

    def finish(self, summary: Summary) -> None:
        """End with the final block."""

    def close(self) -> None:
        """Give the terminal back, however the run ended; more than once does no harm."""


def open_display(stream: TextIO | None = None, *, clock: Clock = time.monotonic) -> Display:
    """The live panel on a terminal, plain lines anywhere else."""
    stream = stream or sys.stdout
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return LiveDisplay(stream, clock=clock)
    return PlainDisplay(stream, clock=clock)


class PlainDisplay:
    """One line a step, without a single control character."""

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
            # The reader of a pipe went away (`| head`): the run goes on, its files tell the rest.
            self.closed = True

    def note(self, text: str, *, new: bool) -> None:
        for line in text.splitlines() if new else ():
            self.message(line)

    def finish(self, summary: Summary) -> None:
        for line, _ in summary_lines(summary):
            self.message(line)

    def close(self) -> None:
        self.closed = True


class LiveDisplay:
    """A panel at the bottom of the terminal, redrawn once a second and after every step."""

    def __init__(self, stream: TextIO, *, clock: Clock) -> None:
        self.clock = clock
        # A stream of its own: whoever silences or replaces sys.stdout meanwhile does not reach the panel.
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

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self.progress is not None, "start comes before update"
        self.progress.advance(step, metrics, now=self.clock())
        self.refresh()

    def evaluation(self, name: str, scores: Scores, *, first: Scores | None = None) -> None:
        assert self.progress is not None, "start comes before evaluation"
        self.progress.evaluated(scores, first=first, now=self.clock())
        self.refresh()

    def message(self, text: str) -> None:
        with suppress(OSError):
            self.console.print(Text(printable(text)), soft_wrap=True)

    def note(self, text: str, *, new: bool) -> None:
        assert self.progress is not None, "start comes before note"
        self.progress.note = text
        self.refresh()

    def finish(self, summary: Summary) -> None:
        self.close()
        with suppress(OSError):
            self.console.print()
            for line, style in summary_lines(summary):
                self.console.print(Text(f" {printable(line)}", style=style), soft_wrap=True)

    def refresh(self) -> None:
        # A terminal can go away under a run (a lost connection): the run goes on without it.
        if self.live is not None:
            with suppress(OSError):
                self.live.refresh()

    def close(self) -> None:
        if self.live is not None:
            with suppress(OSError):
                self.live.stop()
            self.live = None
