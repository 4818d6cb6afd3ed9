"""The tools of an MCP server, for `Task(tools=…)`: full JSON schemas, over standard input and output.

    task = gw.Task(…, tools=gw.mcp_tools("python", "server.py"))

The server is started once and serves all rollouts. An error that a tool reports is read by the policy. If the
server itself has ended, or does not answer, the rollout fails.
"""

from __future__ import annotations

import asyncio
import atexit
import shlex
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from groupwise.errors import ConfigError, RolloutError
from groupwise.rollout.environment import event_loop_here
from groupwise.rollout.tools import with_schema

START_SECONDS = 60.0
CALL_SECONDS = 600.0
"""Limit of a call that `tools.seconds` does not interrupt, in a thread."""


def mcp_tools(*command: str, env: Mapping[str, str] | None = None) -> list[Callable[..., str]]:
    """Start an MCP server and return its tools.

    command: the program and its arguments, or one string with both
    env: environment variables of the server; by default those that the MCP library considers safe
    """
    words = shlex.split(command[0]) if len(command) == 1 else list(command)
    if not words:
        raise ConfigError('mcp_tools requires a command, for example mcp_tools("python", "server.py")')
    server = McpServer(words, env)
    return [server.function(tool) for tool in server.tools]


class McpServer:
    """A connection to one server, on the event loop of this process."""

    def __init__(self, words: list[str], env: Mapping[str, str] | None) -> None:
        try:
            from mcp import ClientSession, StdioServerParameters
            from mcp.client.stdio import stdio_client
        except ImportError:
            raise ConfigError("mcp_tools requires mcp: pip install 'groupwise[mcp]'") from None
        self.words = words
        self.session: Any = None
        self.tools: list[Any] = []
        parameters = StdioServerParameters(
            command=words[0], args=words[1:], env=None if env is None else dict(env)
        )
        self.loop = event_loop_here()
        ready: Future[None] = Future()

        async def run() -> None:
            """Hold the connection open: it must be opened and closed by the same task."""
            self.stop = asyncio.Event()
            try:
                async with stdio_client(parameters) as streams, ClientSession(*streams) as session:
                    await session.initialize()
                    self.session = session
                    self.tools = (await session.list_tools()).tools
                    ready.set_result(None)
                    await self.stop.wait()
            except BaseException as error:
                if not ready.done():
                    ready.set_exception(error)
            finally:
                self.session = None

        self.task = asyncio.run_coroutine_threadsafe(run(), self.loop)
        try:
            ready.result(START_SECONDS)
        except Exception as error:
            self.task.cancel()
            reason = f"{type(error).__name__}: {first_of(error)}"
            raise ConfigError(f"cannot start the MCP server {shlex.join(words)}: {reason}") from error
        atexit.register(self.close)

    def close(self) -> None:
        """End the server."""
        self.loop.call_soon_threadsafe(self.stop.set)
        try:
            self.task.result(5.0)
        except Exception:
            self.task.cancel()

    def function(self, tool: Any) -> Callable[..., str]:
        """Return a function that calls a tool of the server."""

        def call(**arguments: Any) -> str:
            return self.call(tool.name, arguments)

        call.in_process = True  # type: ignore[attr-defined]  # the connection belongs to this process
        return with_schema(call, tool.name, tool.description, tool.inputSchema)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its result as text; raise an exception for an error that it reports."""
        if self.session is None:
            raise RolloutError(f"the MCP server {shlex.join(self.words)} has ended")
        future = asyncio.run_coroutine_threadsafe(self.session.call_tool(name, dict(arguments)), self.loop)
        try:
            result = future.result(CALL_SECONDS)
        except Exception as error:
            raise RolloutError(
                f"the MCP server {shlex.join(self.words)} did not answer: {type(error).__name__}: {error}"
            ) from error
        finally:
            future.cancel()  # a time limit may have interrupted the wait
        text = text_of(result)
        if result.isError:
            raise ValueError(text)
        return text


def text_of(result: Any) -> str:
    """Return the result of a tool as text."""
    return "\n".join(getattr(part, "text", None) or f"[{part.type}]" for part in result.content)


def first_of(error: BaseException) -> BaseException:
    """Return the first exception of a group, in which task groups wrap what went wrong."""
    return first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
