"""Read settings from everywhere they can come from: defaults < YAML file < flags < `section.key=value`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from groupwise.config.flags import FLAGS, settings_of
from groupwise.config.model import preset_settings
from groupwise.config.sections import Config, RolloutConfig
from groupwise.config.text import BadYaml, parse_yaml
from groupwise.config.values import convert, convert_option, convert_text, shorten
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
