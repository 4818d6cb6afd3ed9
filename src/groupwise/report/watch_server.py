"""JSON as browsers read it."""

from __future__ import annotations

import asyncio
import errno
import json
import math
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
from groupwise.report.history import distribution
from groupwise.report.rollout_view import RolloutFilter, search
from groupwise.report.run_index import RunIndex, RunReader


def as_json(value: Any) -> str:
    """Write a value in one line; what is not finite becomes null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(without_nan(value), ensure_ascii=False, separators=(",", ":"))


def without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [without_nan(inner) for inner in value]
    return value


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
    """Whether a name or address can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class AccessGuard:
    """ASGI middleware in front of everything that is served."""

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self.app = app
        self.token = token
        """None: only for this machine, under its loopback names."""

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
        """Return what to answer instead; None where the request may pass."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("only reading is possible here", 405)
        if self.token is None and not is_loopback(host_name(host)):
            return PlainTextResponse("this page is for 127.0.0.1 only", 403)
        if foreign(headers, host):
            return PlainTextResponse("requests of other sites are refused", 403)
        return None if self.token is None else self._without_token(scope, headers)

    def _without_token(self, scope: Scope, headers: Headers) -> Response | None:
        assert self.token is not None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if same(given, self.token):
            # From here on a cookie proves it: addresses end up in histories and logs.
            # One slash: a browser takes "//name/" for another site.
            response = RedirectResponse(f"/{scope['path'].lstrip('/')}", 303)
            response.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
            return response
        if same(cookie(headers), self.token) or same(bearer(headers), self.token):
            return None
        return PlainTextResponse("this page needs the token that `groupwise watch` printed", 401)


def foreign(headers: Headers, host: str) -> bool:
    """Whether another site made the request; following a link to the page itself is fine."""
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        return True
    followed = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return headers.get("sec-fetch-site") in ("cross-site", "same-site") and not followed


def host_name(host: str) -> str:
    """The Host header without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def bearer(headers: Headers) -> str:
    kind, _, value = headers.get("authorization", "").partition(" ")
    return value if kind.lower() == "bearer" else ""


def same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode(), token.encode())


PAGE = Path(__file__).parent / "page"
POLL_SECONDS = 1.0
HEARTBEAT = 15
"""Polls without news after which a comment keeps the connection from being taken for dead."""

LARGEST = 10**15
"""Numbers from here on are none of a run's, and some do not fit what its files are read with."""


class PathNumber(IntegerConvertor):
    """The number of a step, group or member in an address."""

    regex = "[0-9]{1,15}"


register_url_convertor("number", PathNumber())


def application(catalogue: RunIndex, *, token: str | None = None) -> Starlette:
    """Return the whole server; it reads, and never writes."""
    serve = WatchServer(catalogue)
    one = "/api/runs/{run}"
    return Starlette(
        routes=[
            Route("/", index),
            Route("/api/runs", answering(serve.runs)),
            Route("/api/events", serve.events),
            Route(f"{one}/curves", answering(serve.curves)),
            Route(f"{one}/alarms", answering(serve.alarms)),
            Route(f"{one}/settings", answering(serve.settings)),
            Route(f"{one}/distribution", answering(serve.distribution)),
            Route(f"{one}/search", answering(serve.search)),
            Route(f"{one}/steps/{{step:number}}", answering(serve.groups)),
            Route(f"{one}/steps/{{step:number}}/groups/{{group:number}}", answering(serve.group)),
            Route(
                f"{one}/steps/{{step:number}}/groups/{{group:number}}/members/{{member:number}}",
                answering(serve.tokens),
            ),
            Mount("/page", StaticFiles(directory=PAGE)),
        ],
        middleware=[Middleware(AccessGuard, token=token), Middleware(GZipMiddleware, compresslevel=4)],
    )


def index(request: Request) -> Response:
    return FileResponse(PAGE / "index.html")


def answering(question: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """Return an endpoint that answers in JSON; a plain function, so that it runs on a thread of its own."""

    def endpoint(request: Request) -> Response:
        try:
            found = question(request)
        except FileNotFoundError:
            found = None
        except OSError as error:
            raise HTTPException(500, f"cannot read it: {error.strerror or error}") from error
        except RecursionError as error:
            raise HTTPException(500, "cannot read it: its JSON is nested too deeply") from error
        if found is None:
            raise HTTPException(404, "there is nothing of that name or number")
        return Response(as_json(found), media_type="application/json")

    return endpoint


class WatchServer:
    """What can be asked."""

    def __init__(self, catalogue: RunIndex) -> None:
        self.catalogue = catalogue

    def run(self, request: Request) -> RunReader:
        """Find a run by the name it was given here: a name is never made into a path."""
        name = request.path_params["run"]
        run = self.catalogue.runs.get(name) or self.catalogue.look().get(name)
        if run is None:
            raise HTTPException(404, "there is no run of that name here")
        return run

    def runs(self, request: Request) -> list[dict[str, Any]]:
        return [{"id": name, **run.glance()} for name, run in self.catalogue.look().items()]

    def curves(self, request: Request) -> dict[str, Any]:
        after = whole(request, "after")
        return self.run(request).curves(after=-1 if after is None else after)

    def alarms(self, request: Request) -> dict[str, Any]:
        return self.run(request).alarmed()

    def settings(self, request: Request) -> dict[str, Any]:
        return self.run(request).settings()

    def distribution(self, request: Request) -> dict[str, Any]:
        return distribution(
            self.run(request).slices, first=whole(request, "first"), last=whole(request, "last")
        )

    def search(self, request: Request) -> dict[str, Any]:
        asked = request.query_params
        return asdict(
            search(
                self.run(request).slices,
                RolloutFilter(
                    text=asked.get("text", "")[:1000],
                    least_reward=number(request, "least_reward"),
                    most_reward=number(request, "most_reward"),
                    least_length=whole(request, "least_length"),
                    most_length=whole(request, "most_length"),
                    finish=asked.get("finish", ""),
                    first=whole(request, "first"),
                    last=whole(request, "last"),
                    skip=max(0, whole(request, "skip") or 0),
                ),
            )
        )

    def groups(self, request: Request) -> list[dict[str, Any]]:
        return self.run(request).slices.groups(request.path_params["step"])

    def group(self, request: Request) -> dict[str, Any] | None:
        place = request.path_params
        return self.run(request).slices.group(place["step"], place["group"])

    def tokens(self, request: Request) -> dict[str, Any] | None:
        place = request.path_params
        return self.run(request).slices.tokens(place["step"], place["group"], place["member"])

    async def events(self, request: Request) -> Response:
        return StreamingResponse(
            changes(self.catalogue), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )


async def changes(catalogue: RunIndex) -> AsyncIterator[str]:
    """Yield a server-sent event for each run whose files changed since the last look."""
    before: dict[str, Any] = {name: run.change() for name, run in catalogue.look().items()}
    yield "retry: 2000\n\n"
    silent = 0
    while True:
        await asyncio.sleep(POLL_SECONDS)
        now = await asyncio.to_thread(lambda: {name: run.change() for name, run in catalogue.look().items()})
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        before = now
        for name in changed:
            run = catalogue.runs.get(name)
            news = {"run": name, **(run.glance() if run else {"state": "gone"})}
            yield f"event: change\ndata: {as_json(news)}\n\n"
        silent = 0 if changed else silent + 1
        if silent >= HEARTBEAT:
            silent = 0
            yield ": still here\n\n"


def number(request: Request, name: str) -> float | None:
    given = request.query_params.get(name, "")
    try:
        return float(given) if given else None
    except ValueError:
        raise HTTPException(400, f"{name} must be a number") from None


def whole(request: Request, name: str) -> int | None:
    value = number(request, name)
    if value is not None and not abs(value) < LARGEST:  # nor is it where it is no number at all
        raise HTTPException(400, f"{name} must be a number, and no larger than any in a run")
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
    """Serve the page until Ctrl-C. Anywhere but on loopback it needs a token, made here if none is given.

    `must_exist=False`: the folders may appear later, with their first run.
    """
    catalogue = RunIndex.of(paths, must_exist=must_exist)
    if not catalogue.runs:
        say(f"no run yet in {', '.join(map(str, paths))}: it will appear here when it starts")
    try:
        import uvicorn

    except ImportError as error:
        raise ConfigError(f"groupwise watch needs {error.name}: pip install starlette uvicorn") from error

    if not is_loopback(host) and token is None:
        token = secrets.token_urlsafe(24)
    with listen(host, port) as listening:
        place = f"[{host}]" if ":" in host else host
        address = f"http://{place}:{listening.getsockname()[1]}/"
        say(f"watching {len(catalogue.runs)} run{'s' * (len(catalogue.runs) != 1)} at {address}")
        if token is not None:
            say(f"open it the first time as {address}?token={token}")
        threading.Thread(target=read_ahead, args=(catalogue,), daemon=True).start()
        settings = uvicorn.Config(
            application(catalogue, token=token),
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=1,
            server_header=False,
        )
        uvicorn.Server(settings).run(sockets=[listening])


def read_ahead(catalogue: RunIndex) -> None:
    """Read the rewards of the newest run while the browser starts: the one view that reads many files."""
    newest = next(iter(catalogue.runs.values()), None)
    if newest is not None:
        distribution(newest.slices)


def listen(host: str, port: int | None) -> socket.socket:
    """Open the port, or without one the usual, and where that is taken any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tries = [PORT, 0] if port is None else [port]
    for number in tries:
        server = socket.socket(family, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((host, number))
            server.listen()  # from here on a browser waits rather than being refused
        except OSError as error:
            server.close()
            if number == tries[-1]:
                why = error.strerror or error
                advice = "; name another port by --port" if error.errno == errno.EADDRINUSE else ""
                raise ConfigError(f"cannot listen at {host}:{number}: {why}{advice}") from error
        else:
            return server
    raise AssertionError("one of the tries returns or raises")
