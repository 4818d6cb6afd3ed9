"""The server of `groupwise watch`: the live page, its read-only JSON API, events and access control."""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from groupwise.errors import ConfigError
from groupwise.report.rollout_view import RolloutFilter, search
from groupwise.report.run_reader import RunIndex, RunReader, as_json, distribution

COOKIE = "groupwise_token"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only refer to this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class AccessGuard:
    """ASGI middleware that checks method, host, origin and token of every request."""

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self.app = app
        self.token = token
        """None: only requests to loopback names are allowed."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        refusal = self.refusal(scope)
        answer = self.app if refusal is None else refusal

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await answer(scope, receive, send_with_headers)

    def refusal(self, scope: Scope) -> Response | None:
        """Return the error response for a request, or None if it is allowed."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this server is read-only", 405)
        if self.token is None and not is_loopback(host_name(host)):
            return PlainTextResponse("this page is available at 127.0.0.1 only", 403)
        if is_cross_site(headers, host):
            return PlainTextResponse("cross-site requests are not allowed", 403)
        return None if self.token is None else self._check_token(scope, headers)

    def _check_token(self, scope: Scope, headers: Headers) -> Response | None:
        assert self.token is not None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if same(given, self.token):
            # Move the token to a cookie: URLs end up in histories and logs.
            # Redirect to a single slash: a browser takes "//name/" for another site.
            response = RedirectResponse(f"/{scope['path'].lstrip('/')}", 303)
            response.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
            return response
        if same(cookie(headers), self.token) or same(bearer(headers), self.token):
            return None
        return PlainTextResponse("a token is required: open the URL that `groupwise watch` printed", 401)


def is_cross_site(headers: Headers, host: str) -> bool:
    """Whether another site made the request; following a link to the page is allowed."""
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        return True
    followed = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return headers.get("sec-fetch-site") in ("cross-site", "same-site") and not followed


def host_name(host: str) -> str:
    """Return the Host header without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def cookie(headers: Headers) -> str:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel else ""


def bearer(headers: Headers) -> str:
    kind, _, value = headers.get("authorization", "").partition(" ")
    return value if kind.lower() == "bearer" else ""


def same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode(), token.encode())


PAGE = Path(__file__).parent / "page"
POLL_SECONDS = 1.0
HEARTBEAT = 15
"""Number of polls without changes after which a comment is sent to keep the connection alive."""

LARGEST = 10**15
"""Upper bound of numbers in requests; larger ones occur in no run and would overflow."""


class PathNumber(IntegerConvertor):
    """The number of a step, group or member in a URL."""

    regex = "[0-9]{1,15}"


register_url_convertor("number", PathNumber())


def application(index: RunIndex, *, token: str | None = None) -> Starlette:
    """Return the ASGI application; it is read-only."""
    serve = WatchServer(index)
    one = "/api/runs/{run}"
    return Starlette(
        routes=[
            Route("/", index_page),
            Route("/api/runs", json_endpoint(serve.runs)),
            Route("/api/events", serve.events),
            Route(f"{one}/curves", json_endpoint(serve.curves)),
            Route(f"{one}/alarms", json_endpoint(serve.alarms)),
            Route(f"{one}/settings", json_endpoint(serve.settings)),
            Route(f"{one}/population", json_endpoint(serve.population)),
            Route(f"{one}/distribution", json_endpoint(serve.distribution)),
            Route(f"{one}/search", json_endpoint(serve.search)),
            Route(f"{one}/steps/{{step:number}}", json_endpoint(serve.groups)),
            Route(f"{one}/steps/{{step:number}}/groups/{{group:number}}", json_endpoint(serve.group)),
            Route(
                f"{one}/steps/{{step:number}}/groups/{{group:number}}/members/{{member:number}}",
                json_endpoint(serve.tokens),
            ),
            Mount("/page", StaticFiles(directory=PAGE)),
        ],
        middleware=[Middleware(AccessGuard, token=token), Middleware(GZipMiddleware, compresslevel=4)],
    )


def index_page(request: Request) -> Response:
    return FileResponse(PAGE / "index.html")


def json_endpoint(handler: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """Return a JSON endpoint; it is not async, so that Starlette runs it in a thread."""

    def endpoint(request: Request) -> Response:
        try:
            result = handler(request)
        except FileNotFoundError:
            result = None
        except OSError as error:
            raise HTTPException(500, f"cannot read the file: {error.strerror or error}") from error
        except RecursionError as error:
            raise HTTPException(500, "cannot read the file: its JSON is nested too deeply") from error
        if result is None:
            raise HTTPException(404, "not found")
        return Response(as_json(result), media_type="application/json")

    return endpoint


class WatchServer:
    """The endpoints of the API."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index

    def run(self, request: Request) -> RunReader:
        """Look a run up by its name in the index; names are never used as paths."""
        name = request.path_params["run"]
        run = self.index.runs.get(name) or self.index.refresh().get(name)
        if run is None:
            raise HTTPException(404, "no such run")
        return run

    def runs(self, request: Request) -> list[dict[str, Any]]:
        return [{"id": name, **run.glance()} for name, run in self.index.refresh().items()]

    def curves(self, request: Request) -> dict[str, Any]:
        after = integer(request, "after")
        return self.run(request).curves(after=-1 if after is None else after)

    def alarms(self, request: Request) -> dict[str, Any]:
        return self.run(request).alarmed()

    def settings(self, request: Request) -> dict[str, Any]:
        return self.run(request).settings()

    def population(self, request: Request) -> dict[str, Any] | None:
        return self.run(request).population()

    def distribution(self, request: Request) -> dict[str, Any]:
        return distribution(
            self.run(request).rollouts, first=integer(request, "first"), last=integer(request, "last")
        )

    def search(self, request: Request) -> dict[str, Any]:
        query = request.query_params
        return asdict(
            search(
                self.run(request).rollouts,
                RolloutFilter(
                    text=query.get("text", "")[:1000],
                    least_reward=number(request, "least_reward"),
                    most_reward=number(request, "most_reward"),
                    least_length=integer(request, "least_length"),
                    most_length=integer(request, "most_length"),
                    finish=query.get("finish", ""),
                    first=integer(request, "first"),
                    last=integer(request, "last"),
                    skip=max(0, integer(request, "skip") or 0),
                ),
            )
        )

    def groups(self, request: Request) -> list[dict[str, Any]]:
        return self.run(request).rollouts.groups(request.path_params["step"])

    def group(self, request: Request) -> dict[str, Any] | None:
        params = request.path_params
        return self.run(request).rollouts.group(params["step"], params["group"])

    def tokens(self, request: Request) -> dict[str, Any] | None:
        params = request.path_params
        return self.run(request).rollouts.tokens(params["step"], params["group"], params["member"])

    async def events(self, request: Request) -> Response:
        return StreamingResponse(
            changes(self.index), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )


async def changes(index: RunIndex) -> AsyncIterator[str]:
    """Yield a server-sent event for each run whose files changed since the last poll."""
    before: dict[str, Any] = {name: run.change() for name, run in index.refresh().items()}
    yield "retry: 2000\n\n"
    quiet_polls = 0
    while True:
        await asyncio.sleep(POLL_SECONDS)
        current = await asyncio.to_thread(
            lambda: {name: run.change() for name, run in index.refresh().items()}
        )
        changed = [name for name in {**before, **current} if before.get(name) != current.get(name)]
        before = current
        for name in changed:
            run = index.runs.get(name)
            event = {"run": name, **(run.glance() if run else {"state": "gone"})}
            yield f"event: change\ndata: {as_json(event)}\n\n"
        quiet_polls = 0 if changed else quiet_polls + 1
        if quiet_polls >= HEARTBEAT:
            quiet_polls = 0
            yield ": keep-alive\n\n"


def number(request: Request, name: str) -> float | None:
    given = request.query_params.get(name, "")
    try:
        return float(given) if given else None
    except ValueError:
        raise HTTPException(400, f"{name} must be a number") from None


def integer(request: Request, name: str) -> int | None:
    value = number(request, name)
    if value is not None and not abs(value) < LARGEST:  # also true for NaN
        raise HTTPException(400, f"{name} must be a number below {LARGEST:g}")
    return None if value is None else int(value)


PORT = 8477


def watch(
    paths: Sequence[str | Path],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    token: str | None = None,
    must_exist: bool = True,
    say: Callable[[str], None],
) -> None:
    """Serve the page until Ctrl-C.

    Except on loopback, access requires a token, which is generated if none is given. With `must_exist=False`,
    the folders may be created later, with their first run.
    """
    index = RunIndex.of(paths, must_exist=must_exist)
    if not index.runs:
        say(f"no runs in {', '.join(map(str, paths))} yet; they will appear when they start")
    try:
        import uvicorn

    except ImportError as error:
        raise ConfigError(f"groupwise watch needs {error.name}: pip install starlette uvicorn") from error

    if not is_loopback(host) and token is None:
        token = secrets.token_urlsafe(24)
    with listen(host, port) as listening:
        bracketed = f"[{host}]" if ":" in host else host
        address = f"http://{bracketed}:{listening.getsockname()[1]}/"
        say(f"watching {len(index.runs)} run{'s' * (len(index.runs) != 1)} at {address}")
        if token is not None:
            say(f"for the first visit, open {address}?token={token}")
        threading.Thread(target=read_ahead, args=(index,), daemon=True).start()
        settings = uvicorn.Config(
            application(index, token=token),
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=1,
            server_header=False,
        )
        uvicorn.Server(settings).run(sockets=[listening])


def read_ahead(index: RunIndex) -> None:
    """Cache the rewards of the newest run while the browser starts: this view reads many files."""
    newest = next(iter(index.runs.values()), None)
    if newest is not None:
        distribution(newest.rollouts)


def listen(host: str, port: int | None) -> socket.socket:
    """Listen on the port; without one, on the default port, or on any free port if that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tries = [PORT, 0] if port is None else [port]
    for number in tries:
        server = socket.socket(family, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((host, number))
            server.listen()  # from now on connections wait rather than fail
        except OSError as error:
            server.close()
            if number == tries[-1]:
                why = error.strerror or error
                advice = "; choose another port with --port" if error.errno == errno.EADDRINUSE else ""
                raise ConfigError(f"cannot listen on {host}:{number}: {why}{advice}") from error
        else:
            return server
    raise AssertionError("one of the attempts returns or raises")
