"""Exclude examples that a policy was trained on from its evaluation.

A policy has a lineage: the run that trained it, the run that trained the model which that run started from,
and so on. A checkpoint is in the folder of its run. A merged, quantized or converted model folder has a file
`lineage.json`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from groupwise.config import Config, config_from_keywords, read_config
from groupwise.config.schema import ADAPTER, BUILT_IN
from groupwise.errors import ConfigError
from groupwise.evaluate.target import Target, is_checkpoint, is_elite, of_run, run_of
from groupwise.files import write_atomically
from groupwise.learner.checkpoint import STATE
from groupwise.model.resolve import adapter_base
from groupwise.records import Example
from groupwise.tasks import TASKS, ExampleStream, Task, is_loadable, load_task, with_data, without_data
from groupwise.tasks.sft_data import best_answers, plan_warm_start
from groupwise.tasks.task import as_example, prompt_key
from groupwise.tracking.run_folder import AGENT, RunFolder, is_agent

LINEAGE = "lineage.json"
MOST_ANCESTORS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """One training in the lineage of a policy."""

    name: str
    """The run or the agent, for messages."""
    settings: Config
    cursor: int = 0
    """Number of examples that the run had used."""
    prompts: tuple[str, ...] | None = None
    """Digests of the prompts that an agent learned from; None for a run."""


def lineage_of_target(target: Target) -> list[TrainingRecord]:
    """Return every training of what is evaluated, the latest first."""
    if target.run is None:
        return lineage_of(str(target.trained or target.base))
    settings = read_config(target.run.config).resolve()
    own = TrainingRecord(name=target.name, settings=settings, cursor=target.cursor)
    return [own, *lineage_of(started_from(settings))]


def lineage_of(model: str, *, deepest: int = MOST_ANCESTORS) -> list[TrainingRecord]:
    """Return every training of a model, a checkpoint, an adapter or a saved agent, the latest first."""
    path = Path(model).expanduser()
    if model in BUILT_IN or deepest == 0:
        return []
    if not path.is_dir():
        if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
            raise ConfigError(f"{path}, which training started from, is not there any more")
        return []
    if (path / LINEAGE).is_file():
        return read_lineage(path / LINEAGE)
    own, base = nearest(path)
    return own + (lineage_of(base, deepest=deepest - 1) if base is not None else [])


def started_from(settings: Config) -> str:
    """Return the model, or the adapter on it, that a run started from."""
    return settings.lora.init or settings.model.name


def nearest(path: Path) -> tuple[list[TrainingRecord], str | None]:
    """Return the training that wrote a folder, and the model that it started from."""
    if is_elite(path):
        elite = of_run(str(path), RunFolder(path.resolve().parent))
        return [(own := lineage_of_target(elite)[0])], started_from(own.settings)
    if is_checkpoint(path):
        run = run_of(path)
        settings = read_config(run.config).resolve()
        cursor = json.loads((path / STATE).read_text(encoding="utf-8"))["cursor"]
        return [TrainingRecord(name=str(path), settings=settings, cursor=cursor)], started_from(settings)
    if is_agent(path):
        settings = read_config(RunFolder(path).config)
        prompts = json.loads((path / AGENT).read_text(encoding="utf-8")).get("prompts")
        if prompts is None:
            raise ConfigError(f"the agent in {path} was saved without the prompts that it learned from")
        own = TrainingRecord(name=str(path), settings=settings, prompts=tuple(prompts))
        return [own], settings.model.name
    return [], adapter_base(path) if (path / ADAPTER).is_file() else None


def write_lineage(folder: Path, *sources: str) -> None:
    """Record the lineage of the models that a new model folder was made from."""
    records = [record for source in sources for record in lineage_of(source)]
    unique = {json.dumps(asdict(record)): None for record in records}  # sources may share ancestors
    if unique:
        write_atomically(folder / LINEAGE, f"[{', '.join(unique)}]")


def read_lineage(path: Path) -> list[TrainingRecord]:
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return [
            TrainingRecord(
                name=row["name"],
                settings=config_from_keywords(**row["settings"]),
                cursor=row["cursor"],
                prompts=None if row["prompts"] is None else tuple(row["prompts"]),
            )
            for row in rows
        ]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def prompt_digest(prompt: Any) -> str:
    """Return a short digest that is equal for prompts that differ only in case and whitespace."""
    return hashlib.sha256(prompt_key(prompt).encode()).hexdigest()[:32]


def unseen(rows: Sequence[Example], *, task: Task, trained: set[str]) -> list[Example]:
    """Return the rows of a task whose key and prompt do not occur in training.

    A prompt that several examples share, such as the opening of a game, does not tell what was trained on.
    """
    shared = shared_prompts(rows, task) | shared_prompts(rows_of(task), task)

    def names(row: Example) -> tuple[str, ...]:
        prompt = task.ask(row)
        known = prompt_key(prompt)
        return (task.key_of(row), *(() if known in shared else (known, prompt_digest(prompt))))

    left = [row for row in rows if trained.isdisjoint(names(row))]
    if not left:
        raise ConfigError("the model was trained on every one of these examples: use others")
    return left


def shared_prompts(rows: Sequence[Mapping[str, Any]], task: Task) -> set[str]:
    """Return the keys of the prompts that several of these rows share, of a task with hidden state."""
    if not task.hides_state:
        return set()
    keys: dict[str, set[str]] = {}
    for row in map(as_example, rows):
        keys.setdefault(prompt_key(task.ask(row)), set()).add(task.key_of(row))
    return {prompt for prompt, several in keys.items() if len(several) > 1}


def rows_of(task: Task) -> Sequence[Mapping[str, Any]]:
    """Return all examples of a task, except those of a stream."""
    own = () if isinstance(task.examples, ExampleStream) else task.examples
    return (*own, *(task.held_out or ()))


def prompts_in_training(trained: Config, *, cursor: int, task: Task, named: str) -> set[str]:
    """Return the keys of the examples that a run trained on, if the task `named` could ask them again.

    `trained` are the run's settings, and `cursor` is the number of examples it has used. For finite data all
    training rows count as used; for demonstrations, their prompts. Raises ConfigError if the run's task or
    data cannot be loaded any more.
    """
    name = trained.task.name
    defined_in_python = not is_loadable(name)
    given = with_data(task, trained.task) if defined_in_python and name == task.name else None
    if trained.run.kind == "sft":
        return imitated(trained, cursor=cursor, task=given)
    if name != named and name in TASKS and named in TASKS and not shares_key(trained, task):
        return set()  # the tasks have no prompts in common
    own = given or load_task(trained.task)
    split = own.split(trained.task, trained.run.seed)
    used = split.take(0, cursor)[0] if isinstance(split.train, ExampleStream) else split.train
    keys = {own.key_of(example) for example in used}
    if own.hides_state:  # other columns may come with an opening that only one game has
        keys |= {prompt_key(own.ask(example)) for example in used} - shared_prompts(rows_of(own), own)
    return keys


def shares_key(trained: Config, task: Task) -> bool:
    """Whether a built-in task uses the same key function as the run's task, as `gsm8k` and `math` do."""
    return task.key is not None and load_task(without_data(trained.task)).key is task.key


def imitated(trained: Config, *, cursor: int, task: Task | None) -> set[str]:
    """Return the prompts of the demonstrations that a warm start has seen, and the keys of its examples.

    Prompts that several examples share are left out: the keys tell such examples apart.
    """
    plan = plan_warm_start(trained, task=task, resumed=True)
    split, own = plan.demonstrations.split, plan.task
    end = cursor if split.size is None else split.size
    prompts = {prompt_key(shown.prompt) for shown in plan.demonstrations.between(0, end)}
    if own is None:
        return prompts
    prompts -= shared_prompts(rows_of(own), own)
    if trained.sft.from_run is not None and own.hides_state:
        return prompts | {row["key"] for row in best_answers(plan.config, weights=own.weights, task=own)}
    if trained.sft.data is not None or trained.sft.from_run is not None:
        return prompts
    return prompts | {own.key_of(split.at(position)) for position in range(end)}
