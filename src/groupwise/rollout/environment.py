"""Environments: objects that reply to each turn of the policy.

    class Guess:
        def reset(self, example: gw.Example) -> str:
            self.number = example["number"]
            return "I chose a number from 1 to 9. Guess it."

        def reply(self, text: str) -> str | gw.Reply:
            if text.strip() == str(self.number):
                return gw.Reply(reward=1.0, done=True)
            return "No. Guess again."

Each rollout has an environment of its own. `reset` returns the prompt, as text or as chat messages. It must
be the same for every rollout of an example. `reply` returns the text that the policy reads next, a `Reply`,
or None, which ends the rollout. Both may be `async`. An exception or a time-out fails the rollout.

Environments run in the worker process of the task's rewards and tools. If one of them terminates that worker,
the others are rebuilt: `reset` and the turns so far are repeated, and must give the same replies.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import count
from typing import Any, Protocol

from groupwise.errors import ConfigError, RolloutError, as_rollout_error
from groupwise.isolation.time_limit import TimeLimitReached, TimeLimits, Watched
from groupwise.isolation.worker import Job, UnmovableError, Worker, WorkerLost, described
from groupwise.records import Example, Message, Rollout
from groupwise.rewards.runner import BadValueError, as_reward
from groupwise.tracking.run_folder import LOGGER

GRACE_SECONDS = 1.0
"""How long after its time limit a coroutine may take to stop."""
JOB = "environment"
"""Name of the worker's job, and of the reward that is the sum of an environment's rewards."""
OPENING_SECONDS = 60.0
"""Time limit of a `reset` that only asks for a prompt."""
OPENING_ATTEMPTS = 3
MAX_OPENINGS = 2**16
"""Number of prompts that are kept."""

Opening = str | Sequence[Message]


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment replies to a turn of the policy."""

    text: str = ""
    """What the policy reads next; at the end of a rollout it is only recorded."""
    reward: float = 0.0
    """Reward of the turn. The reward `environment` of a rollout is the sum over its turns."""
    done: bool = False
    """Whether the rollout ends."""


class Environment(Protocol):
    """The environment of one rollout. A method `close()` is optional; it is called when the rollout ends."""

    def reset(self, example: Example, /) -> Any:
        """Return the prompt: a string or a list of chat messages."""

    def reply(self, text: str, /) -> Any:
        """Return the reply to a turn: a string, a `Reply`, or None to end the rollout."""


EnvironmentFactory = Callable[[], Environment]


class CoroutineEnvironment:
    """An environment whose episode is one coroutine, `play`, which asks the policy for its turns."""

    async def play(self, example: Example) -> Reply:
        """Play the episode and return its last reply."""
        raise NotImplementedError

    async def ask(self, said: Any) -> str:
        """Say something to the policy and return its turn. The first thing said is the prompt."""
        self._said.put_nowait(said)
        return await self._heard.get()

    async def reset(self, example: Example) -> Any:
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self._heard: asyncio.Queue[str] = asyncio.Queue()
        self._playing = asyncio.create_task(self.play(example))
        opening = await self._next()
        if isinstance(opening, Reply):
            raise BadValueError("the episode ended before the first turn of the policy")
        return opening

    async def reply(self, text: str) -> Any:
        self._heard.put_nowait(text)
        return await self._next()

    async def close(self) -> None:
        self._playing.cancel()

    async def _next(self) -> Any:
        """Return what is said next, or the last reply when the episode has ended."""
        said = asyncio.ensure_future(self._said.get())
        try:
            await asyncio.wait((said, self._playing), return_when=asyncio.FIRST_COMPLETED)
            return said.result() if said.done() else self._playing.result()
        except asyncio.CancelledError:  # the time limit
            self._playing.cancel()
            raise
        finally:
            said.cancel()


def environment_reward(rollout: Rollout, example: Example) -> float:
    """Return the sum of the rewards that the environment gave to the turns of a rollout."""
    return sum(turn.reward for turn in rollout.turns)


class LiveEnvironments:
    """The environments of one process, by key. Every operation returns JSON data."""

    def __init__(self, make: EnvironmentFactory) -> None:
        self.make = make
        self.live: dict[int, Environment] = {}

    def perform(
        self, operation: str, key: int, argument: Any, *, seconds: float, watched: bool
    ) -> dict[str, Any]:
        """Perform one operation within its time limit; return its result, or `error` with the reason.

        `watched`: nothing can kill this process from outside, so a watchdog stops it if user code hangs.
        """
        try:
            with TimeLimits(seconds) as limit:
                guard = Watched(limit, f"the environment {described(self.make)}") if watched else limit
                with guard:
                    return self._perform(operation, key, argument, seconds)
        except (TimeLimitReached, TimeoutError):
            abandon(self.live.pop(key, None), seconds)  # it may be in any condition
            return {"error": f"{operation} took longer than {seconds:g} s"}
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit() in an environment must end the rollout, not the run
            failure = (
                RolloutError(str(error)) if isinstance(error, BadValueError) else as_rollout_error(error)
            )
            return {"error": f"{operation}: {failure}", "trace": "".join(getattr(failure, "__notes__", ()))}

    def _perform(self, operation: str, key: int, argument: Any, seconds: float) -> dict[str, Any]:
        if operation == "reset":
            environment = self.make()
            try:
                opening = checked_opening(finished(environment.reset(argument), seconds))
            except BaseException:
                abandon(environment, seconds)
                raise
            self.live[key] = environment
            return {"opening": opening}
        if key not in self.live:
            return {"lost": True}
        if operation == "reply":
            return asdict(checked_reply(finished(self.live[key].reply(argument), seconds)))
        close = getattr(self.live.pop(key), "close", None)
        finished(None if close is None else close(), seconds)
        return {}


def abandon(environment: Any, seconds: float) -> None:
    """Close a failed environment without waiting, if it is asynchronous: it may hold a session."""
    close = getattr(environment, "close", None)
    if inspect.iscoroutinefunction(close):
        asyncio.run_coroutine_threadsafe(within(close(), seconds), event_loop_here())


def checked_opening(opening: Any) -> Any:
    """Return what `reset` returned as plain data."""
    if not isinstance(opening, str | Sequence) or not opening:
        raise BadValueError(f"must return a text or a list of messages; got {opening!r:.80}")
    try:
        return json.loads(json.dumps(opening))
    except (TypeError, ValueError) as error:
        raise BadValueError(f"must return text or messages that JSON can represent: {error}") from None


def checked_reply(value: Any) -> Reply:
    """Return what `reply` returned as a `Reply` of valid text with a finite reward."""
    if value is None:
        return Reply(done=True)
    if isinstance(value, str):
        value = Reply(value)
    if not isinstance(value, Reply) or not isinstance(value.text, str):
        raise BadValueError(f"must return a text, a groupwise.Reply or None; got {value!r:.80}")
    text = value.text.encode(errors="replace").decode()  # no tokenizer encodes a lone surrogate
    return Reply(text, reward=as_reward(value.reward) or 0.0, done=bool(value.done))


def finished(result: Any, seconds: float) -> Any:
    """Return a result. A coroutine runs on the process's event loop, where connections stay open."""
    if not inspect.isawaitable(result):
        return result
    future = asyncio.run_coroutine_threadsafe(within(result, seconds), event_loop_here())
    return future.result(seconds + GRACE_SECONDS)


async def within(result: Awaitable[Any], seconds: float) -> Any:
    return await asyncio.wait_for(result, seconds)


def event_loop_here() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process, for connections that stay open."""
    return event_loop(os.getpid())


@cache
def event_loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of a process. It runs in a thread of its own, which a fork does not copy."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop


class HeldOpen:
    """An asynchronous context that one task of this process's event loop holds open until `close`."""

    def __init__(self, context: AbstractAsyncContextManager[Any], *, seconds: float) -> None:
        self.loop, self.stop = event_loop_here(), asyncio.Event()
        ready: Future[Any] = Future()
        self.task = asyncio.run_coroutine_threadsafe(self._hold(context, ready), self.loop)
        try:
            self.value = ready.result(seconds)
        except BaseException:
            self.task.cancel()
            raise
        atexit.register(self.close)

    async def _hold(self, context: AbstractAsyncContextManager[Any], ready: Future[Any]) -> None:
        try:
            async with context as value:
                ready.set_result(value)
                await self.stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)

    def run(self, work: Coroutine[Any, Any, Any], *, seconds: float) -> Any:
        """Return the result of a coroutine; raise ConnectionError if the context ends before it."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            wait((future, self.task), timeout=seconds, return_when=FIRST_COMPLETED)
            if not future.done():
                raise ConnectionError("it has ended" if self.task.done() else f"nothing in {seconds:g} s")
            return future.result()
        finally:
            future.cancel()  # a time limit may have interrupted the wait

    def close(self) -> None:
        """Leave the context."""
        self.loop.call_soon_threadsafe(self.stop.set)
        try:
            self.task.result(5.0)
        except Exception:
            self.task.cancel()


@dataclass(frozen=True, slots=True)
class IsolatedEnvironment:
    """Replaces a task's environment by one that runs in a worker. A direct call creates one here."""

    make: EnvironmentFactory
    worker: Worker

    def __call__(self) -> Environment:
        return self.make()


def environment_job(make: EnvironmentFactory) -> Job:
    """Return the worker's job that operates environments."""
    environments = LiveEnvironments(make)

    def job(request: Any, seconds: float) -> Iterator[dict[str, Any]]:
        operation, key, argument = request
        yield environments.perform(operation, key, argument, seconds=seconds, watched=False)

    return job


@dataclass(slots=True)
class Episode:
    """The environment of one rollout, seen from the trainer."""

    key: int
    example: Example
    opening: Opening
    history: list[tuple[str, Reply]] = field(default_factory=list)
    """The turns so far, with the environment's replies."""


class EnvironmentExecutor:
    """Operates the environments of a task, in its worker or in this process."""

    _keys = count()

    def __init__(self, make: EnvironmentFactory, *, seconds: float, characters: int | None = None) -> None:
        self.worker = make.worker if isinstance(make, IsolatedEnvironment) else None
        self.seconds = seconds
        """Time limit of one call."""
        self.characters = characters
        """Maximum length of a reply; longer ones are truncated."""
        own = make.make if isinstance(make, IsolatedEnvironment) else make
        inner = getattr(own, "func", own)  # unwrap functools.partial
        self.asynchronous = inspect.iscoroutinefunction(getattr(inner, "reply", None))
        self._here = LiveEnvironments(own)

    @property
    def concurrent(self) -> bool:
        """Whether replies keep their time limit outside of the main thread."""
        return self.worker is not None or self.asynchronous

    def start(self, example: Example) -> Episode:
        """Create the environment of a rollout and reset it."""
        key = next(self._keys)
        return Episode(key, example, self._perform("reset", key, example)["opening"])

    def reply(self, episode: Episode, text: str) -> Reply:
        """Return the reply to the policy's turn."""
        result = self._perform("reply", episode.key, text)
        if "lost" in result:
            self._rebuild(episode)
            result = self._perform("reply", episode.key, text)
        reply = as_reply(result)
        episode.history.append((text, reply))
        if self.characters is not None and len(reply.text) > self.characters:
            reply = Reply(reply.text[: self.characters] + " …", reply.reward, reply.done)
        return reply

    def close(self, episode: Episode) -> None:
        """Close the environment of a rollout. A failure is only logged: the rollout is complete."""
        try:
            self._perform("close", episode.key, None)
        except RolloutError as error:
            LOGGER.warning("%s", error)

    def _rebuild(self, episode: Episode) -> None:
        """Repeat an episode in a new worker, after another environment or a tool terminated the last one."""
        results = [self._perform("reset", episode.key, episode.example)["opening"]]
        results += [as_reply(self._perform("reply", episode.key, text)) for text, _ in episode.history]
        if results != [episode.opening, *(reply for _, reply in episode.history)]:
            raise RolloutError("environment: its worker process was lost, and its turns cannot be repeated")

    def _perform(self, operation: str, key: int, argument: Any) -> dict[str, Any]:
        result = self._in_worker(operation, key, argument) if self.worker is not None else None
        if result is None:
            result = self._here.perform(
                operation, key, argument, seconds=self.seconds, watched=not self.asynchronous
            )
        if "error" in result:
            error = RolloutError(f"environment: {result['error']}")
            error.add_note(result.get("trace", ""))
            raise error
        return result

    def _in_worker(self, operation: str, key: int, argument: Any) -> dict[str, Any] | None:
        assert self.worker is not None
        try:
            (result,) = self.worker.replies(JOB, (operation, key, argument), seconds=self.seconds)
        except WorkerLost as lost:
            return {"error": f"{operation} {lost}"}
        except UnmovableError as error:
            LOGGER.warning("the environment runs in the trainer's process: %s", error)
            self.worker = None
            return None
        return dict(result)


def as_reply(result: dict[str, Any]) -> Reply:
    if "lost" in result:
        raise RolloutError("environment: its worker process was lost twice")
    return Reply(**result)


class Openings:
    """The prompts of a task with an environment: what `reset` returns, called once for each example."""

    def __init__(self, make: EnvironmentFactory) -> None:
        self._executor = EnvironmentExecutor(make, seconds=OPENING_SECONDS)
        self._kept: OrderedDict[str, Opening] = OrderedDict()

    def __call__(self, example: Example) -> Opening:
        fingerprint = example.fingerprint
        if fingerprint not in self._kept:
            self._kept[fingerprint] = self._ask(example)
            if len(self._kept) > MAX_OPENINGS:
                self._kept.popitem(last=False)
        return self._kept[fingerprint]

    def _ask(self, example: Example) -> Opening:
        for attempt in range(1, OPENING_ATTEMPTS + 1):
            try:
                episode = self._executor.start(example)
            except RolloutError as error:
                if attempt == OPENING_ATTEMPTS:
                    raise ConfigError(f"the {error} (on the example {dict(example)!r:.120})") from error
            else:
                self._executor.close(episode)
                return episode.opening
        raise AssertionError("the last attempt returns or raises")


def check_environment(make: Any, *, task: str) -> None:
    """Raise ConfigError for anything that is not a class or factory of environments."""
    wanted = "environment must be a class, or a function without arguments that returns an object,"
    if not callable(make):
        raise ConfigError(f"task {task}: {wanted} with reset and reply; got {make!r:.80}")
    if isinstance(make, type) and not all(callable(getattr(make, name, None)) for name in ("reset", "reply")):
        raise ConfigError(
            f"task {task}: the environment {make.__name__} needs the methods reset(example) and reply(text)"
        )
