"""HTTP to servers that may die, hang or fail: bounded retries with back-off, and others take over."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from groupwise.errors import ConfigError, GroupwiseError, InvariantError

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
"""Seconds a server that failed is left alone; doubled each time."""


class Unavailable(Exception):
    """A server did not answer, or says that it cannot now: it may later."""


class Refused(Exception):
    """A server understood and said no."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


@dataclass(slots=True)
class Server:
    """One server, and how it has been doing."""

    address: str
    version: object = None
    """Which weights it is known to have; None: unknown, as after it was gone."""
    busy: int = 0
    failures: int = 0
    """In a row."""
    rest_until: float = 0.0
    answered: float = 0.0
    """When it last answered anything well."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by whoever brings it new weights."""

    def ask(self, path: str, body: object = None, *, seconds: float) -> Any:
        """Send JSON (or ask without a body) and return the JSON that comes back, or the text."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.address + path, data=data, headers={"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=seconds) as answer:
                text = answer.read()
        except HTTPError as error:
            words = error.read().decode(errors="replace")[:300]
            if error.code >= 500 or error.code == 429:
                raise Unavailable(f"{path} answered {error.code}: {words}") from error
            raise Refused(error.code, f"{self.address}{path} answered {error.code}: {words}") from error
        except (OSError, HTTPException) as error:
            raise Unavailable(f"{path}: {error or type(error).__name__}") from error
        self.answered = time.monotonic()
        try:
            return json.loads(text)
        except ValueError:
            return text.decode(errors="replace")

    def failed(self) -> None:
        """Rest a while; what else was under way there fails with it and counts once."""
        self.version = None  # it may come back as another process, without what it was given
        now = time.monotonic()
        if now >= self.rest_until:
            self.failures += 1
            self.rest_until = now + min(FIRST_PAUSE * 2 ** (self.failures - 1), LONGEST_PAUSE)


class Servers:
    """All of them: work goes to whoever is up and least busy."""

    def __init__(
        self, addresses: Sequence[str], *, patience: float, say: Callable[[str], None], first: int = 0
    ) -> None:
        for address in addresses:
            if urlsplit(address).scheme not in ("http", "https"):
                raise ConfigError(f"engine.servers are addresses such as http://host:8000; got {address!r}")
        order = [*addresses[first % len(addresses) :], *addresses[: first % len(addresses)]]
        self.all = [Server(address.rstrip("/")) for address in order]
        self.patience = patience
        self.say = say
        self.retries = 0
        """Requests that had to be sent again."""
        self._lock = threading.Lock()

    def do(self, work: Callable[[Server], Any]) -> Any:
        """Let some server do the work, another one or the same one later if it fails."""
        asked = time.monotonic()
        while True:
            server = self._take()
            try:
                found = work(server)
            except Unavailable as error:
                self.failed(server, error)
                # Silence counts from the last answer to anything, of any server.
                answered = max(asked, *(each.answered for each in self.all))
                if time.monotonic() > answered + self.patience:
                    raise gone(self.patience, server, error) from error
            else:
                if server.failures:
                    self.say(f"rollout server {server.address} is back")
                    server.failures = 0
                return found
            finally:
                with self._lock:
                    server.busy -= 1

    def failed(self, server: Server, error: Unavailable) -> None:
        """Leave a server alone for a while, and say so the first time."""
        with self._lock:
            self.retries += 1
            well = server.failures == 0
            server.failed()
        if well:
            self.say(f"rollout server {server.address} does not answer ({error}); trying again")

    def _take(self) -> Server:
        while True:
            with self._lock:
                now = time.monotonic()
                rested = [server for server in self.all if server.rest_until <= now]
                if rested:
                    server = min(rested, key=lambda server: (server.failures, server.busy))
                    server.busy += 1
                    return server
                soonest = min(server.rest_until for server in self.all)
            time.sleep(max(0.01, min(soonest - time.monotonic(), self.patience)))


def gone(seconds: float, server: Server, error: Exception) -> GroupwiseError:
    return InvariantError(
        f"no rollout server has answered for {seconds:g} s (engine.patience); the last try, "
        f"{server.address}: {error}; start one (groupwise serve-rollouts) and go on with --resume"
    )
