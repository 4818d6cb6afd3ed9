"""Rollouts as Parquet: every token the policy chose and everything that was made of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from groupwise.records import Group, Rollout, field_names
from groupwise.tracking.files import write_atomically
from groupwise.tracking.run_folder import step_of

SCHEMA = pa.schema(
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
    for name in SCHEMA.names
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
    table = pa.Table.from_pydict(columns(step, groups), schema=SCHEMA)
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
