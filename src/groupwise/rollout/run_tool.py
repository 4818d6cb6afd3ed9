"""Calling one tool, in this process or in a worker: whatever it does, the policy can be told something."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any

from groupwise.errors import RolloutError
from groupwise.rewards.reward_call import completed, readable
from groupwise.rewards.time_limit import AnyLimit, TimeLimitReached, TimeLimits, Watched
from groupwise.rewards.worker import Job, UnmovableError, Worker, WorkerLost, described, is_ours
from groupwise.rollout.tools import Found, tool_of
from groupwise.tracking.log import LOGGER

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
            found = tuple(map(str, answer.names)) if isinstance(answer, Found) else ()
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
    said = answer.text if isinstance(answer, Found) else answer
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
