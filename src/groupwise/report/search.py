"""Finding rollouts by reward, length, end and words, without ever holding more than a step of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from groupwise.report.slices import Slices, read, told_turns

COLUMNS = ("group", "member", "reward", "advantage", "length", "finish", "error", "text", "turns")
AROUND = 60
"""Characters shown on either side of what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a rollout must be to be found; None and "" ask for nothing."""

    text: str = ""
    """Anywhere in the completion, in small or capital letters."""
    least_reward: float | None = None
    most_reward: float | None = None
    least_length: int | None = None
    most_length: int | None = None
    finish: str = ""
    """end, stop, length; or error for those that failed."""
    first: int | None = None
    last: int | None = None
    """Steps."""
    skip: int = 0
    """Hits of the last step that were shown before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """What was found, newest step first, and where to go on."""

    rollouts: list[dict[str, Any]]
    searched: int
    """Steps looked through."""
    go_on: int | None
    """The last step that is still to be looked through; None when all are."""
    skip: int = 0
    """Hits of that step which are among these or were shown before."""


def search(slices: Slices, wanted: Wanted, *, limit: int = 50, seconds: float = 1.0) -> Hits:
    """Look through steps, newest first, until enough is found or the time is up."""
    steps = [
        step
        for step in reversed(slices.steps())
        if (wanted.first is None or step >= wanted.first) and (wanted.last is None or step <= wanted.last)
    ]
    found: list[dict[str, Any]] = []
    deadline = time.monotonic() + seconds
    for number, step in enumerate(steps):
        if len(found) >= limit or (number and time.monotonic() > deadline):
            return Hits(rollouts=found, searched=number, go_on=step)
        skip = wanted.skip if step == wanted.last else 0
        hits = list(hits_in(slices, step, wanted))[skip:]
        room = limit - len(found)
        found += hits[:room]
        if len(hits) > room:
            return Hits(rollouts=found, searched=number + 1, go_on=step, skip=skip + room)
    return Hits(rollouts=found, searched=len(steps), go_on=None)


def hits_in(slices: Slices, step: int, wanted: Wanted) -> Iterator[dict[str, Any]]:
    try:
        table = read(slices.folder.rollouts_at(step), COLUMNS)
    except OSError:
        return  # removed by a run that resumed before this step
    for row in table.filter(matching(table, wanted)).to_pylist():
        text, turns = row.pop("text"), row.pop("turns", None) or "[]"
        if wanted.text.lower() not in text.lower():
            text = "\n".join(map(as_read, told_turns(turns)))
            if wanted.text.lower() not in text.lower():
                continue  # the words were those of the record, not of anyone in it
        yield {"step": step, **row, "excerpt": excerpt(text, wanted.text)}


def as_read(part: Mapping[str, Any]) -> str:
    """What the page shows of a turn, or of a tool's answer with what it was asked."""
    if "arguments" not in part:
        return str(part["text"])
    return f"{part['name']} {json.dumps(part['arguments'], ensure_ascii=False)} {part['text']}"


def matching(table: pa.Table, wanted: Wanted) -> Any:
    """Return a mask over the table's rows."""
    conditions = [pc.greater_equal(table["group"], 0)]
    for column, least, most in (
        ("reward", wanted.least_reward, wanted.most_reward),
        ("length", wanted.least_length, wanted.most_length),
    ):
        if least is not None and column in table.column_names:
            conditions.append(pc.greater_equal(table[column], least))
        if most is not None and column in table.column_names:
            conditions.append(pc.less_equal(table[column], most))
    if wanted.finish == "error":
        conditions.append(pc.is_valid(table["error"]))
    elif wanted.finish:
        conditions.append(pc.equal(table["finish"], wanted.finish))
    if wanted.text:
        conditions.append(said(table, wanted.text))
    mask = conditions[0]
    for condition in conditions[1:]:
        mask = pc.and_(mask, condition)
    return mask


def said(table: pa.Table, words: str) -> Any:
    """Return where the answer, or any turn and tool's answer before it, holds the words."""
    found = pc.match_substring(table["text"], words, ignore_case=True)
    if "turns" not in table.column_names:
        return found
    written = json.dumps(words, ensure_ascii=False)[1:-1]  # as JSON has it
    return pc.or_(found, pc.match_substring(table["turns"], written, ignore_case=True))


def excerpt(text: str, words: str) -> str:
    """Return one line around the words, or the beginning."""
    place = text.lower().find(words.lower()) if words else 0
    start = max(0, place - AROUND)
    end = place + len(words) + AROUND + (0 if words else AROUND)
    line = " ".join(text[start:end].split())
    return f"{'…' if start else ''}{line}{'…' if end < len(text) else ''}"
