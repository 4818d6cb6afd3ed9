"""A minimal HTTP/1.1 server for an API: JSON requests, responses in one piece or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from ipaddress import ip_address
from socket import SO_ERROR, SOL_SOCKET
from typing import Any

from groupwise.tracking.run_folder import LOGGER

HEAD_LIMIT = 32 * 1024
BODY_LIMIT = 16 * 1024 * 1024
MOST_DIGITS = 20
"""Longest Content-Length accepted; Python refuses to parse integers of several thousand digits."""
IDLE_SECONDS = 60.0
"""Seconds after which an idle connection is closed."""


encode = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPRequest:
    """An HTTP request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        try:
            value = json.loads(self.body)
            encode(value).encode()
        except UnicodeEncodeError:
            raise HTTPError(400, "the body contains invalid text: half of a surrogate pair") from None
        except (ValueError, RecursionError):
            raise HTTPError(400, "the body is not valid JSON") from None
        if not isinstance(value, dict):
            raise HTTPError(400, "the body must be a JSON object")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPReply:
    """A complete response: JSON, text, or no body at all."""

    body: Mapping[str, Any] | str | None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        if self.body is None:
            return b""
        return (self.body if isinstance(self.body, str) else encode(self.body)).encode()


Events = AsyncIterator[Sequence[Mapping[str, Any]]]
"""The parts of a streamed response, in batches that are ready at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStream:
    """A response of server-sent events."""

    events: Events
    named: bool = False
    """Whether events have a name, their `type`; such a stream ends without the mark [DONE]."""
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[HTTPRequest], Awaitable[HTTPReply | EventStream]]


class HTTPError(Exception):
    """An error response in the format that OpenAI clients expect."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = headers or {}

    def reply(self) -> HTTPReply:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return HTTPReply(body={"error": error}, status=self.status, headers=self.headers)

    def event(self) -> Mapping[str, Any]:
        """Return the last event of a stream with named events."""
        return {"type": "error", "message": str(self), "param": self.param, "code": self.code}


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only refer to this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Connections:
    """The open connections of a server."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._open: set[asyncio.Task[Any]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a new connection until it is closed."""
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            with suppress(asyncio.CancelledError):  # by `close`; asyncio would log it as an error
                await serve_connection(self._handler, reader, writer)
        finally:
            self._open.discard(task)

    async def close(self) -> None:
        """Cancel what is open."""
        for connection in self._open:
            connection.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)


async def serve_connection(
    handler: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer the requests of one connection until it is closed."""
    try:
        while True:
            try:
                request = await asyncio.wait_for(read_request(reader), IDLE_SECONDS)
            except HTTPError as error:
                await write_reply(Outgoing(writer, close=True), error.reply())
                return
            if request is None:
                return
            close = request.headers.get("connection", "").lower() == "close"
            if not await answer(handler, request, reader, writer, close=close) or close:
                return
    except (ConnectionError, TimeoutError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def answer(
    handler: Handler,
    request: HTTPRequest,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    close: bool,
) -> bool:
    """Answer one request. Return False if the client disconnected; its work is then cancelled."""
    outgoing = Outgoing(writer, close=close, bare=request.method == "HEAD")
    work = asyncio.ensure_future(respond(handler, request, outgoing))
    disconnected = asyncio.ensure_future(until_disconnected(reader, outgoing))
    try:
        await asyncio.wait({work, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        connected = work.done()
    finally:
        work.cancel()
        disconnected.cancel()
    # Await both together: suppressing the cancellation of each would swallow our own as well.
    outcome, _ = await asyncio.gather(work, disconnected, return_exceptions=True)
    if isinstance(outcome, Exception) and not isinstance(outcome, ConnectionError):
        raise outcome
    return connected


@dataclass(slots=True)
class Outgoing:
    """The writer of one response, and how far it is."""

    writer: asyncio.StreamWriter
    close: bool
    bare: bool = False
    """Whether to send the headers only, as for HEAD."""
    begun: bool = False
    """Whether a part of the response has been sent."""

    async def send(self, data: bytes) -> None:
        self.begun = True
        self.writer.write(data)
        await self.writer.drain()


async def until_disconnected(reader: asyncio.StreamReader, outgoing: Outgoing) -> None:
    """Return when the client disconnects, without reading pipelined requests.

    A client that closed only its sending half (shutdown(SHUT_WR)) still waits for its response, and at first
    looks the same as one that disconnected. Data sent to a closed connection is answered with a reset. If the
    response has not begun, this sends 100 Continue, which every HTTP/1.1 client ignores.
    """
    while not reader.at_eof():
        await asyncio.sleep(0.2)
    if not outgoing.begun:
        outgoing.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    connection = outgoing.writer.get_extra_info("socket")
    with suppress(OSError):  # the connection is closed already
        while not outgoing.writer.is_closing() and not connection.getsockopt(SOL_SOCKET, SO_ERROR):
            await asyncio.sleep(0.2)


async def respond(handler: Handler, request: HTTPRequest, outgoing: Outgoing) -> None:
    try:
        reply = await handler(request)
        if isinstance(reply, HTTPReply):
            await write_reply(outgoing, reply)
            return
    except HTTPError as error:
        await write_reply(outgoing, error.reply())
        return
    except ConnectionError:
        raise
    except Exception:  # a failing request must not break the connection or the server
        LOGGER.exception("a request failed")
        await write_reply(outgoing, HTTPError(500, "internal server error; see the server log").reply())
        return
    await write_events(outgoing, reply)


async def read_request(reader: asyncio.StreamReader) -> HTTPRequest | None:
    """Read one request; return None if the connection has ended."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise
    except asyncio.LimitOverrunError:
        raise HTTPError(431, "the headers are too large") from None
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise HTTPError(400, "the request is not HTTP/1.1")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    body = await read_body(reader, headers)
    return HTTPRequest(method=words[0], path=words[1].partition("?")[0], headers=headers, body=body)


async def read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if "transfer-encoding" in headers:
        if headers["transfer-encoding"].lower() != "chunked":
            raise HTTPError(501, "the Transfer-Encoding must be chunked")
        return await read_chunks(reader)
    length = headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > MOST_DIGITS:
        raise HTTPError(400, "the Content-Length is not a number")
    if int(length) > BODY_LIMIT:
        raise HTTPError(413, f"the body exceeds {BODY_LIMIT} bytes")
    return await reader.readexactly(int(length))


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    """Read a chunked body and its trailers."""
    body = bytearray()
    try:
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0][:MOST_DIGITS], 16):
            if not 0 < size <= BODY_LIMIT - len(body):
                raise HTTPError(413, f"the body exceeds {BODY_LIMIT} bytes")
            body += (await reader.readexactly(size + 2))[:size]
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass
    except (ValueError, asyncio.LimitOverrunError):
        raise HTTPError(400, "the body is not a valid sequence of chunks") from None
    return bytes(body)


async def write_reply(outgoing: Outgoing, reply: HTTPReply) -> None:
    body = reply.content
    head = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    head = {**({} if reply.body is None else head), **reply.headers}
    headers = status_and_headers(reply.status, head, close=outgoing.close)
    await outgoing.send(headers if outgoing.bare else headers + body)


async def write_events(outgoing: Outgoing, stream: EventStream) -> None:
    """Write server-sent events as they arrive; an error is sent as the last event."""
    head = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "Transfer-Encoding": "chunked"}
    # Sent together with the first event.
    unsent = status_and_headers(200, {**head, **stream.headers}, close=outgoing.close)
    try:
        async with aclosing(stream.events) as batches:  # type: ignore[type-var]
            async for parts in batches:
                if parts:  # an empty chunk would end the response
                    written = "".join(event(part, named=stream.named) for part in parts)
                    await outgoing.send(unsent + chunk(written))
                    unsent = b""
        last = "" if stream.named else "data: [DONE]\n\n"
    except HTTPError as error:
        last = event(error.event() if stream.named else error.reply().body, named=stream.named)
    await outgoing.send(unsent + (chunk(last) if last else b"") + b"0\r\n\r\n")


def event(part: Any, *, named: bool) -> str:
    return (f"event: {part['type']}\n" if named else "") + f"data: {encode(part)}\n\n"


def chunk(text: str) -> bytes:
    data = text.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def status_and_headers(status: int, headers: Mapping[str, str], *, close: bool) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines.append(f"Connection: {'close' if close else 'keep-alive'}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
