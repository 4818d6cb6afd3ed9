"""Rollouts and updates of a run as Parquet files, one of each per step.

Prompts and examples are stored as they are: a chat prompt is a list of structs, an example a struct. Parquet
needs one type for each value, and other programs expect the same types in all files of a run. `RolloutSchema`
therefore collects the types of all examples it knows. A value without a common type is stored as JSON text,
and the metadata of its field says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from groupwise.files import write_atomically
from groupwise.records import Group, Rollout, field_names, plain
from groupwise.tracking.run_folder import step_of

COLUMNS = {
    "step": pa.int64(),
    "group": pa.int32(),
    "member": pa.int32(),
    "prompt": None,  # a list of messages, or a string
    "text": pa.string(),
    "turns": pa.string(),  # JSON: text and calls of each turn; empty for a task without tools
    "tokens": pa.list_(pa.int32()),
    "trained": pa.list_(pa.bool_()),
    "logprobs": pa.list_(pa.float32()),
    "entropies": pa.list_(pa.float32()),
    "prompt_length": pa.int32(),
    "length": pa.int32(),  # tokens the policy chose
    "rewards": None,  # a struct with one field per reward
    "extra": None,  # a struct with what TRL-style rewards logged with log_extra
    "reward": pa.float64(),
    "advantage": pa.float64(),
    "token_advantages": pa.list_(pa.float32()),  # of each trained token; null if all are equal
    "branches": pa.list_(  # further token sequences of an agent's rollout
        pa.struct(
            {
                "tokens": pa.list_(pa.int32()),
                "trained": pa.list_(pa.bool_()),
                "logprobs": pa.list_(pa.float32()),
                "entropies": pa.list_(pa.float32()),
                "prompt_length": pa.int32(),
            }
        )
    ),
    "rewritten": pa.int32(),  # an agent's model calls that changed an earlier turn
    "finish": pa.string(),
    "error": pa.string(),
    "example": None,  # a struct with the columns of the example
}
"""The columns and their types. None: the type depends on the run."""
CONVERTED = ("prompt", "rewards", "turns", "extra", "branches")
COPIED = [name for name in COLUMNS if name in field_names(Rollout) and name not in CONVERTED]
"""Columns copied unchanged from the fields of a `Rollout`."""
ROWS_TOGETHER = 128
"""Minimum rows per Parquet row group: small enough to read one quickly."""
REPEATING = ("prompt", "example", "finish", "error")
"""Columns with few distinct values, stored with dictionary encoding."""
SOUGHT = ["group", "member"]
"""Columns that readers filter by; the file footer has their minimum and maximum per row group."""

Kind = Any
"""The type of a value: "bool", "int", "float" or "text"; a dict of kinds for a struct; a list of one kind for
a list; "json" for values without a common type; None for null."""
ARROW_TYPES = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "text": pa.string()}
MOST_FIELDS = 64
"""Maximum number of fields of a struct: a dict with more keys is a table of its own, stored as JSON."""
MARK = b"groupwise"
"""Metadata of a field stored as JSON text (`json`), and of one that was null (`null`) or {} (`empty`) in all
rows so far."""


DEEPEST = 8
"""Levels of lists and structs; what is nested deeper is stored as JSON."""
FORMAT = {b"groupwise.format": b"2"}
"""Metadata of prompts and examples. Earlier versions stored both as JSON text, without metadata."""


def kind_of(value: Any, depth: int = 0) -> Kind:
    """Return the type of a value."""
    value = basic(value)
    match value:
        case None:
            return None
        case bool():
            return "bool"
        case int():
            return "int" if -(2**63) <= value < 2**63 else "json"
        case float():
            return "float"
        case Mapping() | list() | tuple() if depth == DEEPEST:
            return "json"
        case Mapping():
            fields = {str(key): kind_of(part, depth + 1) for key, part in value.items()}
            return fields if len(fields) <= MOST_FIELDS and all(fields) else "json"
        case list() | tuple():
            return [merged(kind_of(part, depth + 1) for part in value)]
    return "text"


def basic(value: Any) -> Any:
    """Return arrays and scalars of numpy and sets as lists and numbers."""
    if isinstance(value, set | frozenset):
        return plain(value)
    return value.tolist() if hasattr(value, "tolist") else value


def merged(kinds: Iterable[Kind]) -> Kind:
    """Return the one type that all of these values fit."""
    common: Kind = None
    for kind in kinds:
        common = merge(common, kind)
    return common


def merge(one: Kind, other: Kind) -> Kind:
    if one == other or other is None:
        return one
    if one is None:
        return other
    if isinstance(one, dict) and isinstance(other, dict):
        fields = {name: merge(one.get(name), other.get(name)) for name in {**one, **other}}
        return fields if len(fields) <= MOST_FIELDS else "json"
    if isinstance(one, list) and isinstance(other, list):
        return [merge(one[0], other[0])]
    numbers = {one, other} == {"int", "float"} if isinstance(one, str) and isinstance(other, str) else False
    return "float" if numbers else "json"


def field_for(name: str, kind: Kind) -> pa.Field:
    """Return the Arrow field of a kind."""
    if isinstance(kind, list):
        return pa.field(name, pa.list_(field_for("element", kind[0])))
    if isinstance(kind, dict) and kind:
        return pa.field(name, pa.struct([field_for(part, inner) for part, inner in kind.items()]))
    if isinstance(kind, str) and kind in ARROW_TYPES:
        return pa.field(name, ARROW_TYPES[kind])
    mark = "json" if kind == "json" else "null" if kind is None else "empty"
    return pa.field(name, pa.string(), metadata={MARK: mark})


def kind_in(stored: pa.Field) -> Kind:
    """Return the kind of a field that `field_for` made."""
    mark = (stored.metadata or {}).get(MARK)
    if mark is not None:
        return {b"json": "json", b"null": None, b"empty": {}}[mark]
    if pa.types.is_struct(stored.type):
        return {part.name: kind_in(part) for part in stored.type}
    if pa.types.is_list(stored.type):
        return [kind_in(stored.type.value_field)]
    return next(kind for kind, arrow in ARROW_TYPES.items() if arrow == stored.type)


def as_stored(value: Any, kind: Kind) -> Any:
    """Return a value in the form that the field of its kind stores."""
    if value is None or kind is None:
        return None
    if kind in ("json", {}):
        return as_json(value)
    value = basic(value)
    if isinstance(kind, dict):
        parts = {str(key): part for key, part in value.items()}
        return {name: as_stored(parts.get(name), inner) for name, inner in kind.items()}
    if isinstance(kind, list):
        return [as_stored(part, kind[0]) for part in value]
    return str(value) if kind == "text" else float(value) if kind == "float" else value


def as_read(value: Any, stored: pa.Field) -> Any:
    """Return a stored value with its JSON parts parsed: the inverse of `as_stored`."""
    if value is None or not has_json(stored):
        return value
    if MARK in (stored.metadata or {}):
        return json.loads(value)
    if pa.types.is_struct(stored.type):
        return {part.name: as_read(value[part.name], part) for part in stored.type}
    return [as_read(part, stored.type.value_field) for part in value]


def has_json(stored: pa.Field) -> bool:
    if MARK in (stored.metadata or {}):
        return True
    if pa.types.is_struct(stored.type):
        return any(map(has_json, stored.type))
    return pa.types.is_list(stored.type) and has_json(stored.type.value_field)


def read_prompt(value: Any, stored: pa.Field) -> Any:
    """Return the prompt of a row: a string or messages. Keys that a message does not have are left out."""
    if is_old(stored):
        return json.loads(value)
    prompt = as_read(value, stored)
    if not isinstance(prompt, list):
        return prompt
    kept = ("role", "content")
    return [{key: part for key, part in one.items() if part is not None or key in kept} for one in prompt]


def read_example(value: Any, stored: pa.Field) -> Any:
    """Return the example of a row as a dict. A column that this example does not have is None."""
    return json.loads(value) if is_old(stored) else as_read(value, stored)


def is_old(stored: pa.Field) -> bool:
    """Whether an earlier version wrote the field, as JSON text."""
    return not FORMAT.items() <= (stored.metadata or {}).items()


@dataclass(slots=True)
class RolloutSchema:
    """The types of a run's rollouts: those of all known examples, and of all rollouts written so far."""

    rewards: Sequence[str] = ()
    """Names of the rewards, known before the first rollout."""
    examples: Iterable[Mapping[str, Any]] = ()
    """Examples known before the first rollout."""
    folder: Path | None = None
    """Folder of the rollouts of earlier steps, in a run that is resumed."""
    _names: dict[str, None] = field(default_factory=dict)
    _prompt: Kind = None
    _example: Kind = None
    _extra: Kind = None
    _agent: bool = False
    """Whether the rollouts are those of an agent."""
    _known: bool = False

    def observe(self, groups: Sequence[Group]) -> None:
        """Extend the types by those of new rollouts."""
        if not self._known:
            self._learn()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self._names |= dict.fromkeys(name for rollout in rollouts for name in rollout.rewards)
        prompts = {id(rollout.prompt): rollout.prompt for rollout in rollouts}
        self._prompt = merge(self._prompt, merged(map(kind_of, prompts.values())))
        self._example = merge(self._example, merged(kind_of(group.example.columns) for group in groups))
        logged = merged(kind_of(rollout.extra) for rollout in rollouts if rollout.extra)
        self._extra = merge(self._extra, logged)
        self._agent = self._agent or any(rollout.rewritten is not None for rollout in rollouts)

    def _learn(self) -> None:
        """Read the types of the examples and of the last file. This may take a while: many examples."""
        self._known = True
        self._names |= dict.fromkeys(self.rewards)
        self._example = merged(kind_of(dict(example)) for example in self.examples)
        self.examples = ()
        paths = [] if self.folder is None else sorted(self.folder.glob("step-*.parquet"))
        if not paths:
            return
        stored = pq.read_schema(max(paths, key=lambda path: step_of(path.name) or 0))
        if is_old(stored.field("example")):
            return
        self._prompt = kind_in(stored.field("prompt"))
        self._example = merge(kind_in(stored.field("example")), self._example)
        self._extra = kind_in(stored.field("extra")) if "extra" in stored.names else None
        if "rewards" in stored.names:
            self._names |= {part.name: None for part in stored.field("rewards").type}

    def arrow(self) -> pa.Schema:
        """Return the schema of a file. `rewards` is a struct: not every reader of Parquet knows maps."""
        own = {
            "prompt": with_format(field_for("prompt", self._prompt)),
            "rewards": pa.field("rewards", pa.struct({name: pa.float64() for name in self._names})),
            "extra": field_for("extra", self._extra),
            "example": with_format(field_for("example", self._example)),
        }
        fields = [own.get(name) or pa.field(name, kind) for name, kind in COLUMNS.items()]
        # Without a reward there is no such column: Parquet has no empty struct.
        absent = {"rewards": not self._names, "extra": self._extra is None}
        absent |= dict.fromkeys(("branches", "rewritten"), not self._agent)
        return pa.schema([one for one in fields if not absent.get(one.name)])

    def table(self, step: int, groups: Sequence[Group]) -> pa.Table:
        """Return the rollouts as a table, made column by column: several times as fast as row by row."""
        schema = self.arrow()
        numbered = [(number, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
        rollouts = [rollout for _, rollout in numbered]
        # All members of a group share one prompt object and one example, which are converted once.
        shared = {id(rollout.prompt): rollout.prompt for rollout in rollouts}
        places = {key: place for place, key in enumerate(shared)}
        prompts = pa.array(
            [as_stored(prompt, self._prompt) for prompt in shared.values()], schema.field("prompt").type
        )
        examples = pa.array(
            [as_stored(group.example.columns, self._example) for group in groups],
            schema.field("example").type,
        )
        columns = {
            "step": [step] * len(rollouts),
            "group": [number for number, _ in numbered],
            "prompt": prompts.take(pa.array([places[id(r.prompt)] for r in rollouts], pa.int64())),
            "length": [rollout.length for rollout in rollouts],
            "turns": [as_json([asdict(turn) for turn in rollout.turns]) for rollout in rollouts],
            "rewards": [dict(rollout.rewards) or None for rollout in rollouts],
            "branches": [[asdict(branch) for branch in rollout.branches] for rollout in rollouts],
            "extra": [as_stored(rollout.extra or None, self._extra) for rollout in rollouts],
            "example": examples.take(pa.array([number for number, _ in numbered], pa.int64())),
            **{name: [getattr(rollout, name) for rollout in rollouts] for name in COPIED},
        }
        return pa.Table.from_pydict({name: columns[name] for name in schema.names}, schema=schema)


def with_format(made: pa.Field) -> pa.Field:
    return made.with_metadata({**(made.metadata or {}), **FORMAT})


def write_rollouts(
    path: Path, step: int, groups: Sequence[Group], schema: RolloutSchema | None = None
) -> None:
    """Write one row per rollout. Equal groups give equal bytes.

    `schema` is shared by all files of a run. Each Parquet row group holds only a few groups, so that one can
    be read without most of the others.
    """
    schema = schema or RolloutSchema()
    schema.observe(groups)
    table = schema.table(step, groups)
    members = max((len(group.rollouts) for group in groups), default=1)
    buffer = pa.BufferOutputStream()
    pq.write_table(
        table,
        buffer,
        compression="zstd",
        row_group_size=members * -(-ROWS_TOGETHER // members),
        use_dictionary=[leaf for name in REPEATING for leaf in leaves(table.schema.field(name))],
        write_statistics=SOUGHT,
    )
    write_atomically(path, buffer.getvalue().to_pybytes())


def leaves(stored: pa.Field) -> list[str]:
    """Return the Parquet columns of a field: `prompt.list.element.role`."""
    if pa.types.is_struct(stored.type):
        return [f"{stored.name}.{leaf}" for part in stored.type for leaf in leaves(part)]
    if pa.types.is_list(stored.type):
        return [f"{stored.name}.list.{leaf}" for leaf in leaves(stored.type.value_field)]
    return [stored.name]


def reward_parts(stored: Mapping[str, float | None] | Sequence[tuple[str, float]] | None) -> dict[str, float]:
    """Return the rewards of a row by name; files of earlier versions hold them as pairs."""
    pairs = stored.items() if isinstance(stored, Mapping) else stored or ()
    return {name: value for name, value in pairs if value is not None}


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """Return the rows of one file, with prompt, example, rewards and turns as Python values."""
    table = pq.read_table(path)
    prompt, example = table.schema.field("prompt"), table.schema.field("example")
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        row["prompt"] = read_prompt(row["prompt"], prompt)
        row["example"] = read_example(row["example"], example)
        row["rewards"] = reward_parts(row.get("rewards"))
        row["turns"] = json.loads(row["turns"])
        if "extra" in row:
            row["extra"] = as_read(row["extra"], table.schema.field("extra"))
    return rows


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=plain)


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
