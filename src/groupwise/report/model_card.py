"""The model card of a trained model or adapter: base model, data, results with intervals, command, licence.

The header of a card names models and datasets of the Hugging Face Hub only. Names of local folders would
mean nothing to others; data in local files is named by its file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.config import Config, read_config
from groupwise.config.coerce import write_yaml
from groupwise.config.loading import flat, plain
from groupwise.config.schema import BUILT_IN, NO_TASK, SMOLLM2
from groupwise.errors import ConfigError
from groupwise.evaluate.held_out import Evaluation, read_evaluation
from groupwise.files import package_version
from groupwise.tasks.registry import TASKS
from groupwise.tracking.run_folder import RunFolder, step_name, step_of

CARD = "README.md"
PUBLISHED = {SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Names on the Hub of models that have another name here."""
OWN_LICENSE = "apache-2.0"
"""Of SmolLM2 and of the built-in models."""
HUB_MODEL = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
KINDS = {"sft": "supervised fine-tuning", "evolve": "a population with GRPO"}
LOCAL = {"run.output_dir", "run.name", "evaluate.data_dir", "lora.init", "model.device", "engine.exchange"}
"""Settings that say nothing about the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSubject:
    """What a card describes."""

    name: str
    base: str | None
    """The base model, as the user named it."""
    rank: int
    """LoRA rank of an adapter; 0 for a whole model."""
    config: Config | None = None
    """Settings of the run that trained it; None if they are not known."""
    run: RunFolder | None = None
    license: str | None = None
    """None: that of the base model."""


def model_card(subject: CardSubject) -> str:
    """Return the card in the format of the Hugging Face Hub."""
    base = hub_name(subject.base)
    lines = [*header(subject, base), f"# {subject.name.rpartition('/')[2]}", ""]
    config = subject.config
    what = f"for `{base}`" if base else "for a local model" if subject.base else ""
    if config is None:
        kind = "An adapter" if subject.rank else "A model"
        return "\n".join([*lines, f"{kind} {what} made with groupwise.".replace("  ", " "), ""])
    trained = KINDS.get(config.run.kind, "GRPO")
    about = "An adapter for" if subject.rank else "A model trained from"
    task = "" if config.task.name == NO_TASK else f" on `{task_name(config)}`"
    lines += [f"{about} {f'`{base}`' if base else 'a local model'}: {trained}{task}.", ""]
    lines += results(subject)
    lines += ["## Data", "", *data_lines(config), ""]
    lines += ["## Training", "", *settings_table(subject, config), ""]
    lines += [f"    {command_for(config)}", "", f"Made with groupwise {package_version()}.", ""]
    return "\n".join(lines)


def header(subject: CardSubject, base: str | None) -> list[str]:
    """Return the metadata of the card, as YAML."""
    chosen = subject.license or license_of(subject.base)
    lines = ["---", "library_name: " + ("peft" if subject.rank else "transformers")]
    lines += [f"base_model: {base}"] if base else []
    # The Hub accepts `other` with a name of one's own.
    lines += [f"license: {chosen}"] if chosen else ["license: other", "license_name: that-of-the-base-model"]
    datasets = hub_datasets(subject.config)
    lines += [f"datasets: [{', '.join(datasets)}]"] if datasets else []
    return [*lines, "tags: [groupwise, grpo, reinforcement-learning]", "---", ""]


def hub_name(model: str | None) -> str | None:
    """Return the name of a model on the Hub, or None. A local folder may name the model it was made from."""
    if model is None or model in BUILT_IN:
        return None
    if model in PUBLISHED:
        return PUBLISHED[model]
    folder = Path(model).expanduser()
    if folder.is_dir():
        own = card_field(folder / CARD, "base_model")
        return own if own and HUB_MODEL.fullmatch(own) and not Path(own).exists() else None
    return model if HUB_MODEL.fullmatch(model) else None


def license_of(model: str | None) -> str | None:
    """Return the licence of a model: of its folder's card, or of its card in the cache of the Hub."""
    if model is None:
        return None
    if model in (*BUILT_IN, *PUBLISHED):
        return OWN_LICENSE
    folder = Path(model).expanduser()
    if folder.is_dir():
        return card_field(folder / CARD, "license")
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model, CARD)
    except ValueError:  # not a name of the Hub
        return None
    return card_field(Path(cached), "license") if isinstance(cached, str) else None


def card_field(card: Path, name: str) -> str | None:
    """Return a field of a card's header, if it is a single plain value."""
    try:
        text = card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    metadata = text.split("---", 2)[1] if text.startswith("---") else ""
    found = re.search(rf"^{name}:[ \t]*['\"]?([\w./-]+)['\"]?[ \t]*$", metadata, re.MULTILINE)
    return found[1] if found else None


def is_file(source: str) -> bool:
    return Path(source).expanduser().exists() or Path(source).is_absolute() or source.startswith((".", "~"))


def sources(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what the run read: its role and its source."""
    named = {
        "training data": config.task.data,
        "held-out data": config.task.test_data,
        "demonstrations": config.sft.data if config.run.kind == "sft" else None,
    }
    yield from ((role, source) for role, source in named.items() if source)
    for name, source in config.task.test_sets.items():
        yield f"test set {name}", str(source)


def hub_datasets(config: Config | None) -> list[str]:
    """Return the names on the Hub of the datasets that a run read."""
    read = [source for _, source in sources(config)] if config else []
    names = (source.partition("@")[0].partition(":")[0] for source in read if not is_file(source))
    return sorted({name for name in names if "/" in name})


def data_lines(config: Config) -> list[str]:
    lines = [
        f"- {role}: `{Path(source).name if is_file(source) else source}`" for role, source in sources(config)
    ]
    return lines or [f"- the examples of the task `{task_name(config)}`"]


def task_name(config: Config) -> str:
    """Return the name of the task; of a task file, the file's."""
    name = config.task.name
    return name if name in TASKS else Path(name).name


def settings_table(subject: CardSubject, config: Config) -> list[str]:
    shown = {
        "loss": config.algo.loss,
        "learning rate": config.optim.learning_rate,
        "prompts × completions per step": f"{config.rollout.prompts} × {config.rollout.group_size}",
        "maximum tokens": config.rollout.max_tokens,
        "temperature": config.rollout.temperature,
        "KL coefficient": config.algo.beta,
    }
    if config.run.kind == "sft":
        shown = {"learning rate": config.optim.learning_rate, "demonstrations per step": config.sft.batch}
    shown |= {"LoRA rank": subject.rank or config.lora.r or "full fine-tuning", "seed": config.run.seed}
    return ["| setting | value |", "|---|---|", *(f"| {key} | {value} |" for key, value in shown.items())]


def command_for(config: Config) -> str:
    """Return a command that repeats the run: every setting that differs from its default."""
    start = [
        f"model.name={config.model.name}",
        f"task.name={config.task.name}",
        f"run.kind={config.run.kind}",
    ]
    try:
        default = dict(flat(read_config(overrides=start).resolve()))
    except ConfigError:  # a model or an adapter that is not there any more
        default = {}
    command = "sft" if config.run.kind == "sft" else "evolve" if config.run.kind == "evolve" else "train"
    words = ["groupwise", command, "--model", hub_name(config.model.name) or Path(config.model.name).name]
    words += [] if config.task.name == NO_TASK else ["--task", task_name(config)]
    named = {"model.name", "task.name", "run.kind", *LOCAL}
    for name, value in flat(config):
        if name in named or name.startswith("track.") or default.get(name, value) == value:
            continue
        words.append(f"{name}={shown_value(value)}")
    return shlex.join(words)


def shown_value(value: Any) -> str:
    """Return a setting as the command line reads it; of a local path, the name of the file."""
    if isinstance(value, str) and "/" in value and is_file(value):
        return Path(value).name
    return write_yaml(plain(value)).strip()


def results(subject: CardSubject) -> list[str]:
    """Return held-out scores before training and at the last evaluation, with their intervals."""
    if subject.run is None:
        return []
    before = read_evaluation(subject.run, "before")
    when, last = last_evaluation(subject.run)
    if last is None:
        return []
    columns = [f"before ({prompts(before)})"] if before else []
    columns += [f"{when} ({prompts(last)})"]
    earlier = before.scores() if before else {}
    rows = [
        f"| {score} | {f'{earlier.get(score, chr(8211))} | ' if before else ''}{value} |"
        for score, value in last.scores().items()
    ]
    return [
        "## Results",
        "",
        "Held-out prompts, with 95 % intervals.",
        "",
        f"| | {' | '.join(columns)} |",
        "|" + "---|" * (1 + len(columns)),
        *rows,
        "",
    ]


def prompts(evaluation: Evaluation) -> str:
    return f"{len(evaluation.examples)} prompts"


def last_evaluation(run: RunFolder) -> tuple[str, Evaluation | None]:
    """Return the last evaluation of a run, and when it was made."""
    if (after := read_evaluation(run, "after")) is not None:
        return "after training", after
    steps = sorted(step for path in run.evaluations.glob("*.json") if (step := step_of(path.stem)))
    if not steps:
        return "", None
    return f"after step {steps[-1]}", read_evaluation(run, step_name(steps[-1]))
