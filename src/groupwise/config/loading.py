"""Read settings from everywhere they can come from: defaults < YAML file < flags < `section.key=value`."""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, get_type_hints

from groupwise.config import runtime, schema
from groupwise.config.coerce import (
    BadYaml,
    between,
    convert,
    convert_option,
    convert_text,
    parse_yaml,
    shorten,
    write_yaml,
)
from groupwise.config.schema import Config, RolloutConfig, preset_settings
from groupwise.errors import ConfigError

SECTIONS: dict[str, type] = get_type_hints(Config)
TYPES: dict[str, Any] = {
    f"{section}.{key}": hint for section, cls in SECTIONS.items() for key, hint in get_type_hints(cls).items()
}
"""Every setting by its full name, with the type it declares."""
OPTIONS = "task.options"
"""The one setting that holds settings of its own, which only the task knows."""


def read_config(
    path: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Config:
    """Return the configuration that a YAML file, flags by name and `section.key=value` texts add up to.

    `defaults` are keywords as `config_from_keywords` takes them, which all the others count over.
    """
    settings: dict[str, Any] = {}
    take_keywords(settings, defaults or {})
    settings |= read_file(path) if path is not None else {}
    take_flags(settings, flags or {})
    for override in overrides:
        name, given, text = override.partition("=")
        if not given:
            raise ConfigError(f"a setting is written section.key=value; got {override!r}")
        put_text(settings, name.strip(), text)
    return build(settings)


def config_from_keywords(path: Path | None = None, /, **keywords: object) -> Config:
    """Return the configuration for `train(max_steps=10, optim={"epochs": 2})`: flags and whole sections.

    Full names do as well, `**{"task.held_out": 8}`. All count over the settings in a YAML file, if given.
    """
    settings = read_file(path) if path is not None else {}
    take_keywords(settings, keywords)
    return build(settings)


def take_keywords(settings: dict[str, Any], keywords: Mapping[str, object]) -> None:
    flags: dict[str, object] = {}
    sections: dict[str, object] = {}
    for name, value in keywords.items():
        whole = name in TYPES or (name in SECTIONS and (isinstance(value, Mapping) or name not in FLAGS))
        (sections if whole else flags)[name] = value
    take_flags(settings, flags)
    take_sections(settings, sections)


def read_file(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML file by full name."""
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"))
    except BadYaml as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"cannot read the settings in {path}: {error.strerror or error}") from None
    settings: dict[str, Any] = {}
    if document is not None:
        if not isinstance(document, dict):
            raise ConfigError(f"{path} must hold sections of settings; got {shorten.repr(document)}")
        take_sections(settings, document)
    return settings


def take_sections(settings: dict[str, Any], sections: Mapping[Any, Any]) -> None:
    for section, values in sections.items():
        if section in TYPES:  # the full name on one line
            put(settings, section, values)
            continue
        if section not in SECTIONS:
            raise unknown(str(section), others=tuple(SECTIONS))
        if values is None:  # a heading with every line below it commented out
            continue
        if not isinstance(values, Mapping):
            raise ConfigError(f"{section} must hold settings by name; got {shorten.repr(values)}")
        for key, value in values.items():
            put(settings, f"{section}.{key}", value)


def take_flags(settings: dict[str, Any], flags: Mapping[str, object]) -> None:
    for name in flags:
        if name not in FLAGS:
            raise unknown(name, others=(*FLAGS, *SECTIONS))
    prompts = settings.get("rollout.prompts", RolloutConfig().prompts)
    for name, value in settings_of(flags, prompts=prompts):
        put(settings, name, value)


def put(settings: dict[str, Any], name: str, value: Any) -> None:
    """Record a YAML or Python value under a setting's full name."""
    if name not in TYPES:
        raise unknown(name)
    settings[name] = convert(value, to=TYPES[name], setting=name)


def put_text(settings: dict[str, Any], name: str, text: str) -> None:
    """Record a value from the shell, or one option of the task: `task.options.largest=20`."""
    if name.startswith(f"{OPTIONS}."):
        option = name.removeprefix(f"{OPTIONS}.")
        known = settings.get(OPTIONS, {})
        settings[OPTIONS] = {**known, option: convert_option(text, setting=name)}
    elif name in TYPES:
        settings[name] = convert_text(text, to=TYPES[name], setting=name)
    else:
        raise unknown(name)


def build(settings: Mapping[str, Any]) -> Config:
    """Make the configuration; each section checks its own values."""
    settings = {**preset_settings(settings.get("lora.preset")), **settings}
    return Config(
        **{
            section: cls(
                **{f.name: settings[n] for f in fields(cls) if (n := f"{section}.{f.name}") in settings}
            )
            for section, cls in SECTIONS.items()
        }
    )


def unknown(name: str, *, others: Sequence[str] = ()) -> ConfigError:
    """Explain that no such setting exists, and name the one that was probably meant."""
    guess = closest(name, others=others)
    hint = f"did you mean {guess}?" if guess else "`groupwise config` lists every setting"
    return ConfigError(f"unknown setting {name}; {hint}")


def closest(name: str, *, others: Sequence[str] = ()) -> str | None:
    """Return the name that was probably meant: the right key in another section beats a similar key in this.

    Example: "train.learning_rate" -> "optim.learning_rate"; "optim.epoch" -> "optim.epochs"
    """
    if similar := difflib.get_close_matches(name, others, n=1, cutoff=0.7):
        return similar[0]
    section, dot, rest = name.partition(".")
    key = rest.partition(".")[0] if dot else name
    key_of = {full: full.partition(".")[2] for full in TYPES}
    if key in FLAGS and key not in key_of.values():
        return FLAGS[key]
    in_section = [key for full, key in key_of.items() if full.startswith(f"{section}.")]
    for keys, cutoff in ((key_of.values(), 1.0), (in_section, 0.6), (key_of.values(), 0.7)):
        if similar := difflib.get_close_matches(key, sorted(set(keys)), n=1, cutoff=cutoff):
            bearers = [full for full, its_key in key_of.items() if its_key == similar[0]]
            return difflib.get_close_matches(name, bearers, n=1, cutoff=0.0)[0]
    return None


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
    "seed": "run.seed",
    "output_dir": "run.output_dir",
    "run_name": "run.name",
    "project_name": "track.project",
    "no_trackio": "track.trackers",
    "track": "track.trackers",
}
"""Each flag and the setting it sets. `settings_of` treats the few whose value is not simply taken over."""


def settings_of(flags: Mapping[str, Any], *, prompts: int) -> Iterator[tuple[str, Any]]:
    """Yield the setting and the value that each flag stands for; `prompts` is the default batch size."""
    sizes = [name for name in ("batch_size", "gradient_accumulation_steps") if name in flags]
    for name in sizes:
        between(name, convert(flags[name], to=int, setting=name), 1)
    if sizes:
        # Memory is bounded by optim.micro_batch_tokens, so accumulating only means more prompts in a step.
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
    """Return documented YAML that `read_config` reads back as an equal configuration."""
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
    """Name each setting that differs, with both values: "optim.learning_rate: 0.0003 → 0.001"."""
    before, after = dict(flat(a)), dict(flat(b))
    return [
        f"{name}: {write_yaml(plain(before[name]))} → {write_yaml(plain(after[name]))}"
        for name in before
        if before[name] != after[name]
    ]


def flat(config: Config) -> Iterator[tuple[str, Any]]:
    for section in fields(config):
        settings = getattr(config, section.name)
        for setting in fields(settings):
            yield f"{section.name}.{setting.name}", getattr(settings, setting.name)


def plain(value: Any) -> Any:
    """Return lists for tuples, which YAML does not have."""
    return list(value) if isinstance(value, tuple) else value


def comment(text: str) -> list[str]:
    yaml_words = text.replace("None:", "null:")
    return [f"# {line}" for line in textwrap.wrap(yaml_words, width=100)]


@cache
def documentation() -> dict[str, dict[str, str]]:
    """Return the docstrings of the section classes: class -> setting -> text, the class's own under ""."""
    described: dict[str, dict[str, str]] = {}
    sources = (inspect.getsource(module) for module in (schema, runtime))
    for node in chain.from_iterable(ast.parse(source).body for source in sources):
        if isinstance(node, ast.ClassDef):
            described[node.name] = {"": ast.get_docstring(node) or ""}
            for field, text in pairwise(node.body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                        value=ast.Constant(value=str(words))
                    ):
                        described[node.name][name] = inspect.cleandoc(words)
    return described
