"""The files that a run writes: metrics.jsonl, rollouts and updates as Parquet, and completions as text.

All of them can be read during the run and after a crash. `BackgroundWriter` writes files while training
continues.
"""

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
    """The metrics file of one run: one line of JSON per step.

    Example: append(3, {"reward/mean": 0.5, "policy/kl": nan}) writes
        {"step": 3, "reward/mean": 0.5, "policy/kl": null}
    """

    path: Path

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of one step. Values that are not finite become null.

        The line is synced to disk before this returns, so that no checkpoint exists without its metrics.
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
        """Remove the lines after `step`, which a resumed run writes again, and an incomplete last line.

        Of several lines of one step, the last stays. Returns the steps up to `step` that have no line. Their
        metrics are lost.
        """
        lines = complete_lines(self.path) if self.path.exists() else []
        remaining = {row["step"]: line for line, row in lines if row["step"] <= step}
        if self.path.exists():
            write_atomically(self.path, "".join(f"{line}\n" for line in remaining.values()))
        return sorted(set(range(1, step + 1)) - remaining.keys())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return every complete line of a metrics file."""
    return [row for _, row in complete_lines(path)]


def last_step(path: Path) -> int:
    """Return the last step with a complete line; 0 if there is none."""
    rows = read_metrics(path) if path.is_file() else []
    return max((int(row["step"]) for row in rows), default=0)


def complete_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return each line as text and parsed; an incomplete last line, as after a crash, is skipped."""
    lines = path.read_bytes().decode(errors="replace").split("\n")
    if lines[-1] == "":
        lines.pop()
    rows: list[tuple[str, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if type(row["step"]) is not int:
                raise TypeError("a step is a whole number")
        except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
            if number == len(lines):
                break
            raise ConfigError(f"line {number} of {path} is damaged; delete that line") from error
        rows.append((line, row))
    return rows


def as_ranges(steps: Sequence[int]) -> str:
    """Format steps as ranges: [3, 4, 5, 9] -> "3 – 5, 9"."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return ", ".join(str(first) if first == last else f"{first} – {last}" for first, last in ranges)


def finite(value: float) -> float | None:
    """Return the number, or None if it is not finite, which JSON cannot represent."""
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
        "rewards": pa.struct({}),  # one field per reward, as the file needs
        "reward": pa.float64(),
        "advantage": pa.float64(),
        "token_advantages": pa.list_(pa.float32()),  # of each trained token; null if all are equal
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
"""Columns copied unchanged from the fields of a `Rollout`."""
ROWS_TOGETHER = 128
"""Minimum rows per Parquet row group: small enough to read one quickly."""
REPEATING = ["prompt", "example", "finish", "error"]
"""Columns with few distinct values, stored with dictionary encoding."""
SOUGHT = ["group", "member"]
"""Columns that readers filter by; the file footer has their minimum and maximum per row group."""


def write_rollouts(path: Path, step: int, groups: Sequence[Group]) -> None:
    """Write one row per rollout. Equal groups give equal bytes.

    Each Parquet row group holds only a few groups, so that one can be read without most of the others.
    """
    table = pa.Table.from_pydict(columns(step, groups), schema=schema_for(groups))
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


def schema_for(groups: Sequence[Group]) -> pa.Schema:
    """Return the schema of a file. `rewards` is a struct: not every reader of Parquet knows maps."""
    names = dict.fromkeys(name for group in groups for rollout in group.rollouts for name in rollout.rewards)
    at = ROLLOUT_SCHEMA.get_field_index("rewards")
    if not names:  # every rollout failed, and Parquet has no empty struct
        return ROLLOUT_SCHEMA.remove(at)
    return ROLLOUT_SCHEMA.set(at, pa.field("rewards", pa.struct({name: pa.float64() for name in names})))


def reward_parts(stored: Mapping[str, float | None] | Sequence[tuple[str, float]] | None) -> dict[str, float]:
    """Return the rewards of a row by name; files of earlier versions hold them as pairs."""
    pairs = stored.items() if isinstance(stored, Mapping) else stored or ()
    return {name: value for name, value in pairs if value is not None}


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """Return the rows of one file, with prompt, example, rewards and turns as Python values."""
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    for row in rows:
        row["prompt"] = json.loads(row["prompt"])
        row["example"] = json.loads(row["example"])
        row["rewards"] = reward_parts(row.get("rewards"))
        row["turns"] = json.loads(row["turns"])
    return rows


def remove_steps_after(folder: Path, step: int) -> None:
    """Remove the files of later steps, which a resumed run writes again."""
    for path in folder.glob("step-*"):
        file_step = step_of(path.name)
        if file_step is not None and file_step > step:
            path.unlink()


def columns(step: int, groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Return the table column by column, several times as fast as row by row."""
    numbered = [(number, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    rollouts = [rollout for _, rollout in numbered]
    examples = [as_json(dict(group.example.columns)) for group in groups]
    # All members of a group share one prompt object, which is serialized once.
    prompts = {id(rollout.prompt): rollout.prompt for rollout in rollouts}
    written = {key: as_json(prompt) for key, prompt in prompts.items()}
    return {
        "step": [step] * len(rollouts),
        "group": [number for number, _ in numbered],
        "prompt": [written[id(rollout.prompt)] for rollout in rollouts],
        "length": [rollout.length for rollout in rollouts],
        "turns": [as_json([asdict(turn) for turn in rollout.turns]) for rollout in rollouts],
        "rewards": [dict(rollout.rewards) or None for rollout in rollouts],
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
    """Write one row per trained rollout; `seen` maps (group, member) to the trainer's log-probabilities."""
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
    """Return the trainer's log-probabilities of one rollout; None if it was not trained on."""
    if not path.is_file():
        return None
    filters = [("group", "=", group), ("member", "=", member)]
    rows: list[list[float]] = pq.read_table(path, columns=["logprobs"], filters=filters)[
        "logprobs"
    ].to_pylist()
    return rows[0] if rows else None


RULE = "=" * 50


def write_completions(path: Path, groups: Sequence[Group], *, is_perfect: Callable[[Rollout], bool]) -> None:
    """Write prompt and completion of every perfect rollout. Without any, no file is written."""
    perfect = [rollout for group in groups for rollout in group.valid if is_perfect(rollout)]
    if perfect:
        write_atomically(path, "".join(f"{prompt_text(r)}\n{r.transcript}\n{RULE}\n" for r in perfect))


def prompt_text(rollout: Rollout) -> str:
    """Return the prompt as text, without the system message."""
    if isinstance(rollout.prompt, str):
        return f"Prompt {rollout.prompt}"
    contents = (message["content"] for message in rollout.prompt if message["role"] != "system")
    return f"Prompt {chr(10).join(map(str, contents))}"


MOST_WAITING = 2
"""Maximum pending writes: a slow disk slows the run down instead of filling memory."""


class BackgroundWriter:
    """Runs writes in order on a background thread. A failed write raises at the next call."""

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
        """Finish pending writes and stop the thread. Safe to call more than once."""
        try:
            self.flush()
        finally:
            self._thread.shutdown(wait=True)
