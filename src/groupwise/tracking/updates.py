"""What the update saw of each rollout, as Parquet: the trainer's log-probabilities beside the sampler's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from groupwise.records import Sample
from groupwise.tracking.files import write_atomically

SCHEMA = pa.schema(
    {
        "group": pa.int32(),
        "member": pa.int32(),
        "logprobs": pa.list_(pa.float32()),  # of the trained tokens, in their order
    }
)


def write_updates(path: Path, seen: Sequence[tuple[Sample, Sequence[float]]]) -> None:
    """Write one row for each sample that was trained on; group and member are those of the rollouts' file."""
    columns = {
        "group": [sample.group for sample, _ in seen],
        "member": [sample.member for sample, _ in seen],
        "logprobs": [logprobs for _, logprobs in seen],
    }
    buffer = pa.BufferOutputStream()
    table = pa.Table.from_pydict(columns, schema=SCHEMA)
    pq.write_table(table, buffer, compression="zstd", use_dictionary=False)
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
