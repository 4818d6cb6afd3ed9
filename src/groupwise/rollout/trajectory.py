"""The token stream of one rollout. It is append-only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.records import Completion, Finish, Message, Rollout, Turn
from groupwise.rollout.environment import Episode


@dataclass(slots=True)
class Trajectory:
    """The tokens that the policy read and sampled so far; only sampled tokens are trained."""

    prompt: tuple[int, ...]
    prompt_messages: Sequence[Message] | str
    """The prompt before the chat template."""
    member: int
    state: Any = None
    """The state of this rollout's tools."""
    episode: Episode | None = None
    """The environment of this rollout, while it runs."""
    tokens: list[int] = field(default_factory=list)
    """Tokens after the prompt; the next three fields are parallel to it."""
    trained: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    finish: Finish = "end"
    error: str | None = None

    @property
    def calls(self) -> int:
        return sum(len(turn.calls) for turn in self.turns)

    def append_completion(self, completion: Completion) -> None:
        """Append tokens that the policy sampled; all of them are trained."""
        count = len(completion.tokens)
        self._append(completion.tokens, (True,) * count, completion.logprobs, completion.entropies)
        self.completions.append(completion)
        self.finish = completion.finish

    def append_context(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy did not sample: results, replies, template tokens."""
        zeros = (0.0,) * len(tokens)
        self._append(tokens, (False,) * len(tokens), zeros, zeros)

    def rollout(self) -> Rollout:
        before = len(self.prompt)
        zeros = (0.0,) * before
        return Rollout(
            prompt=self.prompt_messages,
            text=self.turns[-1].text,
            tokens=(*self.prompt, *self.tokens),
            trained=((False,) * before + tuple(self.trained)),
            logprobs=zeros + tuple(self.logprobs),
            entropies=zeros + tuple(self.entropies),
            prompt_length=before,
            finish=self.finish,
            member=self.member,
            turns=tuple(self.turns),
            error=self.error,
            state=self.state,
        )

    def _append(
        self,
        tokens: Sequence[int],
        trained: Sequence[bool],
        logprobs: Sequence[float],
        entropies: Sequence[float],
    ) -> None:
        self.tokens += tokens
        self.trained += trained
        self.logprobs += logprobs
        self.entropies += entropies
