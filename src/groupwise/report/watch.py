"""Starting the server of `groupwise watch`."""

from __future__ import annotations

import errno
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from groupwise.errors import ConfigError
from groupwise.report.catalogue import Catalogue
from groupwise.report.distribution import distribution
from groupwise.report.guard import is_loopback

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
    catalogue = Catalogue.of(paths, must_exist=must_exist)
    if not catalogue.runs:
        say(f"no run yet in {', '.join(map(str, paths))}: it will appear here when it starts")
    try:
        import uvicorn

        from groupwise.report.server import application
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


def read_ahead(catalogue: Catalogue) -> None:
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
