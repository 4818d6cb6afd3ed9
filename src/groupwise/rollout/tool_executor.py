"""Calling one tool, in this process or in a worker: whatever it does, the policy can be told something."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import wraps
from typing import Any

from groupwise.errors import ConfigError, RolloutError
from groupwise.records import Call
from groupwise.rewards.runner import completed, readable
from groupwise.rewards.time_limit import AnyLimit, TimeLimitReached, TimeLimits, Watched
from groupwise.rewards.worker import Job, UnmovableError, Worker, WorkerLost, described, is_ours
from groupwise.rollout.tool_calls import ParsedToolCall
from groupwise.rollout.tools import STATE, Tool, ToolResult, tool_of
from groupwise.tracking.run_log import LOGGER

IN_WORKER = "in_worker"
"""The attribute of a tool that has a worker: calls it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """What became of a call."""

    text: str = ""
    found: tuple[str, ...] = ()
    error: str | None = None
    """The policy's mistake, or what it is told instead of a result."""
    broken: str | None = None
    """The tool's own failure, which fails the rollout."""


def run_tool(function: Callable[..., Any], arguments: Mapping[str, Any], *, seconds: float) -> ToolOutcome:
    """Call a tool in its worker, or here where it has none."""
    in_worker = getattr(function, IN_WORKER, None)
    if in_worker is not None:
        try:
            outcome: ToolOutcome = in_worker(arguments, seconds)
            return outcome
        except UnmovableError as error:
            LOGGER.warning(
                "a call of the tool %s runs in the trainer's process: %s", name_of(function), error
            )
    return run_here(function, arguments, seconds=seconds)


def run_here(function: Callable[..., Any], arguments: Mapping[str, Any], *, seconds: float) -> ToolOutcome:
    """Call a tool in this process."""
    with TimeLimits(seconds) as limit:
        guard = limit if is_ours(function) else Watched(limit, f"the tool {described(function)}")
        return outcome_of(function, arguments, seconds=seconds, limit=guard)


def outcome_of(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, seconds: float, limit: AnyLimit
) -> ToolOutcome:
    name = name_of(function)
    try:
        with limit:
            answer = function(**arguments)
            if inspect.isawaitable(answer):
                answer = completed(asyncio.wait_for(answer, seconds))
            found = tuple(map(str, answer.names)) if isinstance(answer, ToolResult) else ()
            return ToolOutcome(text=shown(answer), found=found)
    except (TimeLimitReached, TimeoutError):
        return ToolOutcome(error=f"{name} took longer than {seconds:g} s")
    except RolloutError as error:
        return ToolOutcome(broken=readable(str(error)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() in a tool ends the call and not the run
        try:
            said = readable(str(error))
        except Exception:
            said = ""
        return ToolOutcome(error=f"{name}: {said or type(error).__name__}")


def shown(answer: Any) -> str:
    """What the policy reads of a tool's answer; "?" stands for half an emoji, which none can read."""
    said = answer.text if isinstance(answer, ToolResult) else answer
    text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False, default=str)
    return text.encode(errors="replace").decode()


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def tool_job(function: Callable[..., Any]) -> Job:
    """Return what the worker does with the arguments of a call."""

    def job(arguments: Any, seconds: float) -> Iterator[dict[str, Any]]:
        with TimeLimits(seconds) as limit:
            yield asdict(outcome_of(function, arguments, seconds=seconds, limit=limit))

    return job


def isolated_tool(function: Callable[..., Any], worker: Worker) -> Callable[..., Any]:
    """Return the same tool with a worker to call it in."""
    job = f"tool {tool_of(function).name}"

    def in_worker(arguments: Mapping[str, Any], seconds: float) -> ToolOutcome:
        try:
            (reply,) = worker.replies(job, dict(arguments), seconds=seconds)
        except WorkerLost as lost:
            return ToolOutcome(error=f"{name_of(function)} {lost}")
        return ToolOutcome(**{**reply, "found": tuple(reply["found"])})

    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def moved(*arguments: Any, **named: Any) -> Any:
            return await function(*arguments, **named)
    else:

        @wraps(function)
        def moved(*arguments: Any, **named: Any) -> Any:
            return function(*arguments, **named)

    setattr(moved, IN_WORKER, in_worker)
    return moved


@dataclass(slots=True)
class ToolExecutor:
    """The tools of a task, and the time that they cost."""

    tools: Mapping[str, Tool]
    seconds_each: float
    """Time limit of one call."""
    characters: int
    """Longest result that the policy is shown."""
    _seconds: float = 0.0
    _adding: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, functions: Sequence[Callable[..., Any]], *, seconds: float, characters: int) -> ToolExecutor:
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
        self, wishes: Sequence[ParsedToolCall], *, allowed: int, state: Any = None, beside: bool = False
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

    def timed_out(self, wishes: Sequence[ParsedToolCall]) -> tuple[Call, ...]:
        """The calls of a turn whose tools did not come back in time."""
        return tuple(
            refused(wish, f"{wish.name} took longer than {self.seconds_each:g} s") for wish in wishes
        )

    def _make(self, wish: ParsedToolCall, state: Any, *, beside: bool) -> Call:
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


def refused(wish: ParsedToolCall, sentence: str) -> Call:
    """A call that was not answered, and what the policy is told instead."""
    return Call(name=wish.name, arguments=wish.arguments, result=f"Error: {sentence}.", error=sentence)
