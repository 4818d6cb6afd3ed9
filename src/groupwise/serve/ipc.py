"""Messages between the server's two processes: one runs the engine, the other handles HTTP.

Python runs one thread of a process at a time (the GIL). In a single process, every event sent to a client
would delay all generation.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate, count
from multiprocessing.connection import Connection
from typing import Any

from groupwise.engine.serving.serving_engine import Busy, ServingEngine, StreamChunk
from groupwise.engine.serving.serving_scheduler import Job
from groupwise.model.policy import Policy
from groupwise.tracking.run_folder import LOGGER


class EngineEndpoint:
    """The engine's end of the pipe: receives numbered jobs and sends what they generate."""

    def __init__(
        self,
        policy: Policy,
        connection: Connection,
        *,
        slots: int,
        context: int,
        waiting: int,
        speculative: bool = True,
    ) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        self._jobs_lock = threading.Lock()
        """Guards the jobs in progress: they end in one thread and are cancelled in another."""
        self._jobs: dict[int, Job] = {}
        self._numbers: dict[Job, int] = {}
        self._unfinished: dict[int, int] = {}
        # Compiling a grammar takes up to seconds, in which other jobs must not wait.
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="groupwise-grammar")
        self.engine = ServingEngine(
            policy,
            slots=slots,
            context=context,
            waiting=waiting,
            deliver=self._deliver,
            failed=self._failed,
            speculative=speculative,
        )

    def run(self) -> None:
        """Serve until the front end closes the pipe; if the engine fails, report it to the front end."""
        reader = threading.Thread(target=self._read, name="groupwise-link", daemon=True)
        reader.start()
        try:
            self.engine.run()
        except Exception:
            LOGGER.exception("the engine failed")
            reader.join()  # keep reporting the failure until the front end exits
            raise

    def _read(self) -> None:
        try:
            with suppress(EOFError, OSError):
                while True:
                    kind, number, *rest = self._connection.recv()
                    if kind == "submit":
                        self._submit(number, *rest)
                    elif job := self._forget(number):
                        self.engine.cancel(job)
        except Exception as error:
            self._failed(error)
            raise
        finally:
            self._compiling.shutdown(wait=False, cancel_futures=True)
            self.engine.close()

    def _submit(self, number: int, job: Job) -> None:
        with self._jobs_lock:
            self._jobs[number], self._numbers[job] = job, number
            self._unfinished[number] = len(job.seeds)
        if job.grammar is None:
            self._enter(number, job)
        else:
            self._compiling.submit(self._enter, number, job)

    def _enter(self, number: int, job: Job) -> None:
        if number not in self._jobs:  # cancelled while it waited
            return
        try:
            self.engine.submit(job)
        except (Busy, ValueError) as error:
            self._forget(number)
            self._send("rejected", number, error)
        else:
            self._send("accepted", number)

    def _forget(self, number: int) -> Job | None:
        """Stop tracking a job and return it, or None if it has ended already."""
        with self._jobs_lock:
            job = self._jobs.pop(number, None)
            if job is not None:
                del self._numbers[job], self._unfinished[number]
        return job

    # Called by the engine.

    def _deliver(self, chunks: Sequence[StreamChunk[Job]]) -> None:
        with self._jobs_lock:
            numbered = [
                StreamChunk(number, *chunk[1:])
                for chunk in chunks
                if (number := self._numbers.get(chunk.job)) is not None
            ]
            for chunk in numbered:
                self._unfinished[chunk.job] -= chunk.finish is not None
            ended = {chunk.job for chunk in numbered if not self._unfinished[chunk.job]}
        for number in ended:
            self._forget(number)
        if numbered:
            self._send("chunks", numbered)

    def _failed(self, error: Exception) -> None:
        self._send("failed", f"{type(error).__name__}: {error}")

    def _send(self, *message: Any) -> None:
        with suppress(OSError), self._send_lock:  # if the front end has exited, `run` notices
            self._connection.send(message)


class Listener:
    """Queue of the chunks of a request's jobs, read by the request's handler."""

    def __init__(self) -> None:
        self.chunks: list[StreamChunk[int]] = []
        self.error: str | None = None
        self._ready = asyncio.Event()

    def put(self, chunk: StreamChunk[int]) -> None:
        self.chunks.append(chunk)
        self._ready.set()

    def fail(self, error: str) -> None:
        self.error = error
        self._ready.set()

    async def take(self) -> list[StreamChunk[int]]:
        """Wait for chunks and return all that have arrived; raise RuntimeError if the engine failed."""
        await self._ready.wait()
        self._ready.clear()
        if self.error is not None:
            raise RuntimeError(self.error)
        chunks, self.chunks = self.chunks, []
        return chunks


class FrontendEndpoint:
    """The front end's end of the pipe; a thread reads it, so that the engine never blocks on sending."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._numbers = count()
        self._listeners: dict[int, Listener] = {}
        self._submitted: dict[int, asyncio.Future[None]] = {}
        self.failure: str | None = None
        self.gone = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, name="groupwise-link", daemon=True).start()

    async def submit(self, job: Job, listener: Listener) -> int:
        """Submit a job whose chunks go to `listener`, and return its number.

        Raises `Busy` if too many jobs are waiting, ValueError if the job can never run, and RuntimeError if
        the engine has failed.
        """
        if self.failure is not None:
            raise RuntimeError(self.failure)
        number = next(self._numbers)
        self._submitted[number] = self._loop.create_future()
        self._listeners[number] = listener
        self._connection.send(("submit", number, job))
        try:
            await self._submitted[number]
        except BaseException:
            self.forget(number)
            raise
        finally:
            del self._submitted[number]
        return number

    def forget(self, number: int, *, ended: bool = False) -> None:
        """Stop listening to a job, and cancel it unless it has ended."""
        if self._listeners.pop(number, None) is not None and not ended and not self.gone.is_set():
            self._connection.send(("cancel", number))

    def _read(self) -> None:
        call_soon: Callable[..., Any] = self._loop.call_soon_threadsafe
        with suppress(RuntimeError):  # the loop is closed
            with suppress(EOFError, OSError):
                while True:
                    call_soon(self._handle, self._connection.recv())
            call_soon(self._handle, ("gone",))

    def _handle(self, message: tuple[Any, ...]) -> None:
        match message:
            case "chunks", chunks:
                for chunk in chunks:
                    if (listener := self._listeners.get(chunk.job)) is not None:
                        listener.put(chunk)
            case "accepted", number:
                self._settle(number, None)
            case "rejected", number, error:
                self._settle(number, error)
            case "failed", reason:
                self._fail(reason)
            case ("gone",):
                self._fail("the engine process has exited")
                self.gone.set()

    def _settle(self, number: int, error: Exception | None) -> None:
        submitted = self._submitted.get(number)
        if submitted is None or submitted.done():
            return
        if error is None:
            submitted.set_result(None)
        else:
            submitted.set_exception(error)

    def _fail(self, reason: str) -> None:
        self.failure = reason
        for number in list(self._submitted):
            self._settle(number, RuntimeError(reason))
        for listener in self._listeners.values():
            listener.fail(reason)


class Submission:
    """The jobs of one request. Those that do not fit in the queue wait here until others have ended."""

    def __init__(self, link: FrontendEndpoint, jobs: Sequence[Job]) -> None:
        self._link = link
        self._listener = Listener()
        first = accumulate((len(job.seeds) for job in jobs), initial=0)
        self._unsent = deque(zip(first, jobs, strict=False))
        self._first: dict[int, int] = {}
        """By job number: the index of its first completion among those of the request."""
        self._unfinished: dict[int, int] = {}

    async def start(self) -> None:
        """Submit the jobs; raise the errors of `FrontendEndpoint.submit` if not even one is accepted."""
        while self._unsent:
            first, job = self._unsent[0]
            try:
                number = await self._link.submit(job, self._listener)
            except Busy:
                if self._unfinished:
                    return
                raise
            self._unsent.popleft()
            self._first[number], self._unfinished[number] = first, len(job.seeds)

    async def take(self) -> list[StreamChunk[int]]:
        """Return the chunks that have arrived; `member` counts the completions of all jobs."""
        chunks = await self._listener.take()
        for chunk in chunks:
            self._unfinished[chunk.job] -= chunk.finish is not None
        for number in [number for number, left in self._unfinished.items() if not left]:
            del self._unfinished[number]
            self._link.forget(number, ended=True)
        if self._unsent:
            await self.start()
        return [chunk._replace(member=self._first[chunk.job] + chunk.member) for chunk in chunks]

    def close(self) -> None:
        """Cancel the jobs that have not ended."""
        self._unsent.clear()
        for number in self._unfinished:
            self._link.forget(number)
        self._unfinished.clear()
