"""The records that the stages of a training step pass on.

    Example → Request → Completion → Rollout → Group → Sample
     prompt          rollout          reward    advantage, loss

A `Split` holds the examples of a run. All records are frozen, validate their fields and do not depend on
torch. A stage never modifies a record: it creates a new one with `dataclasses.replace`, or with
`Rollout.scored`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal, Protocol, runtime_checkable

Message = Mapping[str, Any]
"""A chat message: {"role": "user", "content": "…"}."""

Finish = Literal["end", "stop", "length"]
"""Why a completion ended: the end token, a stop string, or out of tokens."""


def derive_seed(*parts: int | str) -> int:
    """Return 63 bits that depend on every part: (run seed, step, example, member).

    All randomness of a run derives from its seed and from what it is for, not from a generator's state.
    """
    import hashlib  # loads OpenSSL, which --help does not need

    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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
        """A hash of the content, independent of column order; it identifies duplicates."""
        import hashlib  # loads OpenSSL, which --help does not need

        text = json.dumps(dict(self.columns), sort_keys=True, default=plain)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def plain(value: object) -> object:
    """Convert values that JSON cannot represent to text. Sets are sorted: their order varies by process."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def stored_form(example: Mapping[str, Any]) -> str:
    """Return a text that is equal for an example and for what a file of rollouts gives back for it.

    Such a file adds None for the columns of other examples, and stores all numbers of a column as one type.
    """
    return json.dumps(comparable(example), sort_keys=True, default=plain)


def comparable(value: Any) -> Any:
    """Return a value with floats for integers, lists for arrays, and neither None nor {} in its dicts."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        parts = {str(name): comparable(part) for name, part in value.items()}
        return {name: part for name, part in parts.items() if part is not None and part != {}}
    if isinstance(value, list | tuple):
        return [comparable(part) for part in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return float(value)
    return value


def is_unicode(row: Mapping[str, Any]) -> bool:
    """Whether all text in a row is valid Unicode: JSON allows lone surrogates, tokenizers do not."""
    try:
        json.dumps(dict(row), ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


@runtime_checkable
class ExampleStream(Protocol):
    """An endless source of examples, generated on demand. No training example equals a held-out one."""

    def train(self, index: int, *, seed: int) -> Example:
        """Return the training example at an index; deterministic for a seed."""
        ...

    def held_out(self, count: int) -> Sequence[Example]:
        """Return up to `count` distinct held-out examples, the same for every run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The training and held-out examples of a run."""

    train: Sequence[Example] | ExampleStream
    held_out: tuple[Example, ...]
    seed: int
    size: int | None
    """Training examples per epoch. None: endless."""
    dropped: int = 0
    """Number of rows dropped because they repeat another row or equal a held-out example."""
    fingerprint: str = ""
    """Hash of the rows on both sides; "" for a stream, which only depends on settings."""

    def take(self, cursor: int, count: int) -> tuple[list[Example], int]:
        """Return the `count` training examples at the cursor, and the cursor after them.

        The cursor counts examples from the start of the run, so a checkpoint only stores this number. The
        order of each epoch depends on seed and epoch only.
        """
        return [self.at(position) for position in range(cursor, cursor + count)], cursor + count

    def at(self, position: int) -> Example:
        """Return the training example at a position of the run."""
        index = position
        if self.size is not None:
            epoch, offset = divmod(position, self.size)
            index = epoch_order(self.size, self.seed, epoch)[offset]
        return (
            self.train.train(index, seed=self.seed)
            if isinstance(self.train, ExampleStream)
            else self.train[index]
        )


@lru_cache(maxsize=4)
def epoch_order(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return the order of the examples in an epoch."""
    order = list(range(size))
    random.Random(f"epoch {seed} {epoch}").shuffle(order)
    return tuple(order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. The trainer's log-probabilities account for all of them."""

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
        """Whether top-p, top-k or min-p excludes some tokens."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to complete once per seed; the seeds are those of the group's members."""

    prompt: tuple[int, ...]
    seeds: tuple[int, ...]
    continues: tuple[int, int] | None = None
    """The (request, member) of the same call that the prompt continues; its computed tokens are reused."""
    adapter: int = 0
    """Index of the adapter to generate with, if the engine has several."""
    temperature: float | None = None
    """Overrides the temperature of the call, unless that is greedy."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a request needs at least one prompt token")
        if not self.seeds:
            raise ValueError("a request needs at least one member")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The sampled tokens of one completion, end token included."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token under the distribution it was sampled from."""
    entropies: tuple[float, ...]
    """Entropy of that distribution at each token, in nats."""
    finish: Finish

    def __post_init__(self) -> None:
        same_length(self, "tokens", "logprobs", "entropies")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tool call with its arguments and result."""

    name: str
    """Empty if the call could not be parsed."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    result: str = ""
    """The text that the policy reads: the tool's result, or an error message."""
    found: tuple[str, ...] = ()
    """Ids of what the tool returned, such as documents, best first. For rewards, not for the policy."""
    error: str | None = None
    """Why the call failed; None if it succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the policy: its text, its tool calls, and what the environment replied."""

    text: str
    calls: tuple[Call, ...] = ()
    observation: str = ""
    """The environment's reply; empty for a turn that calls tools."""
    reward: float = 0.0
    """The environment's reward of this turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A further token sequence of a rollout, with a context of its own; the fields are those of `Rollout`.

    A program that owns its loop may ask the policy in several conversations, or rewrite one. Each sampled
    token is trained in one sequence only; in others it is context.
    """

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    logprobs: tuple[float, ...]
    entropies: tuple[float, ...]
    prompt_length: int

    def __post_init__(self) -> None:
        same_length(self, "tokens", "trained", "logprobs", "entropies")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One member of a group: the token sequence, its rewards and its advantage.

    Example: prompt [5, 6], reply [7, 2] where 2 ends it ->
        tokens=(5, 6, 7, 2), trained=(False, False, True, True), prompt_length=2
    """

    prompt: Sequence[Message] | str
    """The task's prompt, before the chat template."""
    text: str
    """The completion without special tokens; with several turns, the last one."""
    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    """True for tokens sampled by the policy; False for prompts, tool results and replies."""
    logprobs: tuple[float, ...]
    """The sampler's log-probabilities; 0.0 for tokens that are not trained."""
    entropies: tuple[float, ...]
    prompt_length: int
    finish: Finish
    member: int = 0
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Each reward by name, before weighting. A reward that does not apply to this rollout is absent."""
    reward: float = 0.0
    """The weighted sum."""
    advantage: float = 0.0
    """Relative to its group. If it differs between tokens, their mean."""
    token_advantages: tuple[float, ...] | None = None
    """The advantage of each trained token, those of branches last. None: `advantage` for all of them."""
    error: str | None = None
    """Why the rollout failed, or None. A failed rollout has no reward and is never trained on."""
    turns: tuple[Turn, ...] = ()
    """All turns, for tasks with tools or an environment; empty for others."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values that TRL-style rewards logged with `log_extra`, by column."""
    state: Any = field(default=None, compare=False, repr=False)
    """Final state of the tools, or what an agent returned. For rewards; never saved."""
    branches: tuple[Branch, ...] = ()
    """Further token sequences, for a task with an agent. They share the advantage."""
    rewritten: int | None = None
    """Number of an agent's model calls that changed an earlier turn. None: the task has no agent."""

    def __post_init__(self) -> None:
        same_length(self, "tokens", "trained", "logprobs", "entropies")

    def scored(
        self,
        *,
        rewards: Mapping[str, float] | None = None,
        reward: float | None = None,
        advantage: float | None = None,
        token_advantages: tuple[float, ...] | None = None,
        error: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Return a copy with new rewards, reward, advantage, error or extra; None keeps the current value.

        A new `advantage` holds for all tokens, unless `token_advantages` come with it.

        Equivalent to `dataclasses.replace` in a third of the time, because the tokens are not validated
        again. Every rollout of a step is copied, most of them twice.
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
        write(copy, "token_advantages", self.token_advantages if advantage is None else token_advantages)
        write(copy, "error", self.error if error is None else error)
        write(copy, "turns", self.turns)
        write(copy, "extra", self.extra if extra is None else extra)
        write(copy, "state", self.state)
        write(copy, "branches", self.branches)
        write(copy, "rewritten", self.rewritten)
        return copy

    @property
    def sequences(self) -> tuple[Rollout | Branch, ...]:
        """The token sequences: the rollout's own, then its branches."""
        return (self, *self.branches)

    @property
    def length(self) -> int:
        """Number of tokens sampled by the policy, branches included."""
        return sum(sequence.trained.count(True) for sequence in self.sequences)

    @property
    def turn_lengths(self) -> list[int]:
        """Number of tokens that the policy sampled in each turn."""
        return [
            sum(turn) for sequence in self.sequences for trained, turn in groupby(sequence.trained) if trained
        ]

    @property
    def longest_turn(self) -> int:
        """Number of tokens in the longest turn."""
        return max(self.turn_lengths, default=0)

    @property
    def has_signal(self) -> bool:
        """Whether the rollout moves the policy: the advantage of some token is not 0."""
        return self.advantage != 0.0 or self.token_advantages is not None

    @property
    def truncated(self) -> bool:
        return self.finish == "length"

    @property
    def transcript(self) -> str:
        """The policy's turns, and the tool results and replies between them, as readable text."""
        parts = []
        for turn in self.turns:
            parts += [turn.text, *(f"[{call.name or 'tool'}] {call.result}" for call in turn.calls)]
            parts += [f"[environment] {turn.observation}"] if turn.observation else []
        return "\n".join(parts) if parts else self.text

    @property
    def calls(self) -> tuple[Call, ...]:
        """The tool calls of every turn, in order."""
        return tuple(call for turn in self.turns for call in turn.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All completions of one prompt. Advantages are relative to this group."""

    example: Example
    rollouts: tuple[Rollout, ...]

    @property
    def valid(self) -> tuple[Rollout, ...]:
        """The rollouts that did not fail."""
        return tuple(rollout for rollout in self.rollouts if rollout.error is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training sequence; every list has one entry per token.

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
    """Number of leading tokens, none of them trained, that all samples of a group share."""
    group: int
    """Index of the group. Its samples with the same `prompt` share their first `prefix` tokens."""
    member: int = 0
    """Index of the rollout in its group."""
    prompt: int = 0
    """Number of the sample's prompt among those of the group."""
    part: int = 0
    """Index of the sample among those of its rollout, which has several if it has branches."""
    rollout_length: int = 0
    """Number of trained tokens in all samples of the rollout; 0: there is only this one."""
    supervised: tuple[float, ...] = ()
    """The weight of each token in a cross-entropy loss beside the policy loss; empty: none."""
    hint: tuple[int, ...] = ()
    """The prompt that the policy as its own teacher reads in place of the prefix; empty: none."""

    def __post_init__(self) -> None:
        same_length(self, "tokens", "trained", "logprobs", "entropies", "advantages")
        if self.supervised:
            same_length(self, "tokens", "supervised")
        if not 0 < self.prefix < len(self.tokens):
            raise ValueError(f"prefix must lie inside the {len(self.tokens)} tokens, got {self.prefix}")
        if any(self.trained[: self.prefix]):
            raise ValueError("a shared prefix cannot hold trained tokens")

    @property
    def length(self) -> int:
        """Number of trained tokens."""
        return self.trained.count(True)

    @property
    def whole_length(self) -> int:
        """Number of trained tokens in the sample's rollout."""
        return self.rollout_length or self.length


def same_length(record: Any, *names: str) -> None:
    """Raise `ValueError` if the per-token fields of a record differ in length."""
    if len({len(getattr(record, name)) for name in names}) != 1:
        lengths = {name: len(getattr(record, name)) for name in names}
        raise ValueError(f"{type(record).__name__} fields must share one length, got {lengths}")


def field_names(cls: Any) -> list[str]:
    return [f.name for f in fields(cls)]
