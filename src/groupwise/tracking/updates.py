"""What the update saw of each rollout, as Parquet: the trainer's log-probabilities beside the sampler's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from groupwise.tracking.files import write_atomically

SCHEMA = pa.schema(
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
    table = pa.Table.from_pydict(columns, schema=SCHEMA)
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
