"""Rollouts read by slice: a step, a group or a member at a time, and of those only the columns asked for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from groupwise.report.pieces import Pieces
from groupwise.tracking.run_folder import RunFolder, step_of
from groupwise.tracking.updates import read_update

SHORT = 160
"""Characters of a prompt in a list of groups."""
LIST_COLUMNS = ("group", "member", "prompt", "length", "rewards", "reward", "advantage", "finish", "error")
MEMBER_COLUMNS = (*LIST_COLUMNS, "text", "turns", "tokens", "trained", "prompt_length", "example")
TOKEN_COLUMNS = (
    "tokens",
    "trained",
    "logprobs",
    "entropies",
    "prompt_length",
    "advantage",
    "reward",
    "finish",
)

Found = dict[str, Any]


class Slices:
    """The rollouts of one run. Nothing is kept but the rewards of steps that were looked at."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.pieces = Pieces(folder)
        self._rewards: dict[int, tuple[int, NDArray[np.float64]]] = {}
        self._lock = threading.Lock()

    def steps(self) -> list[int]:
        """Return the steps whose rollouts were kept."""
        try:
            names = [path.name for path in self.folder.rollouts.iterdir() if path.suffix == ".parquet"]
        except OSError:
            return []
        return sorted(step for name in names if (step := step_of(name)) is not None)

    def rewards(self, step: int) -> NDArray[np.float64]:
        """Return the rewards of a step's rollouts, failed ones left out."""
        path = self.folder.rollouts_at(step)
        written = path.stat().st_mtime_ns
        with self._lock:
            kept = self._rewards.get(step)
        if kept is not None and kept[0] == written:
            return kept[1]
        table = read(path, ("reward", "error"))
        valid = np.asarray(table["error"].is_null())
        rewards: NDArray[np.float64] = np.asarray(table["reward"], dtype=np.float64)[valid]
        with self._lock:
            self._rewards[step] = (written, rewards)
        return rewards

    def groups(self, step: int) -> list[Found]:
        """Return a step's groups, each with its prompt and the rewards of its members, but no texts."""
        table = read(self.folder.rollouts_at(step), LIST_COLUMNS)
        groups: dict[int, Found] = {}
        for row in table.to_pylist():
            group = groups.setdefault(
                row["group"], {"group": row["group"], "prompt": asked(row["prompt"]), "members": []}
            )
            del row["prompt"]
            group["members"].append(tidy(row))
        return list(groups.values())

    def group(self, step: int, group: int) -> Found | None:
        """Return one group with the texts of its members, best advantage first."""
        table = read(self.folder.rollouts_at(step), MEMBER_COLUMNS, group=group)
        members = [self._member(row) for row in table.to_pylist()]
        if not members:
            return None
        first = table.slice(0, 1).to_pylist()[0]
        members.sort(key=lambda member: (-member["advantage"], member["member"]))
        return {
            "step": step,
            "group": group,
            "prompt": json.loads(first["prompt"]),
            "example": json.loads(first["example"]),
            "members": members,
        }

    def _member(self, row: Found) -> Found:
        start, trained = row["prompt_length"], row["trained"]
        turns = told_turns(row.get("turns"))
        if not turns and not all(trained[start:]):
            # Where no turns were recorded, the mask tells what came from outside.
            turns = self.pieces.turns(row["tokens"][start:], trained[start:])
        kept = tidy(
            {name: row[name] for name in LIST_COLUMNS if name in row and name not in ("prompt", "group")}
        )
        return {**kept, "text": row["text"], "turns": turns}

    def tokens(self, step: int, group: int, member: int) -> Found | None:
        """Return one rollout token by token: text, mask, log-probabilities, entropy and ratio."""
        table = read(self.folder.rollouts_at(step), TOKEN_COLUMNS, group=group, member=member)
        if not table.num_rows:
            return None
        row = table.to_pylist()[0]
        try:
            seen = read_update(self.folder.updates_at(step), group=group, member=member)
        except (OSError, pa.ArrowInvalid):
            seen = None  # without the update's file a rollout has no ratios, and all else
        return {
            "step": step,
            "group": group,
            "member": member,
            "ids": row["tokens"],
            "pieces": self.pieces.of(row["tokens"]),
            "trained": row["trained"],
            "logprobs": rounded(row["logprobs"]),
            "entropies": rounded(row["entropies"]),
            "ratios": ratios(row["logprobs"], row["trained"], seen),
            "prompt_length": row["prompt_length"],
            "advantage": row["advantage"],
            "reward": row["reward"],
            "finish": row["finish"],
        }


def told_turns(recorded: str | None) -> list[Found]:
    """Return what the policy wrote and what its calls brought back, one after the other."""
    stretches: list[Found] = []
    for turn in json.loads(recorded or "[]"):
        stretches.append({"policy": True, "text": turn["text"]})
        for call in turn["calls"]:
            about = {name: call.get(name) for name in ("name", "arguments", "error")}
            stretches.append({"policy": False, "text": call["result"], **about})
    return stretches


def ratios(
    sampled: Sequence[float], trained: Sequence[bool], seen: Sequence[float] | None
) -> list[float | None] | None:
    """Return π/q for each token, None where it is not trained; None when the update left no trace."""
    if seen is None or len(seen) != sum(trained):
        return None
    known = iter(
        np.exp(np.clip(np.subtract(seen, [s for s, t in zip(sampled, trained, strict=True) if t]), -30, 30))
    )
    return [round(float(next(known)), 5) if chosen else None for chosen in trained]


def read(path: Path, columns: Iterable[str], **where: int) -> pa.Table:
    """Read those of the columns that a file has, where columns equal the values given."""
    try:
        return read_parts(path, columns, where)
    except pa.ArrowInvalid as error:
        raise OSError(f"{path.name} is damaged: {error}") from error


def read_parts(path: Path, columns: Iterable[str], where: Mapping[str, int]) -> pa.Table:
    with pq.ParquetFile(path) as file:
        present = set(file.schema_arrow.names)
        wanted = [name for name in (*columns, *where) if name in present]
        parts = [part for part in range(file.num_row_groups) if may_hold(file, part, where)]
        table = file.read_row_groups(parts, columns=wanted, use_threads=False)
    for name, value in where.items():
        table = table.filter(pc.equal(table[name], value))
    return table


def may_hold(file: pq.ParquetFile, part: int, where: Mapping[str, int]) -> bool:
    """Whether the footer's smallest and largest values allow a row group to hold what is looked for."""
    if not where:
        return True
    columns = file.metadata.row_group(part)
    for index in range(columns.num_columns):
        column = columns.column(index)
        value, known = where.get(column.path_in_schema), column.statistics
        if value is None or known is None or not known.has_min_max:
            continue
        if not known.min <= value <= known.max:
            return False
    return True


def asked(prompt: str) -> str:
    """Return the beginning of what was asked: of a chat, of the user's last message."""
    value = json.loads(prompt)
    if not isinstance(value, str):
        said = [message for message in value if message.get("role") == "user"] or value
        value = said[-1].get("content", "") if said else ""
    text = str(value)
    line = " ".join(text.split())
    return line if len(line) <= SHORT else f"{line[: SHORT - 1]}…"


def tidy(row: Found) -> Found:
    if "rewards" in row:
        row["rewards"] = dict(row["rewards"])
    return row


def rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 5) for value in values]
