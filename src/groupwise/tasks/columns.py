"""The columns a task needs: what each may be called in a data file, and how its values are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from groupwise.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column: a bad value is refused with the file, the line and the column it stands in."""

    read: Callable[[Any], Any]
    """From what the file holds to what the task uses; raises ValueError with the reason."""
    names: tuple[str, ...] = ()
    """What data files call it, the likeliest first; none: its own name alone."""
    judges: bool = True
    """Whether rewards read it: a question only asks."""


Columns = Mapping[str, Column]


def text(value: Any) -> str:
    """Read text that is not blank; a number will do."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"expected text, got {type(value).__name__}")
    if not str(value).strip():
        raise ValueError("it is empty")
    return str(value)


def renamed(columns: Columns, names: Mapping[str, str], *, task: str) -> Columns:
    """Return the columns under the names that the user's data gives them, `ours: theirs`."""
    wanted = dict(columns)
    for ours, theirs in names.items():
        if not isinstance(theirs, str):
            raise ConfigError(f"task.columns.{ours} must name a column of the data; got {theirs!r}")
        if columns and ours not in columns:
            raise ConfigError(f"task.columns: {task} has no column {ours!r}, only {', '.join(columns)}")
        known = wanted.get(ours, Column(read=lambda value: value))
        wanted[ours] = replace(known, names=(theirs,))
    return wanted


def read_columns(row: Mapping[str, Any], columns: Columns, *, where: str) -> dict[str, Any]:
    """Return the row with every column read, under the task's own name for it."""
    values = dict(row)
    for name, column in columns.items():
        tried = column.names or (name,)
        found = next((candidate for candidate in tried if candidate in row), None)
        if found is None:
            raise ConfigError(
                f"{where}: no column {' or '.join(map(repr, tried))}; it has {', '.join(map(str, row))}"
            )
        try:
            values[name] = column.read(row[found])
        except ValueError as error:
            raise ConfigError(f"{where}, column {found!r}: {error}; got {str(row[found])[:60]!r}") from None
    return values
