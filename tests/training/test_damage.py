"""A run whose files were damaged resumes with the same bits, or is refused with one sentence and left alone.

Each damage is done to a copy of a run that was killed in its third step, with checkpoints of the first two.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from groupwise import cli
from tests.support.file_events import FileEvent, Strike, lasting_files, observe
from tests.support.small_models import small_model, tiny_tokenizer
from tests.support.small_runs import task_file

TINY = (
    *("run.max_steps=3", "run.save_every=1", "run.keep_last=3", "model.device=cpu", "lora.r=2"),
    *("rollout.prompts=2", "rollout.group_size=2", "rollout.max_tokens=4", "rollout.temperature=1.5"),
    *("evaluate.every=2", "evaluate.samples=1", "evaluate.during=1", "task.held_out=2"),
    *("track.report=false", "track.trackers=[]"),
)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Change one bit, which only a checksum shows."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": truncate,
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": Path.unlink,
    "garbage": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "flipped": flip,
    "nested": lambda path: path.write_text("[" * 100_000),
    "deep": lambda path: path.write_text('{"a": ' * 100_000),
    "list": lambda path: path.write_text("[1, 2]\n"),
    "number": lambda path: path.write_text("7\n"),
    "twice": lambda path: path.write_bytes(path.read_bytes() * 2),
    "folder": instead(lambda path: (path / "inside").mkdir(parents=True)),
    "dangling": instead(lambda path: path.symlink_to(path.parent / "nowhere")),
    "circle": instead(lambda path: path.symlink_to(path)),
    "pipe": instead(os.mkfifo),
}
LAST = "checkpoints/step-000002"
RESUMES = {
    # file: damages. An incomplete checkpoint is passed over, and the one before it resumed.
    f"{LAST}/state.json": "truncated deleted nested folder",
    f"{LAST}/checksums.json": "truncated emptied garbage nested deep list number folder circle pipe",
    f"{LAST}/adapter_model.safetensors": "truncated dangling",
    f"{LAST}/training/optimizer.safetensors": "emptied",
    f"{LAST}/training/optimizer.json": "list",
    "metrics.jsonl": "truncated deleted nested number zeros twice",
    "training.log": "deleted garbage",
    ".lock": "emptied deleted nested",
    "tokenizer.json": "truncated nested",
    "rollouts/step-000001.parquet": "deleted garbage",
    "updates/step-000002.parquet": "emptied",
    "eval/step-000002.json": "truncated nested list",
    "eval/before.txt": "garbage",
}
REFUSED = {
    "config.yaml": "truncated emptied deleted garbage zeros nested deep list number twice folder pipe",
    f"{LAST}/state.json": "flipped zeros",
    f"{LAST}/checksums.json": "flipped",
    f"{LAST}/adapter_model.safetensors": "flipped zeros",
    f"{LAST}/adapter_config.json": "flipped",
    f"{LAST}/training/optimizer.safetensors": "flipped zeros",
    "metrics.jsonl": "garbage folder dangling circle pipe",
    "training.log": "folder dangling pipe",
    ".lock": "folder dangling pipe",
    "tokenizer.json": "folder",
    "rollouts/step-000001.parquet": "folder pipe",
    "eval/before.json": "folder",
    "../luck.py": "deleted emptied garbage folder",
}


def cases(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(file, damage) for file, damages in table.items() for damage in damages.split()]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a run that was not disturbed, `whole`, and one that was killed, `killed`."""
    folder = tmp_path_factory.mktemp("damage")
    task_file(folder)
    small_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    start = ["train", str(folder / "luck.py"), f"run.output_dir={folder}", f"model.name={folder / 'model'}"]
    assert observe([*start, *TINY, "run.name=whole"], folder / "whole").code == 0
    third = Strike(FileEvent("os.rename", "", "/rollouts/.step-N.parquet.tmp-N"), 3)
    assert observe([*start, *TINY, "run.name=run"], folder / "run", third).code == -9
    assert (folder / "run" / LAST).is_dir()
    (folder / "run").rename(folder / "killed")
    return folder


@pytest.fixture
def run(place: Path) -> Path:
    """The killed run under the name that it had."""
    shutil.rmtree(place / "run", ignore_errors=True)
    shutil.copytree(place / "killed", place / "run")
    task_file(place)
    return place / "run"


@pytest.mark.parametrize(("file", "damage"), cases(RESUMES))
def test_a_run_with_this_damage_resumes_with_the_same_bits(place, run, file, damage, capsys):
    DAMAGES[damage](run / file)
    assert cli.main(["train", "--resume", str(run)]) == 0
    found, whole = lasting_files(run), lasting_files(place / "whole")
    differing = {name for name in whole if found.get(name) != whole[name]}
    if file.startswith("checkpoints/"):
        assert differing == set()
    assert differing <= {file}  # a record that was damaged is lost, and nothing else
    if file == "metrics.jsonl" and damage != "twice":
        lost = r"has no line for steps (1 – )?2: they were lost"
        assert re.search(lost, capsys.readouterr().out)
    if damage == "twice":
        assert differing == set()


def everything(folder: Path) -> dict[str, bytes | str]:
    """Return what is in a folder; temporary files of a killed session may go."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else "not a file"
        for path in folder.rglob("*")
        if ".tmp-" not in path.name and path.name != ".lock"
    }


@pytest.mark.parametrize(("file", "damage"), cases(REFUSED))
def test_a_run_with_this_damage_is_refused_with_one_sentence_and_left_alone(run, file, damage, capsys):
    path = run.parent / "luck.py" if file == "../luck.py" else run / file
    DAMAGES[damage](path)
    before = everything(run)
    try:
        code = cli.main(["train", "--resume", str(run)])
    finally:
        if file == "../luck.py":
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    told = capsys.readouterr().err
    assert (code, told.count("\n"), told[:7]) == (2, 1, "error: "), told
    assert everything(run) == before


def test_there_are_enough_kinds_of_damage():
    assert len(cases(RESUMES)) + len(cases(REFUSED)) >= 75
