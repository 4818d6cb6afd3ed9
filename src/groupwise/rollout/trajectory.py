"""The tokens of one rollout: they are appended, never rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.records import Completion, Finish, Message, Rollout, Turn


@dataclass(slots=True)
class Trajectory:
    """What the policy read and wrote so far, token by token; only what it wrote is trained."""

    prompt: tuple[int, ...]
    given: Sequence[Message] | str
    """The prompt as the task wrote it."""
    member: int
    state: Any = None
    """What its tools work on, made for this rollout alone."""
    tokens: list[int] = field(default_factory=list)
    """Behind the prompt, as are the three that follow."""
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

    def wrote(self, completion: Completion) -> None:
        """Append what the policy chose: trained, every token of it."""
        count = len(completion.tokens)
        self._append(completion.tokens, (True,) * count, completion.logprobs, completion.entropies)
        self.completions.append(completion)
        self.finish = completion.finish

    def read(self, tokens: Sequence[int]) -> None:
        """Append what the policy did not choose: results and the template's glue."""
        zeros = (0.0,) * len(tokens)
        self._append(tokens, (False,) * len(tokens), zeros, zeros)

    def rollout(self) -> Rollout:
        before = len(self.prompt)
        zeros = (0.0,) * before
        return Rollout(
            prompt=self.given,
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
