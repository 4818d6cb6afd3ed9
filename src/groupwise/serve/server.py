"""The server: questions in, jobs for the engine, and what they write back to whoever asked."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import unquote

from groupwise.engine.live import Busy
from groupwise.model.codec import Codec
from groupwise.serve.asked import Asked, read_asked
from groupwise.serve.http import HEAD_LIMIT, Events, Question, Refused, Reply, serve_connection
from groupwise.serve.link import FrontSide, Listener, Words
from groupwise.serve.pieces import Pieces
from groupwise.serve.told import Telling


class Server:
    """One model behind OpenAI's interface."""

    def __init__(
        self,
        codec: Codec,
        connection: Connection,
        *,
        model: str,
        context: int,
        slots: int,
        api_key: str | None,
    ) -> None:
        self.codec, self.model, self.context, self.slots = codec, model, context, slots
        self._pieces = Pieces(codec.tokenizer)
        self._about = {"id": model, "object": "model", "created": 0, "owned_by": "groupwise"}
        self._api_key = api_key
        self._connection = connection
        self._open = 0
        """Answers that are written or waited for."""
        self._connections: set[asyncio.Task[Any]] = set()
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="groupwise-encoder")

    async def run(self, host: str, port: int, *, ready: Callable[[int], None]) -> None:
        """Serve until cancelled, or the engine is gone; `ready` is told the port that was taken."""
        self.link = FrontSide(self._connection)
        server = await asyncio.start_server(self._connected, host, port, limit=HEAD_LIMIT, backlog=512)
        async with server:
            try:
                ready(server.sockets[0].getsockname()[1])
                await self.link.gone.wait()
            finally:
                # In here: leaving waits for the connections, and a client may keep one for a minute.
                server.close()
                self._encoder.shutdown(wait=False)
                for connection in self._connections:
                    connection.cancel()
                await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(asyncio.CancelledError):  # the end; asyncio would print it as an error
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
                return Reply(body={"object": "list", "data": [self._about]})
            case "GET", path if unquote(path) == f"/v1/models/{self.model}":
                return Reply(body=self._about)
            case "POST", "/v1/chat/completions":
                return await self._complete(question.json(), chat=True)
            case "POST", "/v1/completions":
                return await self._complete(question.json(), chat=False)
        raise Refused(404, f"there is nothing at {question.method} {question.path}")

    def _health(self) -> Reply:
        running = min(self._open, self.slots)
        body = {"status": self.link.failure or "ok", "running": running, "waiting": self._open - running}
        return Reply(body=body, status=500 if self.link.failure else 200)

    def _check_key(self, question: Question) -> None:
        if self._api_key is None:
            return
        scheme, _, given = question.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), self._api_key.encode())
        if scheme.lower() != "bearer" or not right:
            raise Refused(401, "the API key is missing or wrong")

    async def _complete(self, body: Mapping[str, Any], *, chat: bool) -> Reply | Events:
        # Rendering and encoding a long chat takes a while: not in the thread that serves everyone.
        read = partial(read_asked, body, self.codec, chat=chat, context=self.context, model=self.model)
        asked = await asyncio.get_running_loop().run_in_executor(self._encoder, read)
        try:
            number, listener = await self.link.submit(asked.job)
        except Busy:
            raise Refused(429, "too many requests wait already", headers={"Retry-After": "1"}) from None
        except ValueError as error:
            raise Refused(400, str(error)) from None
        except (RuntimeError, OSError) as error:
            raise Refused(500, f"the generator failed: {error}") from None
        self._open += len(asked.job.seeds)
        telling = Telling(asked, model=self.model, decode=self.codec.decode, pieces=self._pieces)
        if asked.stream:
            return self._stream(asked, telling, number, listener)
        try:
            while not telling.done:
                for _ in telling.take(await heard(listener)):
                    pass
            return Reply(body=telling.whole())
        finally:
            self._forget(asked, telling, number)

    async def _stream(self, asked: Asked, telling: Telling, number: int, listener: Listener) -> Events:
        try:
            if first := list(telling.first()):
                yield first
            while not telling.done:
                parts = list(telling.take(await heard(listener)))
                yield [*parts, telling.last()] if telling.done and asked.usage else parts
        finally:
            self._forget(asked, telling, number)

    def _forget(self, asked: Asked, telling: Telling, number: int) -> None:
        self._open -= len(asked.job.seeds)
        self.link.forget(number, ended=telling.done)


async def heard(listener: Listener) -> list[Words]:
    try:
        return await listener.take()
    except RuntimeError as error:
        raise Refused(500, f"the generator failed: {error}") from None
