"""Read settings from all sources and write them back as documented YAML.

Later sources take precedence: defaults < YAML file < flags < `section.key=value`.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, get_type_hints

from groupwise.config import algorithm, runtime, schema
from groupwise.config.coerce import (
    BadYaml,
    between,
    convert,
    convert_option,
    convert_text,
    kind_of,
    parse_yaml,
    shorten,
    write_yaml,
)
from groupwise.config.schema import BUILT_IN, TINY, Config, RolloutConfig, preset_settings
from groupwise.errors import ConfigError

SECTIONS: dict[str, type] = get_type_hints(Config)
TYPES: dict[str, Any] = {
    f"{section}.{key}": hint for section, cls in SECTIONS.items() for key, hint in get_type_hints(cls).items()
}
"""Every setting by full name, with its declared type."""
OPEN_MAPPINGS = tuple(name for name, hint in TYPES.items() if kind_of(hint)[0] is Mapping)
"""Settings that hold values by name, such as `task.options.largest` and `task.weights.format`."""


def read_config(
    path: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Config:
    """Return the configuration given by a YAML file, flags by name and `section.key=value` overrides.

    `defaults` are keywords as in `config_from_keywords`; every other source takes precedence over them.
    """
    settings: dict[str, Any] = {}
    take_keywords(settings, defaults or {})
    settings |= read_file(path) if path is not None else {}
    take_flags(settings, flags or {})
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"write settings as section.key=value; got {override!r}")
        put_text(settings, name.strip(), text)
    return build(settings)


def config_from_keywords(path: Path | None = None, /, **keywords: object) -> Config:
    """Return the configuration for keywords such as `train(max_steps=10, optim={"epochs": 2})`.

    A keyword is a flag, a section, or the full name of a setting (`**{"task.held_out": 8}`). Keywords take
    precedence over the YAML file at `path`.
    """
    try:
        settings = read_file(path) if path is not None else {}
        take_keywords(settings, keywords)
        return build(settings)
    except ConfigError as error:
        # A misspelt keyword is one sentence below the caller's own line, not a tour of this module.
        raise error.with_traceback(None) from None


def take_keywords(settings: dict[str, Any], keywords: Mapping[str, object]) -> None:
    """Add keywords, which are flags or sections, to the settings."""
    flags: dict[str, object] = {}
    sections: dict[str, object] = {}
    for name, value in keywords.items():
        is_section = name in TYPES or (name in SECTIONS and (isinstance(value, Mapping) or name not in FLAGS))
        (sections if is_section else flags)[name] = value
    take_flags(settings, flags)
    take_sections(settings, sections)


def read_file(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML file by full name. A preset needs no path: `gsm8k-quick`."""
    if not path.exists() and path.name == str(path) and path.name in (known := presets()):
        path = known[path.name]
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"))
    except BadYaml as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a UTF-8 text file") from None
    except OSError as error:
        raise ConfigError(f"cannot read settings from {path}: {error.strerror or error}") from None
    settings: dict[str, Any] = {}
    if document is not None:
        if not isinstance(document, dict):
            raise ConfigError(f"{path} must contain sections, such as `model:`; got {shorten.repr(document)}")
        take_sections(settings, document)
    return settings


def take_sections(settings: dict[str, Any], sections: Mapping[Any, Any]) -> None:
    for section, values in sections.items():
        if section in TYPES:  # a full name, such as `model.name: tiny`
            put(settings, section, values)
            continue
        if section not in SECTIONS:
            raise unknown(str(section), others=tuple(SECTIONS))
        if values is None:  # a section with every line commented out
            continue
        if not isinstance(values, Mapping):
            raise ConfigError(f"{section} must be a mapping of settings; got {shorten.repr(values)}")
        for key, value in values.items():
            put(settings, f"{section}.{key}", value)


def take_flags(settings: dict[str, Any], flags: Mapping[str, object]) -> None:
    for name in flags:
        if name not in FLAGS:
            raise unknown(name, others=(*FLAGS, *SECTIONS))
    if {"max_steps", "num_epochs"} <= flags.keys():
        raise ConfigError("max_steps and num_epochs are mutually exclusive; set only one of them")
    prompts = settings.get("rollout.prompts", RolloutConfig().prompts)
    for name, value in settings_of(flags, prompts=prompts):
        put(settings, name, value)


def put(settings: dict[str, Any], name: str, value: Any) -> None:
    """Set a setting, by full name, to a YAML or Python value."""
    if name not in TYPES:
        raise unknown(name)
    settings[name] = convert(value, to=TYPES[name], setting=name)


def put_text(settings: dict[str, Any], name: str, text: str) -> None:
    """Set a setting, or one entry of a mapping (`task.options.largest=20`), to a value from the shell."""
    mapping = next((full for full in OPEN_MAPPINGS if name.startswith(f"{full}.")), None)
    if mapping is not None:
        entry = name.removeprefix(f"{mapping}.")
        settings[mapping] = {**settings.get(mapping, {}), entry: convert_option(text, setting=name)}
    elif name in TYPES:
        settings[name] = convert_text(text, to=TYPES[name], setting=name)
    else:
        raise unknown(name)


def build(settings: Mapping[str, Any]) -> Config:
    """Build the configuration; each section validates its own values."""
    model, task = (settings.get(name, default) for name, default in (("model.name", TINY), ("task.name", "")))
    chosen = model_defaults(model, task, context=context_of(model))
    settings = {**chosen, **preset_settings(settings.get("lora.preset")), **settings}
    return Config(
        **{
            section: cls(
                **{f.name: settings[n] for f in fields(cls) if (n := f"{section}.{f.name}") in settings}
            )
            for section, cls in SECTIONS.items()
        }
    )


TASK_TOKENS = {"countdown": 512, "gsm8k": 512, "math": 1024, "search_qa": 256, "medquad": 512, "tldr": 512}
"""Default of rollout.max_tokens by task, for models other than the built-in ones."""
OTHER_TASKS_TOKENS = 512
OTHER_MODELS_STEPS = 100
OTHER_MODELS_TEMPERATURE = 1.0
"""Every run of docs/results.md with another model than the built-in ones learned at this temperature."""


def model_defaults(model: str, task: str, *, context: int | None = None) -> dict[str, Any]:
    """Return the settings whose defaults depend on the model and the task, by full name.

    The defaults of the sections are those of the built-in models. Others think in more tokens, learn over
    more steps and sample their own distribution. `context`: the model's context length; a completion may take
    half of it.
    """
    if model in BUILT_IN:
        return {}
    tokens = TASK_TOKENS.get(task, OTHER_TASKS_TOKENS)
    longest = tokens if context is None else max(1, min(tokens, context // 2))
    return {
        "rollout.max_tokens": longest,
        "rollout.temperature": OTHER_MODELS_TEMPERATURE,
        "run.max_steps": OTHER_MODELS_STEPS,
    }


def presets() -> dict[str, Path]:
    """Return the settings files that come with the package, by name."""
    inside = Path(__file__).parents[1] / "configs"  # in a wheel
    folder = inside if inside.is_dir() else Path(__file__).parents[3] / "configs"  # in a clone
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def preset_named(name: str) -> Path:
    """Return the settings file of a preset."""
    known = presets()
    if name not in known:
        raise ConfigError(f"unknown preset {name!r}; the presets are {', '.join(known)}")
    return known[name]


def context_of(model: str) -> int | None:
    """Return the context length of a model in a local folder; None if its config.json does not say it."""
    try:
        described = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # RuntimeError: there is no such user's home
        return None
    length = described.get("max_position_embeddings") if isinstance(described, dict) else None
    return length if type(length) is int and length > 0 else None


def unknown(name: str, *, others: Sequence[str] = ()) -> ConfigError:
    """Return the error for an unknown setting, with the closest match."""
    guess = closest(name, others=others)
    hint = f"did you mean {guess}?" if guess else "`groupwise config` lists every setting"
    return ConfigError(f"unknown setting {name}; {hint}")


def closest(name: str, *, others: Sequence[str] = ()) -> str | None:
    """Return the closest setting. An exact key in another section beats a similar key in the same section.

    Example: "train.learning_rate" -> "optim.learning_rate"; "optim.epoch" -> "optim.epochs"
    """
    if similar := difflib.get_close_matches(name, others, n=1, cutoff=0.7):
        return similar[0]
    section, dot, rest = name.partition(".")
    key = rest.partition(".")[0] if dot else name
    if (known := FOREIGN_NAMES.get(key)) is not None and (not dot or known.startswith(f"{section}.")):
        # Where flags are allowed, a flag is the shorter way to say it.
        return next((flag for flag in FLAGS if flag in others and FLAGS[flag] == known), known)
    key_of = {full: full.partition(".")[2] for full in TYPES}
    if key in FLAGS and key not in key_of.values():
        return FLAGS[key]
    in_section = [key for full, key in key_of.items() if full.startswith(f"{section}.")]
    for keys, cutoff in ((key_of.values(), 1.0), (in_section, 0.6), (key_of.values(), 0.7)):
        if similar := difflib.get_close_matches(key, sorted(set(keys)), n=1, cutoff=cutoff):
            candidates = [full for full, its_key in key_of.items() if its_key == similar[0]]
            return difflib.get_close_matches(name, candidates, n=1, cutoff=0.0)[0]
    return None


FOREIGN_NAMES = {
    "lr": "optim.learning_rate",
    "epochs": "run.num_epochs",
    "num_train_epochs": "run.num_epochs",
    "num_generations": "rollout.group_size",
    "num_return_sequences": "rollout.group_size",
    "num_rollouts": "rollout.group_size",
    "per_device_train_batch_size": "rollout.prompts",
    "train_batch_size": "rollout.prompts",
    "max_completion_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "max_output_tokens": "rollout.max_tokens",
    "max_prompt_length": "task.max_prompt_tokens",
    "dataset": "task.data",
    "train_dataset": "task.data",
    "eval_dataset": "task.test_data",
    "reward_weights": "task.weights",
    "kl_coef": "algo.beta",
    "loss_type": "algo.loss",
    "scale_rewards": "algo.advantage",
    "epsilon": "algo.clip_low",
    "epsilon_high": "algo.clip_high",
    "clip_range": "algo.clip_low",
    "num_iterations": "optim.epochs",
    "update_epochs": "optim.epochs",
    "lr_scheduler_type": "optim.schedule",
    "warmup_ratio": "optim.warmup_steps",
    "model_name": "model.name",
    "model_path": "model.name",
    "load_in_4bit": "model.quantization",
    "bf16": "model.dtype",
    "use_vllm": "engine.kind",
    "eval_steps": "evaluate.every",
    "save_steps": "run.save_every",
    "save_total_limit": "run.keep_last",
    "logging_dir": "run.output_dir",
    "report_to": "track.trackers",
}
"""What other trainers (TRL, transformers, AgileRL) call a setting, for the hint after an unknown name."""

FLAGS = {
    "model": "model.name",
    "lora_r": "lora.r",
    "task": "task.name",
    "data": "task.data",
    "max_examples": "task.max_examples",
    "batch_size": "rollout.prompts",
    "gradient_accumulation_steps": "rollout.prompts",
    "group_size": "rollout.group_size",
    "max_tokens": "rollout.max_tokens",
    "temperature": "rollout.temperature",
    "advantage": "algo.advantage",
    "loss": "algo.loss",
    "beta": "algo.beta",
    "learning_rate": "optim.learning_rate",
    "skip_evaluation": "evaluate.skip",
    "max_steps": "run.max_steps",
    "num_epochs": "run.num_epochs",
    "seed": "run.seed",
    "output_dir": "run.output_dir",
    "run_name": "run.name",
    "project_name": "track.project",
    "no_trackio": "track.trackers",
    "track": "track.trackers",
}
"""The setting that each flag sets. `settings_of` handles the flags whose value is not copied as it is."""


def settings_of(flags: Mapping[str, Any], *, prompts: int) -> Iterator[tuple[str, Any]]:
    """Yield the setting and the value for each flag; `prompts` is the default batch size."""
    sizes = [name for name in ("batch_size", "gradient_accumulation_steps") if name in flags]
    for name in sizes:
        between(name, convert(flags[name], to=int, setting=name), 1)
    if sizes:
        # optim.micro_batch_tokens limits memory, so gradient accumulation only means more prompts per step.
        batch = flags.get("batch_size", prompts)
        yield "rollout.prompts", batch * flags.get("gradient_accumulation_steps", 1)
    if convert(flags.get("no_trackio", False), to=bool, setting="no_trackio"):
        yield "track.trackers", ()
    for name, value in flags.items():
        if name in (*sizes, "no_trackio"):
            continue
        use_all = name == "max_examples" and value == 0
        yield FLAGS[name], None if use_all else value


def dump_config(config: Config) -> str:
    """Return the configuration as YAML with comments; `read_config` reads back an equal one."""
    lines: list[str] = []
    for section in fields(config):
        settings = getattr(config, section.name)
        described = documentation()[type(settings).__name__]
        lines += ["", *comment(described[""]), f"{section.name}:"]
        for setting in fields(settings):
            value = write_yaml(plain(getattr(settings, setting.name)))
            note = comment(described.get(setting.name, ""))
            lines += [f"  {line}" for line in (*note, f"{setting.name}: {value}")]
    return "\n".join(lines[1:]) + "\n"


def differences(a: Config, b: Config) -> list[str]:
    """Return a line for each setting that differs: "optim.learning_rate: 0.0003 → 0.001"."""
    before, after = dict(flat(a)), dict(flat(b))
    return [
        f"{name}: {write_yaml(plain(before[name]))} → {write_yaml(plain(after[name]))}"
        for name in before
        if before[name] != after[name]
    ]


def flat(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield every setting by full name, with its value."""
    for section in fields(config):
        settings = getattr(config, section.name)
        for setting in fields(settings):
            yield f"{section.name}.{setting.name}", getattr(settings, setting.name)


def plain(value: Any) -> Any:
    """Convert a tuple to a list, because YAML has no tuples."""
    return list(value) if isinstance(value, tuple) else value


def comment(text: str) -> list[str]:
    """Return the lines of a YAML comment; None is null there."""
    yaml_text = text.replace("None:", "null:")
    return [f"# {line}" for line in textwrap.wrap(yaml_text, width=100)]


@cache
def documentation() -> dict[str, dict[str, str]]:
    """Return the docstrings of the section classes: class -> setting -> text; "" is the class docstring."""
    described: dict[str, dict[str, str]] = {}
    sources = (inspect.getsource(module) for module in (schema, algorithm, runtime))
    for node in chain.from_iterable(ast.parse(source).body for source in sources):
        if isinstance(node, ast.ClassDef):
            described[node.name] = {"": ast.get_docstring(node) or ""}
            for field, text in pairwise(node.body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                        value=ast.Constant(value=str(docstring))
                    ):
                        described[node.name][name] = inspect.cleandoc(docstring)
    return described
