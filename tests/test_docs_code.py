"""Code blocks in the documentation work: commands parse, and Python programs run."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main

import groupwise
from groupwise.cli import app
from groupwise.config import Config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS: Any = typer.main.get_command(app)
SMALL = {
    **{"run.max_steps": 1, "track.trackers": [], "track.report": False, "evaluate.skip": True},
    **{"rollout.prompts": 2, "rollout.group_size": 2, "rollout.max_tokens": 8, "model.device": "cpu"},
    **{"task.held_out": 1},
}
"""Settings that replace those of a program, so that it takes seconds."""
NOT_RUN = {
    "docs/design.md": "an excerpt of training/loop.py",
    "docs/environments.md": "environments of other packages and servers",
    "docs/populations.md": "steps of full size; Ray",
    "docs/retrieval.md": "needs an index",
}
"""Pages with blocks that are only compiled; `PROGRAMS` of these pages run nevertheless."""
PROGRAMS = {"docs/environments.md": ["class Guess"]}


def blocks(page: Path, *languages: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each code block in one of these languages."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE):
        if match[2] in languages:
            lines = [line.removeprefix(match[1]) for line in match[3].splitlines()]
            yield text[: match.start()].count("\n") + 2, "\n".join(lines)


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield each `groupwise …` command of the documentation with its place."""
    for page in PAGES:
        for line, text in blocks(page, "console", "bash"):
            for command in re.sub(r"\\\n\s*", "", text).splitlines():
                words = shlex.split(command.removeprefix("$ "), comments=True)
                if words[:1] == ["groupwise"] or words[:1] in (["torchrun"], ["accelerate"]):
                    place = (
                        f"{page.relative_to(ROOT).as_posix()}:{line} {words[words.index('groupwise') + 1]}"
                    )
                    yield place, words[words.index("groupwise") + 1 :]


def programs() -> Iterator[tuple[str, str]]:
    """Yield each Python block of the documentation with its place."""
    for page in PAGES:
        for line, text in blocks(page, "python"):
            yield f"{page.relative_to(ROOT).as_posix()}:{line}", text


def runs(place: str, text: str) -> bool:
    page = place.partition(":")[0]
    listed = page not in NOT_RUN or any(part in text for part in PROGRAMS.get(page, ()))
    return "import groupwise" in text and listed


@pytest.mark.parametrize(("place", "words"), [pytest.param(*case, id=case[0]) for case in commands()])
def test_a_command_has_the_flags_and_settings_that_it_is_given(place: str, words: list[str]) -> None:
    command = COMMANDS
    while hasattr(command, "commands"):
        assert words[0] in command.commands, f"{place}: there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name, list(words))  # raises for an unknown flag or a bad value
    sections = {section.name: section for section in fields(Config)}
    for section, key in re.findall(r"^([a-z]+)\.([a-z_0-9]+)(?:\.\w+)*=", "\n".join(words), re.MULTILINE):
        assert section in sections, f"{place}: there is no section {section}"
        assert key in {field.name for field in fields(getattr(Config(), section))}, f"{section}.{key}"


@pytest.mark.parametrize(("place", "text"), [pytest.param(*case, id=case[0]) for case in programs()])
def test_a_python_block_compiles(place: str, text: str) -> None:
    compile(text.replace("(…,", "("), place, "exec")  # "…" stands for further arguments


@pytest.mark.parametrize(
    ("place", "text"), [pytest.param(*case, id=case[0]) for case in programs() if runs(*case)]
)
def test_a_python_program_trains_the_built_in_model(place, text, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"country": name, "answer": name[:3]} for name in ("France", "Italy", "Spain", "Norway")]
    (tmp_path / "capitals.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trained: list[Path] = []
    train = importlib.import_module("groupwise").train

    def small_train(task: Any, **settings: Any) -> Any:
        own = {name: settings[name] for name in ("loss", "advantage", "callbacks") if name in settings}
        model = settings["model"] if str(settings.get("model")).startswith("tiny") else "tiny"
        result = train(task, model=model, **own, **{**SMALL, "run.output_dir": str(tmp_path)})
        trained.append(Path(result.folder))
        return result

    monkeypatch.setattr(groupwise, "train", small_train)
    exec(compile(text, place, "exec"), {"__name__": "__main__"})
    assert [len((run / "metrics.jsonl").read_text().splitlines()) for run in trained] == [1]
