"""A conversation in which the model calls the tools of its task, as it did in training: token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.config.tools import ToolsConfig
from groupwise.errors import ConfigError, RolloutError
from groupwise.records import Message, Turn
from groupwise.rollout.calls import read_calls
from groupwise.rollout.toolbox import Toolbox
from groupwise.serve.talk import Streaming, Talk


@dataclass(slots=True, kw_only=True)
class Kit:
    """What the model works with."""

    toolbox: Toolbox
    state: Any
    """What the tools work on, where they do."""
    turns: list[Turn] = field(default_factory=list)
    """Of the last answer."""


class ToolAnswering:
    """Answers of several turns: what tools return is shown between them."""

    def __init__(self, streaming: Streaming, kit: Kit, *, limits: ToolsConfig) -> None:
        self._streaming, self._kit, self._limits = streaming, kit, limits

    def __call__(self, messages: Sequence[Message]) -> Iterator[str]:
        codec, toolbox, made = self._streaming.policy, self._kit.toolbox, 0
        tokens = codec.encode(messages, tools=toolbox.schemas)
        turns = self._kit.turns = []
        while True:
            written, finish = yield from self._streaming.write(tokens)
            text = codec.decode(written)
            turns.append(Turn(text=text))
            wishes = read_calls(text) if finish != "length" else []
            if not wishes or len(turns) == self._limits.max_turns:
                return
            allowed = self._limits.max_calls - made
            try:
                calls = toolbox.answer(wishes, allowed=allowed, state=self._kit.state)
            except RolloutError as error:  # in training it would end the rollout, here the answer
                raise ConfigError(f"a tool failed: {error}") from error
            made += len(calls)
            turns[-1] = Turn(text=text, calls=calls)
            results = [call.result for call in calls]
            yield "".join(f"\n→ {result}" for result in results) + "\n"
            glue = codec.encode_results(results, prefill="", ended=finish == "end")
            tokens = (*tokens, *written, *glue)

    @property
    def messages(self) -> list[Message]:
        """The last answer as a chat has it."""
        found: list[Message] = []
        for turn in self._kit.turns:
            found.append({"role": "assistant", "content": turn.text})
            found += [{"role": "tool", "name": call.name, "content": call.result} for call in turn.calls]
        return found


class ToolTalk(Talk):
    """A conversation that remembers calls and results as what they are."""

    def __init__(self, answering: ToolAnswering, *, system: str | None = None) -> None:
        super().__init__(answering, system=system)
        self._with_tools = answering

    def _said(self, text: str) -> list[Message]:
        return self._with_tools.messages
