"""Reference pages, generated from the code: every command, every setting, every public Python name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import typer

import groupwise
from groupwise.config import FLAGS, Config
from groupwise.config.coerce import write_yaml
from groupwise.config.loading import SECTIONS, documentation, plain

# Copied before anything else is imported: the package `groupwise.evolve` would hide the function `gw.evolve`.
EAGER = dict(vars(groupwise))
PUBLIC = {name: EAGER[name] if name in EAGER else getattr(groupwise, name) for name in groupwise.__all__}


def commands() -> str:
    """Return the page of the command line."""
    from groupwise.cli import app

    lines = [
        "# Commands",
        "",
        "Every command prints its options with `--help`. Any [setting](settings.md) can be given as",
        "`section.key=value`.",
        "",
    ]
    for name, command in walk(typer.main.get_command(app), "groupwise"):
        lines += [f"## {name}", "", cell(command.help or "", "\n\n"), ""]
        rows = [row for param in command.params if (row := option(param))]
        if rows:
            lines += ["| option | meaning |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield every command below a group, by its full name."""
    for child_name, child in sorted(getattr(command, "commands", {}).items()):
        full = f"{name} {child_name}"
        if getattr(child, "commands", None):
            yield from walk(child, full)
        else:
            yield full, child


def option(param: Any) -> str | None:
    """Return the table row of an option or argument."""
    if getattr(param, "hidden", False):
        return None
    argument = param.param_type_name == "argument"
    words = [param.make_metavar_name()] if hasattr(param, "make_metavar_name") else None
    names = words or ([param.name.upper()] if argument else [*param.opts, *param.secondary_opts])
    shown = ", ".join(f"`{name}`" for name in names)
    return f"| {shown} | {cell(getattr(param, 'help', None) or '')} |"


def settings() -> str:
    """Return the page of the settings."""
    config = Config()
    flags = {setting: "--" + flag.replace("_", "-") for flag, setting in flag_settings().items()}
    lines = [
        "# Settings",
        "",
        "Set them in a YAML file (`--config FILE`), as `section.key=value` in the command line, or in",
        "Python. The command line overrides the file. `groupwise config` prints all of them. A default of",
        "`null` is resolved when the run starts.",
        "",
    ]
    for section in SECTIONS:
        values = getattr(config, section)
        described = documentation()[type(values).__name__]
        lines += [f"## {section}", "", cell(described[""], "\n\n"), ""]
        lines += ["| setting | default | flag | meaning |", "|---|---|---|---|"]
        for field in fields(values):
            name = f"{section}.{field.name}"
            default = write_yaml(plain(getattr(values, field.name)))
            flag = f"`{flags[name]}`" if name in flags else ""
            lines.append(f"| `{name}` | `{cell(default)}` | {flag} | {cell(described.get(field.name, ''))} |")
        lines.append("")
    return "\n".join(lines)


def flag_settings() -> dict[str, str]:
    """Return the flags of the command line by name, each with the setting that it sets."""
    return {flag: setting for flag, setting in FLAGS.items() if isinstance(setting, str)}


def python() -> str:
    """Return the page of the public Python names."""
    lines = ["# Python", "", "`import groupwise as gw`. Everything below is public.", ""]
    for name, thing in PUBLIC.items():
        lines += list(described_module(thing) if inspect.ismodule(thing) else described(f"gw.{name}", thing))
    return "\n".join(lines)


def described_module(module: Any) -> Iterator[str]:
    """Yield the lines of a public module and of its names."""
    short = module.__name__.removeprefix("groupwise.")
    for name in module.__all__:
        yield from described(f"gw.{short}.{name}", getattr(module, name))


def described(name: str, thing: Any, level: int = 2) -> Iterator[str]:
    """Yield the lines of a class or function: signature, docstring, public methods."""
    yield f"{'#' * level} {name}"
    yield ""
    yield from signature(name, thing)
    text = inspect.getdoc(thing) if inspect.isroutine(thing) or inspect.isclass(thing) else None
    if text and not re.match(rf"{re.escape(name.rpartition('.')[2])}\(", text):  # a dataclass without one
        yield cell(text, "\n\n")
        yield ""
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        for method, function in vars(thing).items():
            member = getattr(function, "__func__", function)
            if not method.startswith("_") and inspect.isfunction(member):
                yield from described(f"{name}.{method}", member, level + 1)


def signature(name: str, thing: Any) -> Iterator[str]:
    """Yield the signature as a code block, one parameter a line where there are several."""
    try:
        given = inspect.signature(thing)
    except (TypeError, ValueError):
        return
    parameters = [p for p in given.parameters.values() if p.name not in ("self", "cls")]
    text = str(given.replace(parameters=parameters))
    if len(text) > 80:
        inner = "".join(f"    {line},\n" for line in text_of(parameters))
        end = "" if given.return_annotation is given.empty else f" -> {given.return_annotation}"
        text = f"(\n{inner}){end}"
    text = re.sub(r"(: |-> )'([^'\n]*)'", r"\1\2", text)  # annotations are text here
    yield from ("```python", f"{name.removeprefix('gw.')}{text}", "```", "")


def text_of(parameters: list[inspect.Parameter]) -> Iterator[str]:
    """Yield each parameter as it is written, with the star that makes the following ones keyword-only."""
    starred = False
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            starred = True
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield str(parameter)


def cell(text: str, paragraph: str = " ") -> str:
    """Return a text for Markdown: no line breaks within a paragraph, nothing that ends a table's cell."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    joined = paragraph.join(" ".join(part.split()) for part in paragraphs)
    return (
        joined.replace("|", "\\|").replace("<", "&lt;") if paragraph == " " else joined.replace("<", "&lt;")
    )
