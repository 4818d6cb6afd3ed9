"""The server: questions in, jobs for the engine, and what they write back to whoever asked."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import unquote, urlsplit

from groupwise.engine.serving.serving_engine import Busy
from groupwise.model.tokenizer import TokenizerCodec
from groupwise.serve.completion_request import CompletionRequest, read_asked
from groupwise.serve.completion_response import ResponseBuilder
from groupwise.serve.detokenizer import TokenTable
from groupwise.serve.http_server import (
    HEAD_LIMIT,
    Events,
    HTTPError,
    HTTPReply,
    HTTPRequest,
    is_loopback,
    serve_connection,
)
from groupwise.serve.ipc import FrontendEndpoint, Listener, WireChunk

SHORT_BODY = 32 * 1024
"""Bytes of a request up to which it is encoded in a few milliseconds."""


class OpenAIServer:
    """One model behind OpenAI's interface."""

    def __init__(
        self,
        codec: TokenizerCodec,
        connection: Connection,
        *,
        model: str,
        context: int,
        slots: int,
        api_key: str | None,
        allowed_hosts: Sequence[str] = (),
    ) -> None:
        self.codec, self.model, self.context, self.slots = codec, model, context, slots
        self._pieces = TokenTable(codec.tokenizer)
        self._about = {"id": model, "object": "model", "created": 0, "owned_by": "groupwise"}
        self._api_key, self._allowed_hosts = api_key, frozenset(map(str.lower, allowed_hosts))
        self._connection = connection
        self._open = 0
        """Answers that are written or waited for."""
        self._connections: set[asyncio.Task[Any]] = set()
        # One thread for short requests and one for long ones, which may take seconds to encode.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="groupwise-encoder")
        self._long_encoder = ThreadPoolExecutor(1, thread_name_prefix="groupwise-long-encoder")

    async def run(self, host: str, port: int, *, ready: Callable[[int], None]) -> None:
        """Serve until cancelled, or the engine is gone; `ready` is told the port that was taken."""
        self.link = FrontendEndpoint(self._connection)
        server = await asyncio.start_server(self._connected, host, port, limit=HEAD_LIMIT, backlog=512)
        async with server:
            try:
                ready(server.sockets[0].getsockname()[1])
                await self.link.gone.wait()
            finally:
                # In here: leaving waits for the connections, and a client may keep one for a minute.
                server.close()
                self._encoder.shutdown(wait=False, cancel_futures=True)
                self._long_encoder.shutdown(wait=False, cancel_futures=True)
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

    async def answer(self, question: HTTPRequest) -> HTTPReply | Events:
        """Answer one question."""
        self._check_site(question)
        if question.path == "/health":
            return self._health()
        self._check_key(question)
        method = "GET" if question.method == "HEAD" else question.method
        match method, question.path.rstrip("/"):
            case "GET", "/v1/models":
                return HTTPReply(body={"object": "list", "data": [self._about]})
            case "GET", path if unquote(path) == f"/v1/models/{self.model}":
                return HTTPReply(body=self._about)
            case "POST", "/v1/chat/completions":
                return await self._complete(question, chat=True)
            case "POST", "/v1/completions":
                return await self._complete(question, chat=False)
        raise HTTPError(404, f"there is nothing at {question.method} {question.path}")

    def _health(self) -> HTTPReply:
        running = min(self._open, self.slots)
        body = {"status": self.link.failure or "ok", "running": running, "waiting": self._open - running}
        return HTTPReply(body=body, status=500 if self.link.failure else 200)

    def _check_site(self, question: HTTPRequest) -> None:
        """Without a key, refuse what a web page may have sent: one of another site, or one that made its
        own name mean this machine (DNS rebinding). Clients that are no browsers send no Origin."""
        if self._api_key is not None:
            return
        host, origin = question.headers.get("host"), question.headers.get("origin")
        if host and not self._is_known(f"//{host}"):
            raise HTTPError(
                403, f"the host {host!r} is not served: use 127.0.0.1, or start with --allowed-host NAME"
            )
        if origin is not None and not self._is_known(origin):
            raise HTTPError(403, f"pages of {origin!r} are not served; --allowed-host NAME allows them")

    def _is_known(self, address: str) -> bool:
        try:
            name = (urlsplit(address).hostname or "").lower()
        except ValueError:
            return False
        return is_loopback(name) or name in self._allowed_hosts

    def _check_key(self, question: HTTPRequest) -> None:
        if self._api_key is None:
            return
        scheme, _, given = question.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), self._api_key.encode())
        if scheme.lower() != "bearer" or not right:
            raise HTTPError(401, "the API key is missing or wrong")

    def _read(self, question: HTTPRequest, *, chat: bool) -> CompletionRequest:
        return read_asked(question.json(), self.codec, chat=chat, context=self.context, model=self.model)

    async def _complete(self, question: HTTPRequest, *, chat: bool) -> HTTPReply | Events:
        # Reading, rendering and encoding a long chat takes a while: not in the thread that serves everyone.
        encoder = self._encoder if len(question.body) <= SHORT_BODY else self._long_encoder
        read = partial(self._read, question, chat=chat)
        asked = await asyncio.get_running_loop().run_in_executor(encoder, read)
        try:
            number, listener = await self.link.submit(asked.job)
        except Busy:
            raise HTTPError(429, "too many requests wait already", headers={"Retry-After": "1"}) from None
        except ValueError as error:
            raise HTTPError(400, str(error)) from None
        except (RuntimeError, OSError) as error:
            raise HTTPError(500, f"the generator failed: {error}") from None
        self._open += len(asked.job.seeds)
        telling = ResponseBuilder(asked, model=self.model, decode=self.codec.decode, pieces=self._pieces)
        if asked.stream:
            return self._stream(asked, telling, number, listener)
        try:
            while not telling.done:
                for _ in telling.take(await heard(listener)):
                    pass
            return HTTPReply(body=telling.whole())
        finally:
            self._forget(asked, telling, number)

    async def _stream(
        self, asked: CompletionRequest, telling: ResponseBuilder, number: int, listener: Listener
    ) -> Events:
        try:
            if first := list(telling.first()):
                yield first
            while not telling.done:
                parts = list(telling.take(await heard(listener)))
                yield [*parts, telling.last()] if telling.done and asked.usage else parts
        finally:
            self._forget(asked, telling, number)

    def _forget(self, asked: CompletionRequest, telling: ResponseBuilder, number: int) -> None:
        self._open -= len(asked.job.seeds)
        self.link.forget(number, ended=telling.done)


async def heard(listener: Listener) -> list[WireChunk]:
    try:
        return await listener.take()
    except RuntimeError as error:
        raise HTTPError(500, f"the generator failed: {error}") from None
