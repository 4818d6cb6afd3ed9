"""`groupwise eval`: from what the user named to a measured, saved result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.config import Config, read_config
from groupwise.config.sections import NO_TASK
from groupwise.errors import ConfigError
from groupwise.evaluate.target import Target, find_target
from groupwise.records import Example
from groupwise.tasks import TASKS, Task, load_rows, load_task, without_data

if TYPE_CHECKING:
    from groupwise.evaluate.held_out import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to ask, settled before anything heavy loads."""

    task: Task
    examples: Sequence[Example]
    samples: int
    seed: int


def evaluate_command(
    target: str,
    *,
    task: str | None = None,
    data: str | None = None,
    samples: int | None = None,
    examples: int | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure a run, a checkpoint, an adapter or a model, and return what was found.

    A run brings its settings and its task, and is compared with what it could do before training;
    the result is then also saved in its folder.
    """
    found = find_target(target)
    config = read_config(found.run.config if found.run else None, overrides=overrides)
    config = replace(config, model=replace(config.model, name=found.base or config.model.name))
    if task is not None:
        config = replace(config, task=without_data(replace(config.task, name=task, options={})))
    elif config.task.name == NO_TASK:
        raise ConfigError(f"{target} was trained on rows alone: say what to measure by --task")
    elif config.task.name not in TASKS and not config.task.name.endswith(".py"):
        raise ConfigError(
            f"{target} learned a task named {config.task.name!r} that was defined in Python: "
            "give the file that defines it by --task FILE.py"
        )
    config = config.resolve()
    question = settle(config, data=data, samples=samples, examples=examples, seed=seed)
    from groupwise.evaluate.held_out import compare
    from groupwise.evaluate.saved import read_evaluation, unused_name, write_evaluation

    result = measure(question, config=config, target=found)
    before = read_evaluation(found.run, "before") if found.run else None
    report: dict[str, Any] = {
        "target": target,
        "model": found.description,
        "task": question.task.name,
        "prompts": len(question.examples),
        "samples": question.samples,
        "seed": question.seed,
        **{name: asdict(interval) for name, interval in result.intervals().items()},
        "rewards": {name: asdict(interval) for name, interval in result.reward_intervals().items()},
        "failed": result.failed,
        "length": result.length,
    }
    if before is not None:
        report["change"] = {name: asdict(change) for name, change in compare(before, result).items()}
    if found.run is not None:
        # A name of its own: nothing that was measured earlier is overwritten.
        name = unused_name(found.run, f"again-{Path(found.description).name}")
        report["saved"] = str(write_evaluation(found.run, name, result, about=report))
    return report


def settle(
    config: Config,
    *,
    data: str | None,
    samples: int | None,
    examples: int | None,
    seed: int | None,
) -> Question:
    """Load the task and choose the examples: all of `data`, or what the task holds out."""
    settings = config.task
    loaded = load_task(without_data(settings) if data else settings)
    rows: Sequence[Example] = (
        load_rows(data, task=loaded, config=settings)
        if data
        else loaded.split(settings, config.run.seed).held_out
    )
    if not rows:
        raise ConfigError(f"task {loaded.name} holds no examples out: give some by --data FILE")
    return Question(
        task=loaded,
        examples=rows[:examples],
        samples=config.evaluate.samples if samples is None else samples,
        seed=config.run.seed if seed is None else seed,
    )


def measure(question: Question, *, config: Config, target: Target) -> Evaluation:
    from groupwise.engine.engine import Engine
    from groupwise.evaluate.held_out import evaluate
    from groupwise.model.load import load_policy
    from groupwise.rollout.collect import Tools

    lora = replace(config.lora, r=target.rank)
    policy = load_policy(config.model, lora, trained=target.trained)
    return evaluate(
        question.task,
        question.examples,
        codec=policy,
        engine=Engine(policy, config.engine),
        sampling=config.rollout.sampling,
        samples=question.samples,
        seed=question.seed,
        seconds=config.task.reward_seconds,
        tools=Tools.of(question.task.tools, config.tools),
    )
