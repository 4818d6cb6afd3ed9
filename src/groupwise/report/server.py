"""`groupwise watch`: the page, and a run's files as JSON by slice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from groupwise.report.catalogue import Catalogue, SeenRun
from groupwise.report.distribution import distribution
from groupwise.report.guard import Guard
from groupwise.report.notation import as_json
from groupwise.report.search import Wanted, search

PAGE = Path(__file__).parent / "page"
POLL_SECONDS = 1.0
HEARTBEAT = 15
"""Polls without news after which a comment keeps the connection from being taken for dead."""

LARGEST = 10**15
"""Numbers from here on are none of a run's, and some do not fit what its files are read with."""


class Number(IntegerConvertor):
    """The number of a step, group or member in an address."""

    regex = "[0-9]{1,15}"


register_url_convertor("number", Number())


def application(catalogue: Catalogue, *, token: str | None = None) -> Starlette:
    """Return the whole server; it reads, and never writes."""
    serve = Server(catalogue)
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
        middleware=[Middleware(Guard, token=token), Middleware(GZipMiddleware, compresslevel=4)],
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


class Server:
    """What can be asked."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue

    def run(self, request: Request) -> SeenRun:
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
                Wanted(
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


async def changes(catalogue: Catalogue) -> AsyncIterator[str]:
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
