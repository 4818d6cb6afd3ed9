"""The tools of an MCP server, for `Task(tools=…)`, with their full JSON schemas.

    task = gw.Task(…, tools=gw.mcp_tools("python", "server.py"))           # over standard input and output
    task = gw.Task(…, tools=gw.mcp_tools("http://localhost:8000/mcp"))     # over streamable HTTP

One connection serves all rollouts. An error that a tool reports is read by the policy. If the server itself
has ended, or does not answer, the rollout fails.
"""

from __future__ import annotations

import asyncio
import atexit
import shlex
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AsyncExitStack
from typing import Any

from groupwise.errors import ConfigError, RolloutError, requires
from groupwise.rollout.environment import event_loop_here
from groupwise.rollout.tools import with_schema

URL = ("http://", "https://")
START_SECONDS = 60.0
CALL_SECONDS = 600.0
"""Limit of a call that `tools.seconds` does not interrupt, in a thread."""


def mcp_tools(
    *server: str, env: dict[str, str] | None = None, headers: dict[str, str] | None = None
) -> list[Callable[..., str]]:
    """Connect to an MCP server and return its tools.

    server: a URL; or a program to start with its arguments, or one string with both
    env: environment variables of the program; by default those that the MCP library considers safe
    headers: HTTP headers for the URL, such as `Authorization`
    """
    words = shlex.split(server[0]) if len(server) == 1 else list(server)
    if not words:
        raise ConfigError(
            'mcp_tools requires a URL or a command, for example mcp_tools("python", "server.py")'
        )
    with requires("mcp", "the tools of an MCP server"):
        import mcp.client.streamable_http  # noqa: F401
    connection = McpConnection(words, env, headers)
    return [connection.function(tool) for tool in connection.tools]


class McpConnection:
    """A connection to one server, on the event loop of this process."""

    def __init__(self, words: list[str], env: dict[str, str] | None, headers: dict[str, str] | None) -> None:
        self.name = shlex.join(words)
        self.words, self.env, self.headers = words, env, headers
        self.session: Any = None
        self.tools: list[dict[str, Any]] = []
        self.loop = event_loop_here()
        ready: Future[None] = Future()
        self.task = asyncio.run_coroutine_threadsafe(self.hold(ready), self.loop)
        try:
            ready.result(START_SECONDS)
        except Exception as error:
            self.task.cancel()
            reason = f"{type(error).__name__}: {first_of(error)}"
            raise ConfigError(f"cannot start the MCP server {self.name}: {reason}") from error
        atexit.register(self.close)

    async def hold(self, ready: Future[None]) -> None:
        """Hold the connection open: it must be opened and closed by the same task."""
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        self.stop = asyncio.Event()
        try:
            async with AsyncExitStack() as stack:
                program, *arguments = self.words
                if program.startswith(URL):
                    client = create_mcp_http_client(headers=self.headers)
                    await stack.enter_async_context(client)
                    transport: Any = streamable_http_client(program, http_client=client)
                else:
                    start = StdioServerParameters(command=program, args=arguments, env=self.env)
                    transport = stdio_client(start)
                streams = await stack.enter_async_context(transport)
                self.session = await stack.enter_async_context(ClientSession(*streams[:2]))
                await self.session.initialize()
                self.tools = await self.listed()
                ready.set_result(None)
                await self.stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
        finally:
            self.session = None

    async def listed(self) -> list[dict[str, Any]]:
        """Return the tools on all pages of the server's list."""
        from mcp.types import PaginatedRequestParams

        tools: list[dict[str, Any]] = []
        cursor = None
        while True:
            page = wire(await self.session.list_tools(params=PaginatedRequestParams(cursor=cursor)))
            tools += page["tools"]
            if not (cursor := page.get("nextCursor")):
                return tools

    def close(self) -> None:
        """End the connection, and the program if it was started."""
        self.loop.call_soon_threadsafe(self.stop.set)
        try:
            self.task.result(5.0)
        except Exception:
            self.task.cancel()

    def function(self, tool: Mapping[str, Any]) -> Callable[..., str]:
        """Return a function that calls a tool of the server."""

        def call(**arguments: Any) -> str:
            return self.call(tool["name"], arguments)

        call.in_process = True  # type: ignore[attr-defined]  # the connection belongs to this process
        return with_schema(call, tool["name"], tool.get("description"), tool["inputSchema"])

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its result as text; raise an exception for an error that it reports."""
        if self.session is None:
            raise RolloutError(f"the MCP server {self.name} has ended")
        future = asyncio.run_coroutine_threadsafe(self.session.call_tool(name, dict(arguments)), self.loop)
        try:
            wait((future, self.task), timeout=CALL_SECONDS, return_when=FIRST_COMPLETED)
            if not future.done():
                raise ConnectionError("it has ended" if self.task.done() else "it is too slow")
            result = future.result()
        except Exception as error:
            raise RolloutError(
                f"the MCP server {self.name} did not answer: {type(error).__name__}: {error}"
            ) from error
        finally:
            future.cancel()  # a time limit may have interrupted the wait
        text = text_of(result)
        if wire(result).get("isError"):
            raise ValueError(text)
        return text


def wire(message: Any) -> dict[str, Any]:
    """Return a message of MCP with the names of the protocol, which its library changed in version 2."""
    return dict(message.model_dump(by_alias=True, mode="json"))


def text_of(result: Any) -> str:
    """Return the result of a tool as text."""
    return "\n".join(
        (part.get("resource") or part).get("text", f"[{part['type']}]") for part in wire(result)["content"]
    )


def first_of(error: BaseException) -> BaseException:
    """Return the first exception of a group, in which task groups wrap what went wrong."""
    return first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
