"""An engine that says given lines, and codecs that show results between bars or take any turn for a call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from groupwise.records import Completion, Request, Rollout, Sampling
from tests.support.codecs import END, CharacterCodec


class ToolCodec(CharacterCodec):
    """One token a letter; a result is shown between bars."""

    def encode(self, prompt: object, *, tools: Any = ()) -> tuple[int, ...]:
        return tuple(map(ord, str(prompt)))

    def encode_all_results(
        self, turns: Any, *, prefill: str, ended: bool, role: str = "tool"
    ) -> list[tuple[int, ...]]:
        assert ended
        return [tuple(map(ord, "".join(f"|{result}|" for result in results))) for results in turns]


class ScriptedEngine:
    """Says its lines one after the other, to everybody."""

    def __init__(self, *lines: str) -> None:
        self.lines = [(*map(ord, line), END) for line in lines]
        self.asked: list[list[Request]] = []

    def generate(self, requests: Any, sampling: Sampling) -> list[list[Completion]]:
        line = self.lines[len(self.asked)][: sampling.max_tokens]
        self.asked.append(list(requests))
        finish = "end" if line[-1] == END else "length"
        one = Completion(
            tokens=line, logprobs=(-0.5,) * len(line), entropies=(0.1,) * len(line), finish=finish
        )
        return [[one] * len(request.seeds) for request in requests]


def call(query: str) -> str:
    """Write a call of the tool `look`."""
    return f"<tool_call>{json.dumps({'name': 'look', 'arguments': {'query': query}})}</tool_call>"


class Babbling:
    """A policy whose every turn, whatever it says, is taken to be a call that names its length."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.end_tokens = policy, policy.end_tokens
        self.encode_all_results = policy.encode_all_results

    def encode(self, prompt: Any, *, tools: Any = ()) -> Any:
        return self.policy.encode(prompt)

    def decode(self, tokens: Any) -> str:
        return call(f"{len(tokens)}")


def with_trained(trained: Sequence[bool], **fields: Any) -> Rollout:
    """Return a rollout of which these tokens are trained, for advantages: it has no text."""
    zeros = (0.0,) * len(trained)
    return Rollout(
        prompt="?",
        text="",
        tokens=tuple(range(len(trained))),
        trained=tuple(trained),
        logprobs=zeros,
        entropies=zeros,
        prompt_length=1,
        finish="end",
        **fields,
    )


def answered(text: str, prompt: Any = "?") -> Rollout:
    """Return a rollout with this text, for rewards that read nothing else."""
    return Rollout(
        prompt=prompt,
        text=text,
        tokens=(1,),
        trained=(True,),
        logprobs=(0.0,),
        entropies=(0.0,),
        prompt_length=0,
        finish="end",
    )
