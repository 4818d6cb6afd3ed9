"""The tools of an MCP server, for `Task(tools=…)`, with their full JSON schemas.

    task = gw.Task(…, tools=gw.mcp_tools("python", "server.py"))           # over standard input and output
    task = gw.Task(…, tools=gw.mcp_tools("http://localhost:8000/mcp"))     # over streamable HTTP

One connection serves all rollouts. An error that a tool reports is read by the policy. If the server itself
has ended, or does not answer, the rollout fails.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from groupwise.errors import ConfigError, RolloutError, requires
from groupwise.rewards.runner import completed
from groupwise.rollout.environment import HeldOpen
from groupwise.rollout.tools import with_schema

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
        raise ConfigError('mcp_tools requires a URL or a command: mcp_tools("python", "server.py")')
    if headers is not None and not is_url(words[0]):
        raise ConfigError("mcp_tools(headers=…) requires a URL; pass env=… to a command instead")
    if env is not None and is_url(words[0]):
        raise ConfigError("mcp_tools(env=…) requires a command; pass headers=… to a URL instead")
    with requires("mcp", "the tools of an MCP server"):
        import mcp.client.streamable_http  # noqa: F401
    connected = McpServer(words, env, headers)
    return [connected.function(tool) for tool in connected.tools]


def is_url(server: str) -> bool:
    return server.startswith(("http://", "https://"))


@asynccontextmanager
async def connection(
    words: list[str], env: dict[str, str] | None, headers: dict[str, str] | None
) -> AsyncIterator[tuple[Any, list[dict[str, Any]]]]:
    """Connect to a URL, or to the program that this starts; yield a session and the server's tools."""
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    async with AsyncExitStack() as stack:
        if is_url(words[0]):
            client = await stack.enter_async_context(create_mcp_http_client(headers=headers))
            transport: Any = streamable_http_client(words[0], http_client=client)
        else:
            transport = stdio_client(StdioServerParameters(command=words[0], args=words[1:], env=env))
        streams = await stack.enter_async_context(transport)
        session = await stack.enter_async_context(ClientSession(*streams[:2]))
        await session.initialize()
        yield session, await listed(session)


async def listed(session: Any) -> list[dict[str, Any]]:
    """Return the tools on all pages of the server's list."""
    from mcp.types import PaginatedRequestParams

    tools: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = wire(await session.list_tools(params=PaginatedRequestParams(cursor=cursor)))
        tools += page["tools"]
        if not (cursor := page.get("nextCursor")):
            return tools


class McpServer:
    """One server, to which a connection is open."""

    def __init__(self, words: list[str], env: dict[str, str] | None, headers: dict[str, str] | None) -> None:
        self.name = shlex.join(words)
        try:
            self.connection = HeldOpen(connection(words, env, headers), seconds=START_SECONDS)
        except Exception as error:
            reason = f"{type(error).__name__}: {first_of(error)}"
            raise ConfigError(f"cannot start the MCP server {self.name}: {reason}") from error
        self.session, self.tools = self.connection.value

    def function(self, tool: Mapping[str, Any]) -> Callable[..., str]:
        """Return a function that calls a tool of the server."""

        def call(**arguments: Any) -> str:
            return self.call(tool["name"], arguments)

        call.in_process = True  # type: ignore[attr-defined]  # the connection belongs to this process
        return with_schema(call, tool["name"], tool.get("description"), tool["inputSchema"])

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its result as text; raise an exception for an error that it reports."""
        try:
            result = self.connection.run(self.session.call_tool(name, arguments), seconds=CALL_SECONDS)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise RolloutError(f"the MCP server {self.name} did not answer: {reason}") from error
        text = text_of(result)
        if wire(result).get("isError"):
            raise ValueError(text)
        return text


def tools_here(server: Any, enter: Callable[[Any], Any]) -> list[Callable[..., Any]]:
    """Return the tools of a server object in this process; `enter` gets the rollout's state before a call."""

    def function(tool: Mapping[str, Any]) -> Callable[..., Any]:
        async def call(state: Any, **arguments: Any) -> str:
            enter(state)
            return text_of(await server.call_tool(tool["name"], arguments))

        about = (tool["name"], tool.get("description"), tool["inputSchema"])
        return with_schema(call, *about, takes_state=True)

    return [function(wire(tool)) for tool in completed(server.list_tools())]


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
