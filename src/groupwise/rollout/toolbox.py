"""Making the calls of a turn: each answered, refused or timed out, never lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.errors import ConfigError, RolloutError
from groupwise.records import Call
from groupwise.rollout.calls import Wish
from groupwise.rollout.run_tool import run_here, run_tool
from groupwise.rollout.tools import STATE, Tool, tool_of


@dataclass(slots=True)
class Toolbox:
    """The tools of a task, and the time that they cost."""

    tools: Mapping[str, Tool]
    seconds_each: float
    """Time limit of one call."""
    characters: int
    """Longest result that the policy is shown."""
    _seconds: float = 0.0
    _adding: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, functions: Sequence[Callable[..., Any]], *, seconds: float, characters: int) -> Toolbox:
        tools = [tool_of(function) for function in functions]
        named = {tool.name: tool for tool in tools}
        if len(named) < len(tools):
            raise ConfigError(f"two tools have the same name: {', '.join(tool.name for tool in tools)}")
        return cls(named, seconds, characters)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools.values()]

    @property
    def asynchronous(self) -> bool:
        return any(tool.asynchronous for tool in self.tools.values())

    def spend(self, seconds: float) -> None:
        """Count time that tools took from whoever uses them."""
        with self._adding:
            self._seconds += seconds

    def seconds_since_asked(self) -> float:
        """Return the time that was spent since this was last asked."""
        with self._adding:
            spent, self._seconds = self._seconds, 0.0
        return spent

    def answer(
        self, wishes: Sequence[Wish], *, allowed: int, state: Any = None, beside: bool = False
    ) -> tuple[Call, ...]:
        """Make the calls of one turn, at most `allowed` of them; `state` is the rollout's own.

        `beside`: in a thread beside the generator, with as many others at once as there are turns. They do
        not wait for the one worker: whoever waits for a thread stops waiting at the time limit.
        """
        return tuple(
            self._make(wish, state, beside=beside)
            if number < allowed
            else refused(wish, "no more calls are allowed; answer with what you have")
            for number, wish in enumerate(wishes)
        )

    def timed_out(self, wishes: Sequence[Wish]) -> tuple[Call, ...]:
        """The calls of a turn whose tools did not come back in time."""
        return tuple(
            refused(wish, f"{wish.name} took longer than {self.seconds_each:g} s") for wish in wishes
        )

    def _make(self, wish: Wish, state: Any, *, beside: bool) -> Call:
        if wish.error is not None:
            return refused(wish, wish.error)
        tool = self.tools.get(wish.name)
        if tool is None:
            return refused(wish, f"there is no tool {wish.name!r}, only {', '.join(self.tools)}")
        problem = tool.refusal(wish.arguments)
        if problem is not None:
            return refused(wish, problem)
        arguments = {**wish.arguments, STATE: state} if tool.takes_state else wish.arguments
        run = run_here if beside else run_tool
        outcome = run(tool.function, arguments, seconds=self.seconds_each)
        if outcome.broken is not None:
            raise RolloutError(outcome.broken)
        if outcome.error is not None:
            return refused(wish, self._cut(outcome.error))
        return Call(
            name=wish.name, arguments=wish.arguments, result=self._cut(outcome.text), found=outcome.found
        )

    def _cut(self, text: str) -> str:
        return text if len(text) <= self.characters else text[: self.characters] + " …"


def refused(wish: Wish, sentence: str) -> Call:
    """A call that was not answered, and what the policy is told instead."""
    return Call(name=wish.name, arguments=wish.arguments, result=f"Error: {sentence}.", error=sentence)
