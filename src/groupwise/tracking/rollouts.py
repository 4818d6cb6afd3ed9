"""Rollouts as Parquet: every token the policy chose and everything that was made of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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
COPIED = [name for name in SCHEMA.names if name in field_names(Rollout) and name not in ("prompt", "rewards")]
"""Columns that are fields of a Rollout as they are."""
ROWS_TOGETHER = 128
"""Rows in a Parquet row group, at least: few enough to be read in a blink, and to be written in one."""
REPEATING = ["prompt", "example", "finish", "error"]
"""Columns with few different values, worth a dictionary."""


def write_rollouts(path: Path, step: int, groups: Sequence[Group]) -> None:
    """Write one row per rollout; the same groups always give the same bytes.

    Few groups of answers share a Parquet row group, so that one can be read without most of the others.
    """
    table = pa.Table.from_pylist(list(rows(step, groups)), schema=SCHEMA)
    members = max((len(group.rollouts) for group in groups), default=1)
    buffer = pa.BufferOutputStream()
    pq.write_table(
        table,
        buffer,
        compression="zstd",
        row_group_size=members * -(-ROWS_TOGETHER // members),
        use_dictionary=REPEATING,
    )
    write_atomically(path, buffer.getvalue().to_pybytes())


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """The rows of one file, with prompt, example and rewards as Python values."""
    found: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    for row in found:
        row["prompt"] = json.loads(row["prompt"])
        row["example"] = json.loads(row["example"])
        row["rewards"] = dict(row["rewards"])
    return found


def remove_steps_after(folder: Path, step: int) -> None:
    """Forget the files of later steps: a resumed run writes them again."""
    for path in folder.glob("step-*"):
        found = step_of(path.name)
        if found is not None and found > step:
            path.unlink()


def rows(step: int, groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    for index, group in enumerate(groups):
        example = as_json(dict(group.example.columns))
        for rollout in group.rollouts:
            yield {
                "step": step,
                "group": index,
                "prompt": as_json(rollout.prompt),
                "rewards": list(rollout.rewards.items()),
                "example": example,
                "length": rollout.length,
                **{name: getattr(rollout, name) for name in COPIED},
            }


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
