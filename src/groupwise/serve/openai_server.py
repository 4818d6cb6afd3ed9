"""The OpenAI-compatible server: routes HTTP requests, submits jobs to the engine, returns their output.

It runs in a front-end process, which handles HTTP while the main process runs the engine, and counts
requests, tokens and latencies for Prometheus. The end of the module starts that process,
checks its address, and leaves a core to it on small machines.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import signal
import socket
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch

from groupwise.engine.serving.serving_engine import Busy
from groupwise.errors import ConfigError
from groupwise.model.load import keep_quiet, load_tokenizer
from groupwise.model.policy import Policy
from groupwise.model.tokenizer import TokenizerCodec
from groupwise.serve.completion_request import parse_completion_request
from groupwise.serve.completion_response import ResponseBuilder
from groupwise.serve.detokenizer import TokenTable
from groupwise.serve.http_server import (
    HEAD_LIMIT,
    Connections,
    Events,
    EventStream,
    HTTPError,
    HTTPReply,
    HTTPRequest,
    is_loopback,
)
from groupwise.serve.ipc import FrontendEndpoint, Submission
from groupwise.serve.responses_api import ResponsesBuilder, chat_body, echoed

SHORT_BODY = 32 * 1024
"""Largest body in bytes that is tokenized within a few milliseconds."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)
"""Upper bounds of the buckets of a latency in seconds."""


class OpenAIServer:
    """Serves one model through OpenAI's API."""

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
        cors: Sequence[str] = (),
    ) -> None:
        self.codec, self.model, self.context, self.slots = codec, model, context, slots
        self._pieces = TokenTable(codec.tokenizer)
        self._about = {"id": model, "object": "model", "created": 0, "owned_by": "groupwise"}
        self._about["max_model_len"] = context
        self._api_key, self._allowed_hosts = api_key, frozenset(map(str.lower, allowed_hosts))
        self._cors = frozenset(cors)
        self.metrics = ServerMetrics()
        self._connection = connection
        self._open = 0
        """Number of completions running or waiting."""
        self._connections = Connections(self.answer)
        # One thread for short requests and one for long ones, which may take seconds to tokenize.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="groupwise-encoder")
        self._long_encoder = ThreadPoolExecutor(1, thread_name_prefix="groupwise-long-encoder")

    async def run(self, host: str, port: int, *, ready: Callable[[int], None]) -> None:
        """Serve until cancelled or the engine exits; `ready` is called with the bound port."""
        self.link = FrontendEndpoint(self._connection)
        server = await asyncio.start_server(
            self._connections.accept, host, port, limit=HEAD_LIMIT, backlog=512
        )
        async with server:
            try:
                ready(server.sockets[0].getsockname()[1])
                await self.link.gone.wait()
            finally:
                # Inside the block: leaving it waits for all connections, which may idle for a minute.
                server.close()
                self._encoder.shutdown(wait=False, cancel_futures=True)
                self._long_encoder.shutdown(wait=False, cancel_futures=True)
                await self._connections.close()

    async def answer(self, request: HTTPRequest) -> HTTPReply | EventStream:
        """Answer one request, and count it."""
        cors, endpoint = self._cors_headers(request), request.path.rstrip("/")
        endpoint = endpoint if endpoint in ENDPOINTS else "other"
        status = 500
        try:
            reply = await self._route(request)
            status = reply.status if isinstance(reply, HTTPReply) else 200
        except HTTPError as error:
            status, error.headers = error.status, {**error.headers, **cors}
            raise
        finally:
            self.metrics.requests[endpoint, status] += 1
        return replace(reply, headers={**reply.headers, **cors}) if cors else reply

    async def _route(self, request: HTTPRequest) -> HTTPReply | EventStream:
        """Pass a request to its handler."""
        self._check_site(request)
        if request.path == "/health":
            return self._health()
        if request.method == "OPTIONS" and self._is_cors_origin(request):
            return HTTPReply(body=None, status=204, headers=preflight_headers(request))
        self._check_key(request)
        method = "GET" if request.method == "HEAD" else request.method
        match method, request.path.rstrip("/"):
            case "GET", "/metrics":
                running, waiting = self._load
                text = self.metrics.render(running=running, waiting=waiting)
                return HTTPReply(body=text, headers={"Content-Type": METRICS_TYPE})
            case "GET", "/v1/models":
                return HTTPReply(body={"object": "list", "data": [self._about]})
            case "GET", path if unquote(path) == f"/v1/models/{self.model}":
                return HTTPReply(body=self._about)
            case "POST", "/v1/chat/completions":
                return await self._complete(request, self._chat)
            case "POST", "/v1/responses":
                return await self._complete(request, self._responses)
            case "POST", "/v1/completions":
                return await self._complete(request, self._plain)
        raise HTTPError(404, f"no such endpoint: {request.method} {request.path}", code="unknown_url")

    @property
    def _load(self) -> tuple[int, int]:
        """Number of running and of waiting completions."""
        running = min(self._open, self.slots)
        return running, self._open - running

    def _health(self) -> HTTPReply:
        running, waiting = self._load
        body = {"status": self.link.failure or "ok", "running": running, "waiting": waiting}
        return HTTPReply(body=body, status=500 if self.link.failure else 200)

    def _is_cors_origin(self, request: HTTPRequest) -> bool:
        """Whether web pages of the request's origin may use the server (--cors)."""
        origin = request.headers.get("origin")
        return origin is not None and ("*" in self._cors or origin in self._cors)

    def _cors_headers(self, request: HTTPRequest) -> dict[str, str]:
        if not self._is_cors_origin(request):
            return {}
        return {"Access-Control-Allow-Origin": request.headers["origin"], "Vary": "Origin"}

    def _check_site(self, request: HTTPRequest) -> None:
        """Without an API key, reject requests that a web page may have sent.

        The page may belong to another site, or its host name may resolve to this machine (DNS rebinding).
        Clients other than browsers send no Origin.
        """
        if self._api_key is not None:
            return
        host, origin = request.headers.get("host"), request.headers.get("origin")
        if host and not self._is_allowed(f"//{host}"):
            raise HTTPError(
                403, f"host {host!r} is not allowed: use 127.0.0.1, or start with --allowed-host NAME"
            )
        if origin is not None and not self._is_cors_origin(request) and not self._is_allowed(origin):
            raise HTTPError(403, f"origin {origin!r} is not allowed; start with --cors {origin}")

    def _is_allowed(self, address: str) -> bool:
        try:
            name = (urlsplit(address).hostname or "").lower()
        except ValueError:
            return False
        return is_loopback(name) or name in self._allowed_hosts

    def _check_key(self, request: HTTPRequest) -> None:
        if self._api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        matches = hmac.compare_digest(given.strip().encode(), self._api_key.encode())
        if scheme.lower() != "bearer" or not matches:
            raise HTTPError(
                401,
                "the API key is missing or wrong",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _chat(self, body: Mapping[str, Any]) -> ResponseBuilder:
        return self._builder(body, chat=True)

    def _plain(self, body: Mapping[str, Any]) -> ResponseBuilder:
        return self._builder(body, chat=False)

    def _responses(self, body: Mapping[str, Any]) -> ResponsesBuilder:
        return ResponsesBuilder(self._builder(chat_body(body), chat=True), echoed(body))

    def _builder(self, body: Mapping[str, Any], *, chat: bool) -> ResponseBuilder:
        completion = parse_completion_request(
            body, self.codec, chat=chat, context=self.context, model=self.model
        )
        return ResponseBuilder(completion, model=self.model, decode=self.codec.decode, pieces=self._pieces)

    async def _complete(
        self, request: HTTPRequest, read: Callable[[Mapping[str, Any]], ResponseBuilder | ResponsesBuilder]
    ) -> HTTPReply | EventStream:
        """Run a request; `read` parses its body into the builder of the response."""
        arrived = time.monotonic()
        # Parsing, rendering and tokenizing a long chat takes a while, so keep it off the event loop.
        encoder = self._encoder if len(request.body) <= SHORT_BODY else self._long_encoder
        parse = lambda: read(request.json())  # noqa: E731
        response = await asyncio.get_running_loop().run_in_executor(encoder, parse)
        completion = response.request
        submission = Submission(self.link, completion.jobs)
        with submission_errors():
            await submission.start()
        self._open += completion.count
        if completion.stream:
            events = self._stream(response, submission, arrived)
            return EventStream(events=events, named=isinstance(response, ResponsesBuilder))
        async for _ in self._stream(response, submission, arrived):
            pass
        return HTTPReply(body=response.whole())

    async def _stream(
        self, response: ResponseBuilder | ResponsesBuilder, submission: Submission, arrived: float
    ) -> Events:
        """Yield the parts of a response; `arrived` is when the request was read."""
        waits = True
        try:
            if first := list(response.first()):
                yield first
            while not response.done:
                with submission_errors():
                    chunks = await submission.take()
                if waits:
                    self.metrics.first_token.observe(time.monotonic() - arrived)
                    waits = False
                parts = list(response.take(chunks))
                yield [*parts, *response.last()] if response.done else parts
        finally:
            self._open -= response.request.count
            submission.close()
            usage = response.usage()
            self.metrics.prompt_tokens += usage["prompt_tokens"]
            self.metrics.generated_tokens += usage["completion_tokens"]
            self.metrics.duration.observe(time.monotonic() - arrived)


ENDPOINTS = frozenset(
    ("/health", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses")
)


class LatencyHistogram:
    """Counts of latencies by bucket."""

    def __init__(self) -> None:
        self._counts = [0] * (len(LATENCY_BUCKETS) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(LATENCY_BUCKETS, seconds)] += 1
        self._total += seconds

    def samples(self, name: str) -> Iterator[str]:
        bounds = [*(f"{bound:g}" for bound in LATENCY_BUCKETS), "+Inf"]
        for bound, count in zip(bounds, accumulate(self._counts), strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {count}'
        yield f"{name}_sum {self._total:.6f}"
        yield f"{name}_count {sum(self._counts)}"


class ServerMetrics:
    """What the server has done since it started."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """Requests by endpoint and status."""
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.first_token = LatencyHistogram()
        self.duration = LatencyHistogram()

    def render(self, *, running: int, waiting: int) -> str:
        """Return all figures in Prometheus' text format."""
        requests = [
            f'{{endpoint="{endpoint}",status="{status}"}} {count}'
            for (endpoint, status), count in sorted(self.requests.items())
        ]
        lines = [
            *described("requests_total", "counter", "Requests by endpoint and HTTP status.", requests),
            *described("prompt_tokens_total", "counter", "Prompt tokens.", [f" {self.prompt_tokens}"]),
            *described(
                "generated_tokens_total", "counter", "Generated tokens.", [f" {self.generated_tokens}"]
            ),
            *described("completions_running", "gauge", "Completions that generate.", [f" {running}"]),
            *described("completions_waiting", "gauge", "Completions in the queue.", [f" {waiting}"]),
        ]
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Seconds from a request to its first token.", self.first_token),
            ("request_duration_seconds", "Seconds from a request to its last token.", self.duration),
        ):
            lines += described(name, "histogram", text, [])
            lines += histogram.samples(f"groupwise_{name}")
        return "\n".join(lines) + "\n"


def described(name: str, kind: str, text: str, samples: list[str]) -> list[str]:
    """Return a metric's samples, which lack the name, after its description."""
    name = f"groupwise_{name}"
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *(name + sample for sample in samples)]


def preflight_headers(request: HTTPRequest) -> dict[str, str]:
    """Return what a browser asks for before it lets a page of another origin send a request."""
    headers = request.headers.get("access-control-request-headers", "authorization, content-type")
    return {
        "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
        "Access-Control-Allow-Headers": headers,
        "Access-Control-Max-Age": "3600",
    }


@contextmanager
def submission_errors() -> Iterator[None]:
    """Turn the errors of a submission into responses."""
    try:
        yield
    except Busy:
        raise HTTPError(
            429, "too many requests are waiting; try again later", headers={"Retry-After": "1"}
        ) from None
    except ValueError as error:
        raise HTTPError(400, str(error)) from None
    except (RuntimeError, OSError) as error:
        raise HTTPError(500, f"the engine failed: {error}") from None


NARROW = 256
"""Largest hidden size of a model that counts as small."""


def leave_a_core(policy: Policy) -> None:
    """Use one compute thread fewer for a small model on a CPU.

    All threads of a matrix product wait for the slowest one, and the front-end process interrupts one of them
    with every token. A small model generates many tokens per second and gains little from the last core. A
    larger one generates few, and needs it. OMP_NUM_THREADS takes precedence if it is set.
    """
    small = policy.head_weight.shape[1] <= NARROW
    if policy.device.type == "cpu" and small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupConfig:
    """Settings of the front-end process."""

    host: str
    port: int
    tokenizer: Path
    vocabulary: int
    model: str
    context: int
    slots: int
    api_key: str | None
    allowed_hosts: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the chat template."""


def start_front() -> Connection:
    """Start the process, which then waits for its `StartupConfig`, and return our end of the pipe."""
    processes = get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=run_front, args=(theirs,), name="groupwise-front", daemon=True)
    # Ctrl-C also reaches the child, which must ignore SIGINT from the start: it ends with this process.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)
    theirs.close()
    return ours


def check_address(host: str, port: int) -> None:
    """Raise ConfigError if the address cannot be bound, before a model is loaded."""
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            candidate.bind(address)
    except (OSError, UnicodeError) as error:  # some host names cannot be resolved
        raise cannot_listen(host, port, getattr(error, "strerror", None) or str(error)) from error


def cannot_listen(host: str, port: int, reason: str) -> ConfigError:
    advice = "; choose another port with --port" if "already in use" in reason else ""
    return ConfigError(f"cannot listen on {host}:{port}: {reason}{advice}")


def open_front(connection: Connection, startup: StartupConfig) -> int:
    """Make the process listen, and return the port."""
    connection.send(startup)
    port: int | str = connection.recv()
    if isinstance(port, str):
        raise cannot_listen(startup.host, startup.port, port)
    return port


def run_front(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # in case it is not inherited
    keep_quiet()
    try:
        startup: StartupConfig = connection.recv()
    except EOFError:
        return
    tokenizer = load_tokenizer(startup.tokenizer, template_args=startup.template_args)
    codec = TokenizerCodec(tokenizer, vocabulary=startup.vocabulary)
    server = OpenAIServer(
        codec,
        connection,
        model=startup.model,
        context=startup.context,
        slots=startup.slots,
        api_key=startup.api_key,
        allowed_hosts=startup.allowed_hosts,
        cors=startup.cors,
    )
    try:
        asyncio.run(server.run(startup.host, startup.port, ready=connection.send))
    except (OSError, UnicodeError) as error:
        connection.send(getattr(error, "strerror", None) or str(error))
