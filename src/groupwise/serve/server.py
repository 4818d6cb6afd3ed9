"""The server: questions in, jobs for the engine, and what they write back to whoever asked."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from groupwise.engine.live import Busy, LiveEngine, News
from groupwise.engine.live_scheduler import Job
from groupwise.model.policy import Policy
from groupwise.serve.asked import Asked, read_asked
from groupwise.serve.http import HEAD_LIMIT, Events, Question, Refused, Reply, serve_connection
from groupwise.serve.told import Telling

PAUSE = 0.02
"""Seconds between two parts of a stream at least: many small ones would take the engine's time."""


class Listener:
    """Where the news of one job are put until whoever asked takes them."""

    def __init__(self) -> None:
        self.news: list[News] = []
        self.error: str | None = None
        self._come = asyncio.Event()

    def put(self, news: News) -> None:
        self.news.append(news)
        self._come.set()

    def fail(self, error: str) -> None:
        self.error = error
        self._come.set()

    async def take(self) -> list[News]:
        """Wait for news and return all there are."""
        await self._come.wait()
        self._come.clear()
        if self.error is not None:
            raise Refused(500, f"the generator failed: {self.error}")
        news, self.news = self.news, []
        return news


class Server:
    """One model behind OpenAI's interface."""

    def __init__(
        self, policy: Policy, *, model: str, slots: int, context: int, waiting: int, api_key: str | None
    ) -> None:
        self.policy, self.model, self._api_key = policy, model, api_key
        self._listeners: dict[Job, Listener] = {}
        self._connections: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: str | None = None
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="groupwise-encoder")
        self.engine = LiveEngine(
            policy,
            slots=slots,
            context=context,
            waiting=waiting,
            deliver=self._deliver,
            failed=self._fail,
        )

    async def run(self, host: str, port: int, *, ready: Callable[[int], None]) -> None:
        """Serve until cancelled; `ready` is told the port that was taken."""
        self._loop = asyncio.get_running_loop()
        self.engine.start()
        try:
            server = await asyncio.start_server(self._connected, host, port, limit=HEAD_LIMIT, backlog=512)
            async with server:
                ready(server.sockets[0].getsockname()[1])
                await server.serve_forever()
        finally:
            self.engine.close()
            self._encoder.shutdown(wait=False)
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await serve_connection(self.answer, reader, writer)
        finally:
            self._connections.discard(task)

    async def answer(self, question: Question) -> Reply | Events:
        """Answer one question."""
        if question.path == "/health":
            return self._health()
        self._check_key(question)
        match question.method, question.path.rstrip("/"):
            case "GET", "/v1/models":
                model = {"id": self.model, "object": "model", "created": 0, "owned_by": "groupwise"}
                return Reply(body={"object": "list", "data": [model]})
            case "POST", "/v1/chat/completions":
                return await self._complete(question.json(), chat=True)
            case "POST", "/v1/completions":
                return await self._complete(question.json(), chat=False)
        raise Refused(404, f"there is nothing at {question.method} {question.path}")

    def _health(self) -> Reply:
        running, waiting = self.engine.load
        body = {"status": self._failure or "ok", "running": running, "waiting": waiting}
        return Reply(body=body, status=500 if self._failure else 200)

    def _check_key(self, question: Question) -> None:
        if self._api_key is None:
            return
        given = question.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if not hmac.compare_digest(given, self._api_key.encode()):
            raise Refused(401, "the API key is missing or wrong")

    async def _complete(self, body: Mapping[str, Any], *, chat: bool) -> Reply | Events:
        if self._failure:
            raise Refused(500, f"the generator failed: {self._failure}")
        # Rendering and encoding a long chat takes a while: not in the thread that serves everyone.
        context = self.engine.context
        read = partial(read_asked, body, self.policy, chat=chat, context=context, model=self.model)
        asked = await asyncio.get_running_loop().run_in_executor(self._encoder, read)
        telling = Telling(asked, model=self.model, decode=self.policy.decode)
        listener = self._listeners[asked.job] = Listener()
        try:
            self.engine.submit(asked.job)
        except Busy:
            del self._listeners[asked.job]
            raise Refused(429, "too many requests wait already", headers={"Retry-After": "1"}) from None
        except ValueError as error:
            del self._listeners[asked.job]
            raise Refused(400, str(error)) from None
        if asked.stream:
            return self._stream(asked, telling, listener)
        try:
            while not telling.done:
                for _ in telling.take(await listener.take()):
                    pass
            return Reply(body=telling.whole())
        finally:
            self._forget(asked, telling)

    async def _stream(
        self, asked: Asked, telling: Telling, listener: Listener
    ) -> AsyncIterator[Mapping[str, Any]]:
        try:
            for part in telling.first():
                yield part
            while not telling.done:
                for part in telling.take(await listener.take()):
                    yield part
                if not telling.done:
                    await asyncio.sleep(PAUSE)
            if asked.usage:
                yield telling.last()
        finally:
            self._forget(asked, telling)

    def _forget(self, asked: Asked, telling: Telling) -> None:
        self._listeners.pop(asked.job, None)
        if not telling.done:
            self.engine.cancel(asked.job)

    # Called from the engine's thread.

    def _deliver(self, news: Sequence[News]) -> None:
        if news and self._loop is not None:
            self._loop.call_soon_threadsafe(self._distribute, news)

    def _fail(self, error: BaseException) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._tell_failure)

    def _distribute(self, news: Sequence[News]) -> None:
        for part in news:
            if (listener := self._listeners.get(part.job)) is not None:
                listener.put(part)

    def _tell_failure(self) -> None:
        for listener in self._listeners.values():
            listener.fail(self._failure or "unknown")
