"""How a search's story ends: the best member's folder, the numbers to keep and the words to read."""

from __future__ import annotations

import os
import shutil

from groupwise.config import Config
from groupwise.evaluate.held_out import Evaluation
from groupwise.population.base import Member
from groupwise.population.story import Story, described
from groupwise.tracking.run_folder import RunFolder
from groupwise.tracking.summary import Summary, command, headline
from groupwise.training.ending import made_in_python


def write_elite(folder: RunFolder, member: Member) -> None:
    """Write the best member whole, then give it its name: there is never half of one."""
    final = folder.elite
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    # Under a name by which the next checkpoint clears away what a killed process left.
    temporary, old = (
        folder.checkpoints / f".step-000000.tmp-{what}-{os.getpid()}" for what in ("new", "old")
    )
    member.save(temporary)
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def stats_of(story: Story, *, before: Evaluation | None, after: Evaluation | None) -> dict[str, object]:
    """Return what training_stats.json holds."""
    best = story.best
    return {
        "steps": story.step,
        "tokens": story.tokens,
        "seconds": round(story.seconds, 3),
        "best": None if best is None else described(best),
        "before": before.metrics() if before else None,
        "after": after.metrics() if after else None,
    }


def file_of(config: Config) -> tuple[str, ...]:
    """A task that lives in the caller's program is found by the file that defines it."""
    return ("--task", "FILE.py") if made_in_python(config) else ()


def summary_of(
    config: Config, story: Story, *, folder: RunFolder, before: Evaluation | None, after: Evaluation | None
) -> Summary:
    """Return what the terminal shows last."""
    done = story.reached or story.step >= config.run.max_steps
    best = story.best
    who = "" if best is None else f"; the best is member {best.name}"
    commands = [
        (command("eval", folder.elite, *file_of(config)), "measures the best member again"),
        (command("chat", folder.elite), "talks to it"),
    ]
    resume = command("evolve", "--resume", folder.path)
    if made_in_python(config):
        resume = f"groupwise.evolve(task, resume={str(folder.path)!r})"
    if not story.step:
        commands = [(resume, "begins again")]
    elif not done:
        commands.insert(0, (resume, "goes on from here"))
    return Summary(
        headline=f"{headline(story.step, done=done)}{who}",
        seconds=story.seconds,
        folder=folder.path,
        before=before.intervals() if before else {},
        after=after.intervals() if after else {},
        next_commands=tuple(commands),
    )
