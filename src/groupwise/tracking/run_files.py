"""metrics.jsonl: one line a step, readable while the run goes on and after it crashed."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from groupwise.errors import ConfigError
from groupwise.files import sync, write_atomically
from groupwise.records import Group, Rollout, field_names
from groupwise.tracking.run_folder import step_of


@dataclass(frozen=True, slots=True)
class MetricsFile:
    """The metrics of one run.

    Example: append(3, {"reward/mean": 0.5, "policy/kl": nan}) writes
        {"step": 3, "reward/mean": 0.5, "policy/kl": null}
    """

    path: Path

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the line of one step; a value that is not finite becomes null and keeps its name.

        The line is on the disk when this returns: a checkpoint of the step must not outlive it.
        """
        new = not self.path.exists()
        line = json.dumps({"step": step, **{name: finite(value) for name, value in metrics.items()}})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync(self.path.parent)

    def truncate_after(self, step: int) -> list[int]:
        """Forget what came after `step`, and the half line of a crash: a resumed run writes it again.

        Returns the steps up to `step` that have no line: they were lost, and no one writes them again.
        """
        lines = complete_lines(self.path) if self.path.exists() else []
        kept = [(line, row["step"]) for line, row in lines if row["step"] <= step]
        if self.path.exists():
            write_atomically(self.path, "".join(f"{line}\n" for line, _ in kept))
        return sorted(set(range(1, step + 1)) - {number for _, number in kept})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every complete line of a metrics file."""
    return [row for _, row in complete_lines(path)]


def last_step(path: Path) -> int:
    """The last step with a complete line; 0 where there is none."""
    rows = read_metrics(path) if path.is_file() else []
    return max((int(row["step"]) for row in rows), default=0)


def complete_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Each line as written and as read; a last line that a crash cut short is left out."""
    lines = path.read_bytes().decode(errors="replace").split("\n")
    if lines[-1] == "":
        lines.pop()
    rows: list[tuple[str, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["step"]
        except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
            if number == len(lines):
                break
            raise ConfigError(f"line {number} of {path} is damaged: remove that line") from error
        rows.append((line, row))
    return rows


def as_ranges(steps: Sequence[int]) -> str:
    """Write steps in few words: [3, 4, 5, 9] -> "3 – 5, 9"."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return ", ".join(str(first) if first == last else f"{first} – {last}" for first, last in ranges)


def finite(value: float) -> float | None:
    """The number as JSON can hold it."""
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


ROLLOUT_SCHEMA = pa.schema(
    {
        "step": pa.int64(),
        "group": pa.int32(),
        "member": pa.int32(),
        "prompt": pa.string(),  # JSON: a list of messages, or a string
        "text": pa.string(),
        "turns": pa.string(),  # JSON: text and calls of each turn; empty for a task without tools
        "tokens": pa.list_(pa.int32()),
        "trained": pa.list_(pa.bool_()),
        "logprobs": pa.list_(pa.float32()),
        "entropies": pa.list_(pa.float32()),
        "prompt_length": pa.int32(),
        "length": pa.int32(),  # tokens the policy chose
        "rewards": pa.map_(pa.string(), pa.float64()),
        "reward": pa.float64(),
        "advantage": pa.float64(),
        "finish": pa.string(),
        "error": pa.string(),
        "example": pa.string(),  # JSON: the columns
    }
)
COPIED = [
    name
    for name in ROLLOUT_SCHEMA.names
    if name in field_names(Rollout) and name not in ("prompt", "rewards", "turns")
]
"""Columns that are fields of a Rollout as they are."""
ROWS_TOGETHER = 128
"""Rows in a Parquet row group, at least: few enough to be read in a blink, and to be written in one."""
REPEATING = ["prompt", "example", "finish", "error"]
"""Columns with few different values, worth a dictionary."""
SOUGHT = ["group", "member"]
"""Columns that a slice is looked for by: their smallest and largest values stand in the file's footer."""


def write_rollouts(path: Path, step: int, groups: Sequence[Group]) -> None:
    """Write one row per rollout; the same groups always give the same bytes.

    Few groups of answers share a Parquet row group, so that one can be read without most of the others.
    """
    table = pa.Table.from_pydict(columns(step, groups), schema=ROLLOUT_SCHEMA)
    members = max((len(group.rollouts) for group in groups), default=1)
    buffer = pa.BufferOutputStream()
    pq.write_table(
        table,
        buffer,
        compression="zstd",
        row_group_size=members * -(-ROWS_TOGETHER // members),
        use_dictionary=REPEATING,
        write_statistics=SOUGHT,
    )
    write_atomically(path, buffer.getvalue().to_pybytes())


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """The rows of one file, with prompt, example and rewards as Python values."""
    found: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    for row in found:
        row["prompt"] = json.loads(row["prompt"])
        row["example"] = json.loads(row["example"])
        row["rewards"] = dict(row["rewards"])
        row["turns"] = json.loads(row["turns"])
    return found


def remove_steps_after(folder: Path, step: int) -> None:
    """Forget the files of later steps: a resumed run writes them again."""
    for path in folder.glob("step-*"):
        found = step_of(path.name)
        if found is not None and found > step:
            path.unlink()


def columns(step: int, groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Return what is written, column by column: several times as fast as row by row."""
    numbered = [(number, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    rollouts = [rollout for _, rollout in numbered]
    examples = [as_json(dict(group.example.columns)) for group in groups]
    # The members of a group hold one and the same prompt.
    prompts = {id(rollout.prompt): rollout.prompt for rollout in rollouts}
    written = {key: as_json(prompt) for key, prompt in prompts.items()}
    return {
        "step": [step] * len(rollouts),
        "group": [number for number, _ in numbered],
        "prompt": [written[id(rollout.prompt)] for rollout in rollouts],
        "length": [rollout.length for rollout in rollouts],
        "turns": [as_json([asdict(turn) for turn in rollout.turns]) for rollout in rollouts],
        "rewards": [list(rollout.rewards.items()) for rollout in rollouts],
        "example": [examples[number] for number, _ in numbered],
        **{name: [getattr(rollout, name) for rollout in rollouts] for name in COPIED},
    }


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


UPDATE_SCHEMA = pa.schema(
    {
        "group": pa.int32(),
        "member": pa.int32(),
        "logprobs": pa.list_(pa.float32()),  # of the trained tokens, in their order
    }
)


def write_updates(path: Path, seen: Mapping[tuple[int, int], Sequence[float]]) -> None:
    """Write one row for each rollout that was trained on, given by its group and member in the step."""
    columns = {
        "group": [group for group, _ in seen],
        "member": [member for _, member in seen],
        "logprobs": list(seen.values()),
    }
    buffer = pa.BufferOutputStream()
    table = pa.Table.from_pydict(columns, schema=UPDATE_SCHEMA)
    pq.write_table(
        table, buffer, compression="zstd", use_dictionary=False, write_statistics=["group", "member"]
    )
    write_atomically(path, buffer.getvalue().to_pybytes())


def read_update(path: Path, *, group: int, member: int) -> list[float] | None:
    """Return the trainer's log-probabilities of one rollout; None where it was not trained on."""
    if not path.is_file():
        return None
    wanted = [("group", "=", group), ("member", "=", member)]
    found: list[list[float]] = pq.read_table(path, columns=["logprobs"], filters=wanted)[
        "logprobs"
    ].to_pylist()
    return found[0] if found else None


RULE = "=" * 50


def write_completions(path: Path, groups: Sequence[Group], *, is_perfect: Callable[[Rollout], bool]) -> None:
    """Write every perfect rollout, prompt and completion; no file when there is none."""
    found = [rollout for group in groups for rollout in group.valid if is_perfect(rollout)]
    if found:
        write_atomically(path, "".join(f"{prompt_text(r)}\n{r.transcript}\n{RULE}\n" for r in found))


def prompt_text(rollout: Rollout) -> str:
    """Return what was asked: the prompt, or of a chat all but the system's words."""
    if isinstance(rollout.prompt, str):
        return f"Prompt {rollout.prompt}"
    said = (message["content"] for message in rollout.prompt if message["role"] != "system")
    return f"Prompt {chr(10).join(map(str, said))}"


MOST_WAITING = 2
"""Writes that may wait: a slow disk holds the run up rather than filling the memory."""


class BackgroundWriter:
    """Does what it is given, one after the other; a failure is raised at the next call."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="groupwise-writer")
        self._waiting: deque[Future[None]] = deque()

    def submit(self, write: Callable[..., None], *values: Any, **named: Any) -> None:
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= MOST_WAITING):
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(write, *values, **named))

    def flush(self) -> None:
        """Wait until everything is written."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """Write what is left and end; more than once does no harm."""
        try:
            self.flush()
        finally:
            self._thread.shutdown(wait=True)
