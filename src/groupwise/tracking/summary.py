"""The last words of a run: what it reached, where it lies, what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from groupwise.tracking.notation import duration
from groupwise.tracking.panel import Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Everything the final block says."""

    headline: str
    """How it ended: "60 steps done", "stopped at step 23"."""
    seconds: float
    """Spent training; 0 when nothing was saved yet."""
    folder: Path
    before: Scores
    """Held-out accuracy before training; empty when it was not measured."""
    after: Scores
    next_commands: tuple[tuple[str, str], ...]
    """Each with what it does."""


def command(*words: object) -> str:
    """A `groupwise` command as the shell reads it, whatever the names in it."""
    return shlex.join(["groupwise", *map(str, words)])


def headline(step: int, *, done: bool) -> str:
    """Say how a run ended."""
    if done:
        return f"{step} step{'s' * (step != 1)} done"
    return f"stopped after step {step}" if step else "stopped before the first step: nothing is trained yet"


def summary_lines(summary: Summary) -> Iterator[tuple[str, str]]:
    """The final block, line by line: the text, and the style it takes on a terminal."""
    if summary.seconds:
        yield f"{summary.headline} in {duration(summary.seconds)}, saved in {summary.folder}", "bold"
    else:
        yield f"{summary.headline}, its folder is {summary.folder}", "bold"
    if summary.after:
        yield "", ""
        yield "held-out accuracy, with 95 % intervals", "dim"
        for line in accuracy_lines(summary.before, summary.after):
            yield f"  {line}", "green"
    yield "", ""
    yield "next", "dim"
    for command, purpose in summary.next_commands:
        yield f"  {command}", "cyan"
        yield f"      {purpose}", "dim"


def accuracy_lines(before: Scores, after: Scores) -> Iterator[str]:
    """Each score before → after, in columns."""
    width = max(map(len, after))
    for name, score in after.items():
        if name in before:
            gain = 100 * (score.mean - before[name].mean)
            yield f"{name:<{width}}  {before[name]!s:>22}  →  {score!s:<22}  {gain:+.1f} points"
        else:
            yield f"{name:<{width}}  {score}"
