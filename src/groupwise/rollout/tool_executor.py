"""Execute tool calls with a time limit, in this process or in a worker.

Whatever a tool does, its call gets a result: its return value, or an error message that the policy reads.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from itertools import groupby
from typing import Any

from groupwise.errors import ConfigError, RolloutError, readable
from groupwise.isolation.time_limit import AnyLimit, TimeLimitReached, TimeLimits, Watched, is_ours
from groupwise.isolation.worker import Job, UnmovableError, Worker, WorkerLost, described
from groupwise.records import Call
from groupwise.rewards.runner import completed
from groupwise.rollout.tool_calls import ParsedToolCall
from groupwise.rollout.tools import STATE, Tool, ToolResult, tool_of
from groupwise.tracking.run_folder import LOGGER

IN_WORKER = "in_worker"
"""Name of the attribute that holds the function which calls a tool in its worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """The result of a call, or why it failed."""

    text: str = ""
    found: tuple[str, ...] = ()
    """Names of what the tool retrieved (`ToolResult.names`)."""
    error: str | None = None
    """Error message that the policy reads in place of a result."""
    broken: str | None = None
    """Failure of the tool itself, which fails the rollout."""


def run_tool(function: Callable[..., Any], arguments: Mapping[str, Any], *, seconds: float) -> ToolOutcome:
    """Call a tool in its worker, or in this process if it has none."""
    in_worker = getattr(function, IN_WORKER, None)
    if in_worker is not None:
        try:
            outcome: ToolOutcome = in_worker(arguments, seconds)
            return outcome
        except UnmovableError as error:
            LOGGER.warning(
                "tool %s runs in the trainer's process for this call: %s", name_of(function), error
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
    except BaseException as error:  # sys.exit() in a tool must end the call, not the run
        try:
            message = readable(str(error))
        except Exception:
            message = ""
        return ToolOutcome(error=f"{name}: {message or type(error).__name__}")


def shown(answer: Any) -> str:
    """Return the text that the policy reads; "?" replaces unpaired surrogates, which no tokenizer encodes."""
    value = answer.text if isinstance(answer, ToolResult) else answer
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode(errors="replace").decode()


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def tool_job(function: Callable[..., Any]) -> Job:
    """Return the worker's job that calls this tool."""

    def job(arguments: Any, seconds: float) -> Iterator[dict[str, Any]]:
        with TimeLimits(seconds) as limit:
            yield asdict(outcome_of(function, arguments, seconds=seconds, limit=limit))

    return job


def isolated_tool(function: Callable[..., Any], worker: Worker) -> Callable[..., Any]:
    """Return the same tool, set up to be called in a worker."""
    job = f"tool {tool_of(function).name}"

    def in_worker(arguments: Mapping[str, Any], seconds: float) -> ToolOutcome:
        try:
            (reply,) = worker.replies(job, dict(arguments), seconds=seconds)
        except WorkerLost as lost:
            return ToolOutcome(error=f"{name_of(function)} {lost}")
        return ToolOutcome(**{**reply, "found": tuple(reply["found"])})

    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def wrapper(*arguments: Any, **named: Any) -> Any:
            return await function(*arguments, **named)
    else:

        @wraps(function)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            return function(*arguments, **named)

    setattr(wrapper, IN_WORKER, in_worker)
    return wrapper


@dataclass(slots=True)
class ToolExecutor:
    """Executes the tool calls of a task, and counts the time they take."""

    tools: Mapping[str, Tool]
    seconds_each: float
    """Time limit of one call."""
    characters: int
    """Maximum length of a result; longer ones are truncated."""
    _seconds: float = 0.0
    _seconds_lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, functions: Sequence[Callable[..., Any]], *, seconds: float, characters: int) -> ToolExecutor:
        tools = [tool_of(function) for function in functions]
        named = {tool.name: tool for tool in tools}
        if len(named) < len(tools):
            raise ConfigError(f"tool names must be unique; got {', '.join(tool.name for tool in tools)}")
        return cls(named, seconds, characters)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools.values()]

    @property
    def asynchronous(self) -> bool:
        return any(tool.asynchronous for tool in self.tools.values())

    def spend(self, seconds: float) -> None:
        """Add to the time that tools took from the caller."""
        with self._seconds_lock:
            self._seconds += seconds

    def pop_seconds(self) -> float:
        """Return the time spent since the last call, and reset it."""
        with self._seconds_lock:
            spent, self._seconds = self._seconds, 0.0
        return spent

    def answer(
        self, calls: Sequence[ParsedToolCall], *, allowed: int, state: Any = None, beside: bool = False
    ) -> tuple[Call, ...]:
        """Execute the calls of one turn, at most `allowed` of them, with the rollout's own `state`.

        With `beside`, the caller is one of many threads that run alongside the engine. Calls then run in this
        process rather than queue for the single worker, because the caller stops waiting at the time limit.
        Adjacent calls of async tools then run at the same time, each within its own time limit. All others
        run in order, because what one call writes the next may read.
        """
        own = calls[: max(0, allowed)]
        answers: list[Call] = []
        for concurrent, group in groupby(own, self._is_concurrent):
            adjacent = list(group)
            if beside and concurrent and len(adjacent) > 1:
                answers += self._together(adjacent)
            else:
                answers += [self._execute(call, state, beside=beside) for call in adjacent]
        return (
            *answers,
            *(
                failed_call(call, "no more calls are allowed; answer with what you have")
                for call in calls[len(own) :]
            ),
        )

    def _is_concurrent(self, call: ParsedToolCall) -> bool:
        """Whether calls of this tool need no order: it is async, and has no state of the rollout."""
        tool = self.tools.get(call.name)
        return tool is None or (tool.asynchronous and not tool.takes_state)

    def _together(self, calls: Sequence[ParsedToolCall]) -> Iterator[Call]:
        """Execute calls at the same time, and yield their results in the order of the calls."""
        started = [self._start(call) for call in calls]
        until = time.monotonic() + self.seconds_each
        for call, future in zip(calls, started, strict=True):
            try:
                yield future.result(max(0.0, until - time.monotonic()))
            except TimeoutError:
                yield from self.timed_out([call])

    def _start(self, call: ParsedToolCall) -> Future[Call]:
        """Execute a call in a thread of its own, which is left behind if the tool hangs."""
        future: Future[Call] = Future()

        def work() -> None:
            try:
                answer = self._execute(call, None, beside=True)
            except BaseException as error:
                future.set_exception(error)
            else:
                self.spend(time.thread_time())
                future.set_result(answer)

        threading.Thread(target=work, name="groupwise-tool", daemon=True).start()
        return future

    def timed_out(self, calls: Sequence[ParsedToolCall]) -> tuple[Call, ...]:
        """Return the calls of a turn whose tools exceeded the time limit."""
        return tuple(
            failed_call(call, f"{call.name} took longer than {self.seconds_each:g} s") for call in calls
        )

    def _execute(self, call: ParsedToolCall, state: Any, *, beside: bool) -> Call:
        if call.error is not None:
            return failed_call(call, call.error)
        tool = self.tools.get(call.name)
        if tool is None:
            return failed_call(call, f"there is no tool {call.name!r}, only {', '.join(self.tools)}")
        if call.untyped:
            call = replace(call, arguments=tool.typed(call.arguments), untyped=False)
        problem = tool.refusal(call.arguments)
        if problem is not None:
            return failed_call(call, problem)
        arguments = {**call.arguments, STATE: state} if tool.takes_state else call.arguments
        run = run_here if beside else run_tool
        outcome = run(tool.function, arguments, seconds=self.seconds_each)
        if outcome.broken is not None:
            raise RolloutError(outcome.broken)
        if outcome.error is not None:
            return failed_call(call, self._cut(outcome.error))
        return Call(
            name=call.name, arguments=call.arguments, result=self._cut(outcome.text), found=outcome.found
        )

    def _cut(self, text: str) -> str:
        return text if len(text) <= self.characters else text[: self.characters] + " …"


def failed_call(call: ParsedToolCall, message: str) -> Call:
    """Return a call with an error message as its result."""
    return Call(name=call.name, arguments=call.arguments, result=f"Error: {message}.", error=message)
