"""How a run's story ends: the numbers to keep and the words to read."""

from __future__ import annotations

from groupwise.config import Config
from groupwise.evaluate.held_out import Evaluation
from groupwise.tracking.run_folder import RunFolder
from groupwise.tracking.summary import Summary
from groupwise.training.state import State


def stats_of(state: State, *, before: Evaluation | None, after: Evaluation | None) -> dict[str, object]:
    """Return what training_stats.json holds."""
    return {
        "steps": state.step,
        "optimizer_steps": state.updates,
        "seconds": round(state.seconds, 3),
        "best_step": state.best_step,
        "before": before.metrics() if before else None,
        "after": after.metrics() if after else None,
    }


def summary_of(
    config: Config, state: State, *, folder: RunFolder, before: Evaluation | None, after: Evaluation | None
) -> Summary:
    """Return what the terminal shows last."""
    done = state.step >= config.run.max_steps
    return Summary(
        headline=f"{state.step} steps done" if done else f"stopped after step {state.step}",
        seconds=state.seconds,
        folder=folder.path,
        before=before.intervals() if before else {},
        after=after.intervals() if after else {},
        next_commands=next_commands(config, folder, done=done),
    )


def next_commands(config: Config, folder: RunFolder, *, done: bool) -> tuple[tuple[str, str], ...]:
    """Return three commands to try, each with what it does."""
    resume = f"groupwise train --resume {folder.path}"
    measure = (f"groupwise eval {folder.path}", "measures it again on held-out examples")
    again = (f"groupwise train --seed {config.run.seed + 1}", "the same with other noise: is the gain real?")
    if not done:
        return (resume, "goes on from here"), measure, again
    if config.optim.schedule != "constant":
        return measure, again
    longer = (f"{resume} run.max_steps={2 * config.run.max_steps}", "trains on from here")
    return measure, longer, again
