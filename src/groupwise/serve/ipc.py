"""What the server's two processes tell each other: one writes answers, the other talks to clients.

Python runs one thread of a process at a time: in a single one, every event that a client is sent would make
all answers wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from groupwise.engine.sampler import Alternatives
from groupwise.engine.serving.serving_engine import Busy, ServingEngine, StreamChunk
from groupwise.engine.serving.serving_scheduler import Job
from groupwise.model.policy import Policy
from groupwise.records import Finish
from groupwise.tracking.run_log import LOGGER


class WireChunk(NamedTuple):
    """What one member of a job wrote since it was last heard of."""

    job: int
    member: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    alternatives: tuple[Alternatives, ...]
    prompt: tuple[Alternatives, ...]
    finish: Finish | None


class EngineEndpoint:
    """The end of the process with the model: jobs come in by number, and what they write goes out."""

    def __init__(
        self, policy: Policy, connection: Connection, *, slots: int, context: int, waiting: int
    ) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._knowing = threading.Lock()
        """Held to look at the jobs under way: they end in one thread and are cancelled in another."""
        self._jobs: dict[int, Job] = {}
        self._numbers: dict[Job, int] = {}
        self._unfinished: dict[int, int] = {}
        self.engine = ServingEngine(
            policy,
            slots=slots,
            context=context,
            waiting=waiting,
            deliver=self._deliver,
            failed=self._failed,
        )

    def run(self) -> None:
        """Answer until the other side has gone; it is told if the engine fails."""
        reading = threading.Thread(target=self._read, name="groupwise-link", daemon=True)
        reading.start()
        try:
            self.engine.run()
        except Exception:
            LOGGER.exception("the generator failed")
            reading.join()  # clients are told the reason as long as there are any
            raise

    def _read(self) -> None:
        try:
            with suppress(EOFError, OSError):
                while True:
                    what, number, *rest = self._connection.recv()
                    if what == "submit":
                        self._submit(number, *rest)
                    elif job := self._forget(number):
                        self.engine.cancel(job)
        except Exception as error:
            self._failed(error)
            raise
        finally:
            self.engine.close()

    def _submit(self, number: int, job: Job) -> None:
        with self._knowing:
            self._jobs[number], self._numbers[job] = job, number
            self._unfinished[number] = len(job.seeds)
        try:
            self.engine.submit(job)
        except (Busy, ValueError) as error:
            self._forget(number)
            self._send("refused", number, error)
        else:
            self._send("taken", number)

    def _forget(self, number: int) -> Job | None:
        """Return the job of this number, which is heard of no more, unless it has ended already."""
        with self._knowing:
            job = self._jobs.pop(number, None)
            if job is not None:
                del self._numbers[job], self._unfinished[number]
        return job

    # Called by the engine.

    def _deliver(self, news: Sequence[StreamChunk]) -> None:
        with self._knowing:
            words = [
                (
                    number,
                    part.member,
                    part.tokens,
                    part.logprobs,
                    part.alternatives,
                    part.prompt,
                    part.finish,
                )
                for part in news
                if (number := self._numbers.get(part.job)) is not None
            ]
            for number, *_, finish in words:
                self._unfinished[number] -= finish is not None
            ended = {number for number, *_ in words if not self._unfinished[number]}
        for number in ended:
            self._forget(number)
        if words:
            self._send("words", words)

    def _failed(self, error: Exception) -> None:
        self._send("failed", f"{type(error).__name__}: {error}")

    def _send(self, *message: Any) -> None:
        with suppress(OSError), self._sending:  # if the other side has gone, `run` notices
            self._connection.send(message)


class Listener:
    """Where the words of one job are put until whoever asked takes them."""

    def __init__(self) -> None:
        self.words: list[WireChunk] = []
        self.error: str | None = None
        self._come = asyncio.Event()

    def put(self, words: WireChunk) -> None:
        self.words.append(words)
        self._come.set()

    def fail(self, error: str) -> None:
        self.error = error
        self._come.set()

    async def take(self) -> list[WireChunk]:
        """Wait for words and return all there are; raises RuntimeError when there will be none."""
        await self._come.wait()
        self._come.clear()
        if self.error is not None:
            raise RuntimeError(self.error)
        words, self.words = self.words, []
        return words


class FrontendEndpoint:
    """The end of the process that talks to clients. A thread takes in what comes: nothing ever waits here."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._numbers = count()
        self._listeners: dict[int, Listener] = {}
        self._asked: dict[int, asyncio.Future[None]] = {}
        self.failure: str | None = None
        self.gone = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, name="groupwise-link", daemon=True).start()

    async def submit(self, job: Job) -> tuple[int, Listener]:
        """Let a job join; raises `Busy` when too many wait, ValueError when it can never run.

        RuntimeError: nobody answers any more.
        """
        if self.failure is not None:
            raise RuntimeError(self.failure)
        number, listener = next(self._numbers), Listener()
        self._asked[number] = self._loop.create_future()
        self._listeners[number] = listener
        self._connection.send(("submit", number, job))
        try:
            await self._asked[number]
        except BaseException:
            self.forget(number)
            raise
        finally:
            del self._asked[number]
        return number, listener

    def forget(self, number: int, *, ended: bool = False) -> None:
        """Listen no more; what has not ended is stopped."""
        if self._listeners.pop(number, None) is not None and not ended and not self.gone.is_set():
            self._connection.send(("cancel", number))

    def _read(self) -> None:
        told: Callable[..., Any] = self._loop.call_soon_threadsafe
        with suppress(RuntimeError):  # the loop is closed
            with suppress(EOFError, OSError):
                while True:
                    told(self._take_in, self._connection.recv())
            told(self._take_in, ("gone",))

    def _take_in(self, message: tuple[Any, ...]) -> None:
        match message:
            case "words", words:
                for row in words:
                    if (listener := self._listeners.get(row[0])) is not None:
                        listener.put(WireChunk(*row))
            case "taken", number:
                self._settle(number, None)
            case "refused", number, error:
                self._settle(number, error)
            case "failed", reason:
                self._fail(reason)
            case ("gone",):
                self._fail("it has gone")
                self.gone.set()

    def _settle(self, number: int, error: Exception | None) -> None:
        asked = self._asked.get(number)
        if asked is None or asked.done():
            return
        if error is None:
            asked.set_result(None)
        else:
            asked.set_exception(error)

    def _fail(self, reason: str) -> None:
        self.failure = reason
        for number in list(self._asked):
            self._settle(number, RuntimeError(reason))
        for listener in self._listeners.values():
            listener.fail(reason)
