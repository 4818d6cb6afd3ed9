"""The records that cross from one stage of a step to the next.

    Example → Request → Completion → Rollout → Group → Sample
     prompt          rollout          reward    advantage, loss

All are frozen, refuse to be built wrong and know nothing of torch. A stage never edits the record
it was given: it makes a new one with `dataclasses.replace`, or with `Rollout.judged`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any, Literal

Message = Mapping[str, Any]
"""A chat message: {"role": "user", "content": "…"}."""

Finish = Literal["end", "stop", "length"]
"""Why a completion ended: the end token, a stop string, or out of tokens."""


@dataclass(frozen=True, slots=True)
class Example(Mapping[str, Any]):
    """One row of a task's data, read like a dict: `example["answer"]`."""

    columns: Mapping[str, Any]

    def __getitem__(self, column: str) -> Any:
        try:
            return self.columns[column]
        except KeyError:
            raise KeyError(f"the example has no column {column!r}; it has {sorted(self.columns)}") from None

    def __contains__(self, column: object) -> bool:
        return column in self.columns

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def fingerprint(self) -> str:
        """The same for equal content, whatever the column order: what makes two examples one."""
        text = json.dumps(dict(self.columns), sort_keys=True, default=plain)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def plain(value: object) -> object:
    """What JSON has no form for as text; a set's order is another in each process."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def is_unicode(row: Mapping[str, Any]) -> bool:
    """Whether all text in a row can be written: JSON can carry half an emoji, tokenizers cannot."""
    try:
        json.dumps(dict(row), ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Training accounts for every one of these settings."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be drawn."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and the members of its group, each with the seed that all its noise derives from."""

    prompt: tuple[int, ...]
    seeds: tuple[int, ...]
    continues: tuple[int, int] | None = None
    """The request and member of the same call that the prompt begins with; what was computed is used."""
    adapter: int = 0
    """Which of the engine's adapters answers, where it has several."""
    temperature: float | None = None
    """In place of the call's, unless that is greedy."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a request needs at least one prompt token")
        if not self.seeds:
            raise ValueError("a request needs at least one member")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the policy wrote, token by token, the end token included."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token, under the very distribution it was drawn from."""
    entropies: tuple[float, ...]
    """Of that distribution, in nats."""
    finish: Finish

    def __post_init__(self) -> None:
        same_length(self, "tokens", "logprobs", "entropies")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tool call: what was asked for, and what came back."""

    name: str
    """Empty where the call could not be read at all."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    result: str = ""
    """What the policy reads: the tool's answer, or a sentence about what went wrong."""
    found: tuple[str, ...] = ()
    """What the tool says it found, such as document ids, best first; for rewards, not for the policy."""
    error: str | None = None
    """What was wrong with the call; None when the tool answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the policy wrote between two readings, and the calls it made there."""

    text: str
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One member of a group: the whole token stream, and what became of it.

    Example: prompt [5, 6], reply [7, 2] where 2 ends it ->
        tokens=(5, 6, 7, 2), trained=(False, False, True, True), prompt_length=2
    """

    prompt: Sequence[Message] | str
    """As the task wrote it, before the chat template."""
    text: str
    """What the policy wrote, special tokens removed; of several turns, the last."""
    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    """True where the policy chose the token: never on prompts or tool output."""
    logprobs: tuple[float, ...]
    """The sampler's; 0.0 where not trained."""
    entropies: tuple[float, ...]
    prompt_length: int
    finish: Finish
    member: int = 0
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Each reward by name, before weighting. A reward that does not apply to this rollout is absent."""
    reward: float = 0.0
    """The weighted sum."""
    advantage: float = 0.0
    error: str | None = None
    """Set when the rollout failed; it then has no reward and is never trained on."""
    turns: tuple[Turn, ...] = ()
    """Every turn of a task with tools, the last included; empty for a task without."""
    state: Any = field(default=None, compare=False, repr=False)
    """What the tools worked on, as they left it, where the task has such; for rewards, never written down."""

    def __post_init__(self) -> None:
        same_length(self, "tokens", "trained", "logprobs", "entropies")

    def judged(
        self,
        *,
        rewards: Mapping[str, float] | None = None,
        reward: float | None = None,
        advantage: float | None = None,
        error: str | None = None,
    ) -> Rollout:
        """Return a copy with this verdict; what is None stays as it is.

        It is what `dataclasses.replace` returns, in a third of the time: every rollout of a step is copied,
        most of them twice, and tokens that stay as they are need not be checked again.
        """
        copy, write = object.__new__(Rollout), object.__setattr__
        write(copy, "prompt", self.prompt)
        write(copy, "text", self.text)
        write(copy, "tokens", self.tokens)
        write(copy, "trained", self.trained)
        write(copy, "logprobs", self.logprobs)
        write(copy, "entropies", self.entropies)
        write(copy, "prompt_length", self.prompt_length)
        write(copy, "finish", self.finish)
        write(copy, "member", self.member)
        write(copy, "rewards", self.rewards if rewards is None else rewards)
        write(copy, "reward", self.reward if reward is None else reward)
        write(copy, "advantage", self.advantage if advantage is None else advantage)
        write(copy, "error", self.error if error is None else error)
        write(copy, "turns", self.turns)
        write(copy, "state", self.state)
        return copy

    @property
    def length(self) -> int:
        """Tokens the policy chose."""
        return self.trained.count(True)

    @property
    def longest_turn(self) -> int:
        """Tokens the policy chose in a row, at the most: what it reads lies between two turns."""
        return max((sum(turn) for chosen, turn in groupby(self.trained) if chosen), default=0)

    @property
    def truncated(self) -> bool:
        return self.finish == "length"

    @property
    def transcript(self) -> str:
        """What the policy wrote and, between its turns, what tools answered: to read."""
        parts = []
        for turn in self.turns:
            parts += [turn.text, *(f"[{call.name or 'tool'}] {call.result}" for call in turn.calls)]
        return "\n".join(parts) if parts else self.text

    @property
    def calls(self) -> tuple[Call, ...]:
        """The tool calls of every turn, in order."""
        return tuple(call for turn in self.turns for call in turn.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Every answer to one prompt: what 'relative' is relative to."""

    example: Example
    rollouts: tuple[Rollout, ...]

    @property
    def valid(self) -> tuple[Rollout, ...]:
        """The rollouts that did not fail."""
        return tuple(rollout for rollout in self.rollouts if rollout.error is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trainable token sequence: every list has one entry per token.

    Example: prompt [5, 6], reply [7] with advantage 0.5 ->
        tokens=(5, 6, 7), trained=(False, False, True), logprobs=(0.0, 0.0, -1.2),
        entropies=(0.0, 0.0, 1.3), advantages=(0.0, 0.0, 0.5), prefix=2
    """

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    logprobs: tuple[float, ...]
    entropies: tuple[float, ...]
    advantages: tuple[float, ...]
    prefix: int
    """Leading tokens, none of them trained, that the samples of one group have in common."""
    group: int
    """Samples with the same number share their first `prefix` tokens."""
    member: int = 0
    """Which rollout of its group this is."""

    def __post_init__(self) -> None:
        same_length(self, "tokens", "trained", "logprobs", "entropies", "advantages")
        if not 0 < self.prefix < len(self.tokens):
            raise ValueError(f"prefix must lie inside the {len(self.tokens)} tokens, got {self.prefix}")
        if any(self.trained[: self.prefix]):
            raise ValueError("a shared prefix cannot hold trained tokens")

    @property
    def length(self) -> int:
        """Tokens that are trained."""
        return self.trained.count(True)


def same_length(record: Any, *names: str) -> None:
    """Refuse a record whose per-token fields differ in length."""
    if len({len(getattr(record, name)) for name in names}) != 1:
        lengths = {name: len(getattr(record, name)) for name in names}
        raise ValueError(f"{type(record).__name__} fields must share one length, got {lengths}")


def field_names(cls: Any) -> list[str]:
    return [f.name for f in fields(cls)]
