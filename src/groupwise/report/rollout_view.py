"""Read a run's rollouts from its files: groups, single rollouts token by token, and search."""

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

from groupwise.tracking.rollout_files import read_example, read_prompt, read_update, reward_parts
from groupwise.tracking.run_folder import EVOLUTION, RunFolder, step_of

UNFINISHED = "\ufffd"
"""What the first bytes of a character decode to if its other bytes are in the next token."""
LONGEST = 4
"""Maximum number of bytes, and so of tokens, of a character."""


class TokenTexts:
    """Decodes tokens with the run's tokenizer, which is loaded on first use."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._decode: Callable[[Sequence[int]], str] | None = None
        self._lock = threading.Lock()

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token; joined, they are the whole text."""
        return pieces(tokens, self._decoder())

    def turns(self, tokens: Sequence[int], trained: Sequence[bool]) -> list[dict[str, Any]]:
        """Return the segments sampled by the policy and those that it read, in order."""
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
                except Exception:  # any error of the library: a damaged file must not hide the rest of a run
                    return as_numbers
                self._decode = lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))
            return self._decode


def as_numbers(tokens: Sequence[int]) -> str:
    """Return token ids in place of text, for runs without a readable tokenizer."""
    return "".join(f"⟨{token}⟩" for token in tokens)


def tokenizer_file(folder: RunFolder) -> Path | None:
    """Return the path of the run's tokenizer; checkpoints contain it too."""
    candidates = [folder.tokenizer, *sorted(folder.checkpoints.glob("step-*/tokenizer.json"))]
    return next((path for path in candidates if path.is_file()), None)


def pieces(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return each token's text: what it adds to the text of the tokens before it.

    A token is decoded together with the previous one, because some tokenizers drop the leading space of a
    token decoded alone. If a character spans several tokens, the last one gets the text.
    """
    texts: list[str] = []
    start = read = 0  # the last token with text so far, and the first without
    for end in range(1, len(tokens) + 1):
        text = added(tokens, start, read, end, decode)
        if text.endswith(UNFINISHED) and end - read < LONGEST and end < len(tokens):
            texts.append("")
            continue
        texts.append(text)
        start, read = read, end
    return texts


def added(
    tokens: Sequence[int], start: int, read: int, end: int, decode: Callable[[Sequence[int]], str]
) -> str:
    """Return what the tokens from `read` to `end` add to the text of those from `start` to `read`."""
    before, text = decode(tokens[start:read]), decode(tokens[start:end])
    # Incomplete characters may decode differently in context: then decode the tokens alone.
    return text[len(before) :] if text.startswith(before) else decode(tokens[read:end])


SHORT = 160
"""Maximum number of characters of a prompt in the list of groups."""
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
    "branches",
)

POPULATION_MEMBER = "population_member"
"""Column of an example, in a search: the name of the member that answered it."""

Record = dict[str, Any]


class RolloutView:
    """Reads the rollouts of one run. Only the rewards of the steps read so far are cached."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.pieces = TokenTexts(folder)
        self._rewards: dict[int, tuple[int, NDArray[np.float64]]] = {}
        self._lock = threading.Lock()

    @property
    def is_search(self) -> bool:
        """Whether a population was trained: its groups are those of all members."""
        return (self.folder.path / EVOLUTION).is_file()

    def steps(self) -> list[int]:
        """Return the steps that have stored rollouts."""
        try:
            names = [path.name for path in self.folder.rollouts.iterdir() if path.suffix == ".parquet"]
        except OSError:
            return []
        return sorted(step for name in names if (step := step_of(name)) is not None)

    def rewards(self, step: int) -> NDArray[np.float64]:
        """Return the rewards of a step's rollouts, without failed ones."""
        path = self.folder.rollouts_at(step)
        modified = path.stat().st_mtime_ns
        with self._lock:
            cached = self._rewards.get(step)
        if cached is not None and cached[0] == modified:
            return cached[1]
        table = read(path, ("reward", "error"))
        valid = np.asarray(table["error"].is_null())
        rewards: NDArray[np.float64] = np.asarray(table["reward"], dtype=np.float64)[valid]
        with self._lock:
            self._rewards[step] = (modified, rewards)
        return rewards

    def groups(self, step: int) -> list[Record]:
        """Return the groups of a step with their prompts and rewards, without the texts of answers.

        In a search, a group names the member of the population that answered it.
        """
        columns = (*LIST_COLUMNS, "example") if self.is_search else LIST_COLUMNS
        table = read(self.folder.rollouts_at(step), columns)
        schema = table.schema
        groups: dict[int, Record] = {}
        for row in table.to_pylist():
            prompt, example = row.pop("prompt"), row.pop("example", None)
            if row["group"] not in groups:
                excerpt = prompt_excerpt(read_prompt(prompt, schema.field("prompt")))
                groups[row["group"]] = {"group": row["group"], "prompt": excerpt, "members": []}
                if example is not None:
                    answered_by = read_example(example, schema.field("example")).get(POPULATION_MEMBER)
                    groups[row["group"]][POPULATION_MEMBER] = answered_by
            groups[row["group"]]["members"].append(tidy(row))
        return list(groups.values())

    def group(self, step: int, group: int) -> Record | None:
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
            "prompt": read_prompt(first["prompt"], table.schema.field("prompt")),
            "example": read_example(first["example"], table.schema.field("example")),
            "members": members,
        }

    def _member(self, row: Record) -> Record:
        start, trained = row["prompt_length"], row["trained"]
        turns = turn_segments(row.get("turns"))
        if not turns and not all(trained[start:]):
            # Without recorded turns, the mask shows which tokens the policy did not sample.
            turns = self.pieces.turns(row["tokens"][start:], trained[start:])
        summary = tidy(
            {name: row[name] for name in LIST_COLUMNS if name in row and name not in ("prompt", "group")}
        )
        return {**summary, "text": row["text"], "turns": turns}

    def tokens(self, step: int, group: int, member: int) -> Record | None:
        """Return one rollout token by token: text, mask, log-probability, entropy and ratio."""
        table = read(self.folder.rollouts_at(step), TOKEN_COLUMNS, group=group, member=member)
        if not table.num_rows:
            return None
        row = table.to_pylist()[0]
        try:
            trainer_logprobs = read_update(self.folder.updates_at(step), group=group, member=member)
        except (OSError, pa.ArrowInvalid):
            trainer_logprobs = None  # without the file of the update, only the ratios are missing
        return {
            "step": step,
            "group": group,
            "member": member,
            "ids": row["tokens"],
            "pieces": self.pieces.of(row["tokens"]),
            "trained": row["trained"],
            "logprobs": rounded(row["logprobs"]),
            "entropies": rounded(row["entropies"]),
            "ratios": ratios(
                row["logprobs"],
                row["trained"],
                trainer_logprobs,
                in_branches=sum(sum(branch["trained"]) for branch in row.get("branches") or ()),
            ),
            "prompt_length": row["prompt_length"],
            "advantage": row["advantage"],
            "reward": row["reward"],
            "finish": row["finish"],
        }


def turn_segments(recorded: str | None) -> list[Record]:
    """Return the policy's turns, the results of their tool calls and the environment's replies, in order."""
    segments: list[Record] = []
    for turn in json.loads(recorded or "[]"):
        segments.append({"policy": True, "text": turn["text"]})
        for call in turn["calls"]:
            about = {name: call.get(name) for name in ("name", "arguments", "error")}
            segments.append({"policy": False, "text": call["result"], **about})
        if turn.get("observation"):
            segments.append({"policy": False, "text": turn["observation"], "name": "environment"})
    return segments


def ratios(
    sampled: Sequence[float],
    trained: Sequence[bool],
    trainer_logprobs: Sequence[float] | None,
    *,
    in_branches: int = 0,
) -> list[float | None] | None:
    """Return π/q for each token, None if it is not trained; None if the update was not recorded.

    `in_branches`: trained tokens of the rollout's branches, whose log-probabilities come last.
    """
    if trainer_logprobs is None or len(trainer_logprobs) != sum(trained) + in_branches:
        return None
    trainer_logprobs = trainer_logprobs[: sum(trained)]
    known = iter(
        np.exp(
            np.clip(
                np.subtract(trainer_logprobs, [s for s, t in zip(sampled, trained, strict=True) if t]),
                -30,
                30,
            )
        )
    )
    return [round(float(next(known)), 5) if chosen else None for chosen in trained]


def read(path: Path, columns: Iterable[str], **where: int) -> pa.Table:
    """Read the columns that the file has, filtered to the rows where columns equal the given values."""
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
    """Whether a row group may contain matching rows, according to the footer's min/max statistics."""
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


def prompt_excerpt(prompt: Any) -> str:
    """Return the beginning of the prompt; for a chat, of the user's last message."""
    value = prompt
    if not isinstance(value, str):
        messages = [message for message in value if message.get("role") == "user"] or value
        value = messages[-1].get("content", "") if messages else ""
    text = str(value)
    line = " ".join(text.split())
    return line if len(line) <= SHORT else f"{line[: SHORT - 1]}…"


def tidy(row: Record) -> Record:
    row["rewards"] = reward_parts(row.get("rewards"))
    return row


def rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 5) for value in values]


COLUMNS = ("group", "member", "reward", "advantage", "length", "finish", "error", "text", "turns")
AROUND = 60
"""Number of characters shown on either side of a match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """The conditions of a search; None and "" match everything."""

    text: str = ""
    """Text to find anywhere in the rollout, ignoring case."""
    least_reward: float | None = None
    most_reward: float | None = None
    least_length: int | None = None
    most_length: int | None = None
    finish: str = ""
    """end, stop or length; or error for failed rollouts."""
    first: int | None = None
    """First step to search."""
    last: int | None = None
    """Last step to search."""
    skip: int = 0
    """Number of hits in the last step that were returned before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHits:
    """The hits of a search, newest step first, and where to continue."""

    rollouts: list[dict[str, Any]]
    searched: int
    """Number of steps searched."""
    go_on: int | None
    """The step to continue with; None if all steps are searched."""
    skip: int = 0
    """Number of hits of that step that were already returned."""


def search(view: RolloutView, query: RolloutFilter, *, limit: int = 50, seconds: float = 1.0) -> SearchHits:
    """Search steps, newest first, until `limit` hits are found or the time is up."""
    steps = [
        step
        for step in reversed(view.steps())
        if (query.first is None or step >= query.first) and (query.last is None or step <= query.last)
    ]
    rollouts: list[dict[str, Any]] = []
    deadline = time.monotonic() + seconds
    for number, step in enumerate(steps):
        if len(rollouts) >= limit or (number and time.monotonic() > deadline):
            return SearchHits(rollouts=rollouts, searched=number, go_on=step)
        skip = query.skip if step == query.last else 0
        hits = list(hits_in(view, step, query))[skip:]
        left = limit - len(rollouts)
        rollouts += hits[:left]
        if len(hits) > left:
            return SearchHits(rollouts=rollouts, searched=number + 1, go_on=step, skip=skip + left)
    return SearchHits(rollouts=rollouts, searched=len(steps), go_on=None)


def hits_in(view: RolloutView, step: int, query: RolloutFilter) -> Iterator[dict[str, Any]]:
    try:
        table = read(view.folder.rollouts_at(step), COLUMNS)
    except OSError:
        return  # removed when the run resumed from an earlier step
    for row in table.filter(matching(table, query)).to_pylist():
        text, turns = row.pop("text"), row.pop("turns", None) or "[]"
        if query.text.lower() not in text.lower():
            text = "\n".join(map(segment_text, turn_segments(turns)))
            if query.text.lower() not in text.lower():
                continue  # the match is in the JSON of the record, not in its texts
        yield {"step": step, **row, "excerpt": excerpt(text, query.text)}


def segment_text(part: Mapping[str, Any]) -> str:
    """Return the text of a segment as the page shows it; a tool result includes its call."""
    if "arguments" not in part:
        return str(part["text"])
    return f"{part['name']} {json.dumps(part['arguments'], ensure_ascii=False)} {part['text']}"


def matching(table: pa.Table, query: RolloutFilter) -> Any:
    """Return a mask over the table's rows."""
    conditions = [pc.greater_equal(table["group"], 0)]
    for column, least, most in (
        ("reward", query.least_reward, query.most_reward),
        ("length", query.least_length, query.most_length),
    ):
        if least is not None and column in table.column_names:
            conditions.append(pc.greater_equal(table[column], least))
        if most is not None and column in table.column_names:
            conditions.append(pc.less_equal(table[column], most))
    if query.finish == "error":
        conditions.append(pc.is_valid(table["error"]))
    elif query.finish:
        conditions.append(pc.equal(table["finish"], query.finish))
    if query.text:
        conditions.append(contains_text(table, query.text))
    mask = conditions[0]
    for condition in conditions[1:]:
        mask = pc.and_(mask, condition)
    return mask


def contains_text(table: pa.Table, words: str) -> Any:
    """Return a mask of the rows whose answer, or an earlier turn or tool result, contains the words."""
    in_answer = pc.match_substring(table["text"], words, ignore_case=True)
    if "turns" not in table.column_names:
        return in_answer
    escaped = json.dumps(words, ensure_ascii=False)[1:-1]  # escaped as in JSON
    return pc.or_(in_answer, pc.match_substring(table["turns"], escaped, ignore_case=True))


def excerpt(text: str, words: str) -> str:
    """Return one line around the match, or the beginning of the text."""
    position = text.lower().find(words.lower()) if words else 0
    start = max(0, position - AROUND)
    end = position + len(words) + AROUND + (0 if words else AROUND)
    line = " ".join(text[start:end].split())
    return f"{'…' if start else ''}{line}{'…' if end < len(text) else ''}"
