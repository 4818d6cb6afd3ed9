"""Token ids to the text that each stands for, special tokens included."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from groupwise.tracking.run_files import read_update
from groupwise.tracking.run_folder import RunFolder, step_of

UNFINISHED = "\ufffd"
"""What decoding gives for the first bytes of a character whose other bytes are in the next token."""
LONGEST = 4
"""Bytes of a character: after this many tokens there is nothing to wait for."""


class TokenTexts:
    """The run's tokenizer, read when first needed."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._decode: Callable[[Sequence[int]], str] | None = None
        self._lock = threading.Lock()

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Return each token's text; the texts joined are the whole text."""
        return pieces(tokens, self._decoder())

    def turns(self, tokens: Sequence[int], trained: Sequence[bool]) -> list[dict[str, Any]]:
        """Return the segments that the policy wrote and those that came from outside, in turn."""
        turns: list[dict[str, Any]] = []
        for piece, chosen in zip(self.of(tokens), trained, strict=True):
            if not turns or turns[-1]["policy"] != chosen:
                turns.append({"policy": chosen, "text": ""})
            turns[-1]["text"] += piece
        return turns

    def _decoder(self) -> Callable[[Sequence[int]], str]:
        with self._lock:
            if self._decode is None:
                path = tokenizer_file(self.folder)
                if path is None:
                    return as_numbers
                from tokenizers import Tokenizer

                try:
                    tokenizer = Tokenizer.from_file(str(path))
                except Exception:  # the library's own; a damaged file must not hide the rest of a run
                    return as_numbers
                self._decode = lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))
            return self._decode


def as_numbers(tokens: Sequence[int]) -> str:
    """What stands for the text where no tokenizer can be read."""
    return "".join(f"⟨{token}⟩" for token in tokens)


def tokenizer_file(folder: RunFolder) -> Path | None:
    """Return where the run's tokenizer lies; a checkpoint has it too."""
    candidates = [folder.tokenizer, *sorted(folder.checkpoints.glob("step-*/tokenizer.json"))]
    return next((path for path in candidates if path.is_file()), None)


def pieces(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return each token's text as what it adds to the text of the tokens before it.

    A token is decoded together with the one before: decoded alone, some tokenizers drop its leading
    space. Where characters are spread over several tokens, the last of them gets the text.
    """
    found: list[str] = []
    start = read = 0  # the last token that was told, and the first that was not
    for end in range(1, len(tokens) + 1):
        text = added(tokens, start, read, end, decode)
        if text.endswith(UNFINISHED) and end - read < LONGEST and end < len(tokens):
            found.append("")
            continue
        found.append(text)
        start, read = read, end
    return found


def added(
    tokens: Sequence[int], start: int, read: int, end: int, decode: Callable[[Sequence[int]], str]
) -> str:
    """Return what the tokens from `read` to `end` add to the text of those from `start` to `read`."""
    before, text = decode(tokens[start:read]), decode(tokens[start:end])
    # Broken bytes may read differently in company: then the tokens are taken by themselves.
    return text[len(before) :] if text.startswith(before) else decode(tokens[read:end])


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


class RolloutView:
    """The rollouts of one run. Nothing is kept but the rewards of steps that were looked at."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.pieces = TokenTexts(folder)
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
    segments: list[Found] = []
    for turn in json.loads(recorded or "[]"):
        segments.append({"policy": True, "text": turn["text"]})
        for call in turn["calls"]:
            about = {name: call.get(name) for name in ("name", "arguments", "error")}
            segments.append({"policy": False, "text": call["result"], **about})
    return segments


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


COLUMNS = ("group", "member", "reward", "advantage", "length", "finish", "error", "text", "turns")
AROUND = 60
"""Characters shown on either side of what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
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
class SearchHits:
    """What was found, newest step first, and where to go on."""

    rollouts: list[dict[str, Any]]
    searched: int
    """Steps looked through."""
    go_on: int | None
    """The last step that is still to be looked through; None when all are."""
    skip: int = 0
    """Hits of that step which are among these or were shown before."""


def search(
    slices: RolloutView, wanted: RolloutFilter, *, limit: int = 50, seconds: float = 1.0
) -> SearchHits:
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
            return SearchHits(rollouts=found, searched=number, go_on=step)
        skip = wanted.skip if step == wanted.last else 0
        hits = list(hits_in(slices, step, wanted))[skip:]
        room = limit - len(found)
        found += hits[:room]
        if len(hits) > room:
            return SearchHits(rollouts=found, searched=number + 1, go_on=step, skip=skip + room)
    return SearchHits(rollouts=found, searched=len(steps), go_on=None)


def hits_in(slices: RolloutView, step: int, wanted: RolloutFilter) -> Iterator[dict[str, Any]]:
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


def matching(table: pa.Table, wanted: RolloutFilter) -> Any:
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
