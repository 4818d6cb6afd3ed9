"""Training runs as Ray Tune trials, for searches across machines (`pip install groupwise[ray]`).

    from ray import tune
    from groupwise.evolution.ray_tune import trainable

    tuner = tune.Tuner(
        trainable(task, model="Qwen/Qwen2.5-0.5B-Instruct", max_steps=100),
        param_space={"optim.learning_rate": tune.loguniform(1e-7, 1e-5)},
        tune_config=tune.TuneConfig(metric="accuracy", mode="max", num_samples=8),
    )
    tuner.fit()

A trial is a complete run in its own folder, `trial-ID` under `output_dir`; its results report it as `run`.
The checkpoint that it gives Tune is a run's checkpoint, so Tune's schedulers may stop a trial, resume it on
another machine, or copy its weights to a trial with other values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import tune

from groupwise.config import Config, config_from_keywords
from groupwise.errors import CheckpointError, ConfigError
from groupwise.evolution.search_space import TUNABLE, WEIGHTS, applied
from groupwise.learner.checkpoint import latest_checkpoint
from groupwise.tasks import Task, load_task, with_data
from groupwise.tracking.run_folder import RunFolder
from groupwise.training.grpo_run import GRPORun
from groupwise.training.loop import train_step
from groupwise.training.resume import RunStart, read_state, save_state


def trainable(task: Task | str, **settings: Any) -> type[tune.Trainable]:
    """Return a Ray Tune trainable; settings are those of `gw.train`, parameters those of `evolve.vary`.

    `task` is a task that Ray can serialize, the name of a built-in task, or a file that the workers can read.
    """
    config = config_from_keywords(**settings)
    config.algo.check_combination()
    name = task if isinstance(task, str) else task.name
    output_dir = str(Path(config.run.output_dir).resolve())  # workers have another working directory
    run = replace(config.run, output_dir=output_dir)
    config = replace(config, task=replace(config.task, name=name), run=run).resolve()

    class Trial(RunTrial):
        base_config, base_task = config, task

    return Trial


class RunTrial(tune.Trainable):  # type: ignore[misc]
    """A training run as a trial: one training step per Tune step."""

    base_config: Config
    base_task: Task | str

    def setup(self, config: Mapping[str, Any]) -> None:
        self._open(config, state_of=None)

    def step(self) -> dict[str, Any]:
        """Run one training step and return its metrics."""
        run = self._run
        number = next(self._steps)
        batch = train_step(run, number)
        report = run.learner.report()
        rollouts = [rollout for group in batch.all_groups for rollout in group.valid]
        self._tokens += sum(rollout.length for rollout in rollouts)
        after = run.evaluator.after if number == run.config.run.max_steps else None
        result = {
            "reward": sum(rollout.reward for rollout in rollouts) / max(1, len(rollouts)),
            "accuracy": sum(map(run.task.is_right, rollouts)) / max(1, len(rollouts)),
            "loss": report.get("policy/loss", 0.0),
            "kl": report.get("policy/kl", 0.0),
            "tokens": self._tokens,
            "step": number,
            "run": str(run.folder.path),
            "done": number >= run.config.run.max_steps,
        }
        if after is not None:
            result["held_out"] = sum(after.averages) / len(after.averages)
        return result

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        run = self._run
        run.recorder.writer.flush()
        save_state(Path(checkpoint_dir), run.state, policy=run.policy, learner=run.learner)

    def load_checkpoint(self, checkpoint: str) -> None:
        """Continue from a checkpoint of this trial or another one, with this trial's values."""
        latest = latest_checkpoint(Path(checkpoint))
        if latest is None:
            raise CheckpointError(f"no complete checkpoint in {checkpoint}")
        self.cleanup()
        self._open(self.config, state_of=latest)

    def cleanup(self) -> None:
        self._run.__exit__(None, None, None)

    def _open(self, values: Mapping[str, Any], *, state_of: Path | None) -> None:
        """Open the run in a new folder, or at the state of a checkpoint."""
        for name in values:
            if name not in TUNABLE and not is_weight(name):
                raise ConfigError(
                    f"unknown parameter {name!r}; use one of {', '.join(TUNABLE)}, or {WEIGHTS}NAME"
                )
        given, base = self.base_task, self.base_config
        task = load_task(base.resolve().task) if isinstance(given, str) else with_data(given, base.task)
        config, task = applied({name: float(value) for name, value in values.items()}, base, task)
        config = replace(config, run=replace(config.run, name=f"trial-{self.trial_id}"))
        path = Path(config.run.output_dir) / str(config.run.name)
        if state_of is None:
            start = RunStart.new(config, task=task.name)
        else:
            path.mkdir(parents=True, exist_ok=True)
            folder = RunFolder(path)
            start = RunStart(
                folder=folder, lock=folder.lock(), state=read_state(state_of), checkpoint=state_of
            )
        self._run = GRPORun(config, task=task, start=start)
        self._steps: Iterator[int] = self._run.steps()
        self._tokens = 0


def is_weight(name: str) -> bool:
    return name.startswith(WEIGHTS)
