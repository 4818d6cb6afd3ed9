"""Commands that are killed at a chosen file operation of their run folder, to be resumed and compared."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tests.support.small_runs import PROCESSES, deterministic_metrics

OPERATIONS = frozenset(
    (
        *("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate"),
        *("os.listdir", "os.scandir", "shutil.rmtree"),
    )
)


class FileEvent(NamedTuple):
    """One kind of file operation: the audit event, the mode of an `open`, the path without its numbers."""

    operation: str
    mode: str
    path: str

    @classmethod
    def of(cls, event: str, arguments: tuple[Any, ...], run: str) -> FileEvent | None:
        """Return the kind of an audit event; None if it does not concern the run folder."""
        if event not in OPERATIONS or not str(arguments[0]).startswith(run):
            return None
        mode = str(arguments[1]) if event == "open" else ""
        return cls(event, mode, re.sub(r"\d+", "N", str(arguments[0])[len(run) :]))


class Strike(NamedTuple):
    """SIGKILL at the nth event of a kind."""

    event: FileEvent
    nth: int


def observed(words: Sequence[str], run: str, strike: Strike | None, output: str) -> None:
    """Be the `groupwise` command; count the file operations in `run`, and be killed at one of them."""
    from groupwise import cli

    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}/{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    counts: Counter[FileEvent] = Counter()
    own = os.getpid()

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if os.getpid() != own or (kind := FileEvent.of(event, arguments, run)) is None:
            return
        counts[kind] += 1
        if strike is not None and kind == strike.event and counts[kind] == strike.nth:
            os.kill(own, signal.SIGKILL)

    sys.addaudithook(listen)
    code = cli.main(words)
    Path(output, "events").write_text(json.dumps([[*kind, count] for kind, count in counts.items()]))
    sys.exit(code)


class Observed(NamedTuple):
    code: int
    events: dict[FileEvent, int]
    """Empty if the command was killed."""
    err: str


def observe(words: Sequence[str], run: Path, strike: Strike | None = None) -> Observed:
    """Run a command in a process of its own."""
    with TemporaryDirectory() as output:
        process = PROCESSES.Process(target=observed, args=(words, str(run), strike, output))
        process.start()
        process.join(120)
        assert process.exitcode is not None
        events = Path(output, "events")
        rows = json.loads(events.read_text()) if events.exists() else []
        err = Path(output, "err").read_text()
    return Observed(process.exitcode, {FileEvent(*row[:3]): row[3] for row in rows}, err)


TELLS_TIME = (
    "training.log",
    ".lock",
    "training_stats.json",
    "state.json",
    "checksums.json",
    "config.yaml",
    "README.md",
)
"""Files that hold seconds or the name of the run."""


def lasting_files(run: Path) -> dict[str, Any]:
    """Return the content of a run that may not depend on how often it was killed."""
    files: dict[str, Any] = {
        path.relative_to(run).as_posix(): content_of(path)
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name not in (*TELLS_TIME, "metrics.jsonl")
    }
    return files | {"metrics.jsonl": deterministic_metrics(run)}


def content_of(path: Path) -> Any:
    """Return the bytes of a file. PEFT writes sets into adapter_config.json, in any order."""
    if path.name != "adapter_config.json":
        return path.read_bytes()
    settings = json.loads(path.read_text())
    return {name: sorted(value) if isinstance(value, list) else value for name, value in settings.items()}
