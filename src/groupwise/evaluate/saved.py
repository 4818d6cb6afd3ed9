"""Evaluations on disk: eval/NAME.json with every number, eval/NAME.txt with answers to read."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError
from groupwise.evaluate.held_out import Evaluation, transcripts
from groupwise.tracking.files import write_atomically
from groupwise.tracking.run_folder import RunFolder

TRANSCRIPTS = 10
"""Answers in the text file."""


def make_writable(folder: Path) -> None:
    """Make the folder, and a file in it: what cannot be written is found before hours of measuring."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(cannot_save(folder, error)) from error


def cannot_save(folder: Path, error: OSError) -> str:
    return f"cannot save results in {folder}: {error.strerror or error}; name another folder by --output"


def write_evaluation(folder: Path, name: str, result: Evaluation, *, about: Mapping[str, Any]) -> Path:
    """Write both files, the JSON last: where it is, the other is too."""
    write_atomically(folder / f"{name}.txt", transcripts(result, count=TRANSCRIPTS))
    path = folder / f"{name}.json"
    write_atomically(path, json.dumps({**about, **result.to_json()}, indent=1))
    return path


def read_evaluation(run: RunFolder, name: str) -> Evaluation | None:
    """Return an evaluation that was written earlier; None when there is none."""
    path = run.evaluations / f"{name}.json"
    try:
        return Evaluation.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}): move it away") from error


def unused_name(folder: Path, stem: str) -> str:
    """Return the stem, numbered when an evaluation of that name exists."""
    name, number = stem, 1
    while (folder / f"{name}.json").exists():
        number += 1
        name = f"{stem}-{number}"
    return name
