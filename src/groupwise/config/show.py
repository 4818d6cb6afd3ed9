"""Write a configuration for people: as YAML with every setting explained, and as the differences of two."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import chain, pairwise
from typing import Any

from groupwise.config import evolve, model, optim, sections, surroundings, tools
from groupwise.config.sections import Config
from groupwise.config.text import write_yaml


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
    sources = (inspect.getsource(module) for module in (model, optim, sections, surroundings, tools, evolve))
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
