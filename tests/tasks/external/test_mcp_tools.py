"""Tools of real MCP servers, over standard input and output and over HTTP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import groupwise as gw
from groupwise.errors import ConfigError, RolloutError
from groupwise.rollout.tool_calls import ParsedToolCall
from groupwise.rollout.tool_executor import ToolExecutor
from groupwise.rollout.tools import tool_of
from groupwise.tasks import Task, isolated
from tests.support.serving import script_server

pytest.importorskip("mcp", reason="mcp is not installed")

SERVER = '''
import asyncio, os, sys
from typing import Literal
from pydantic import BaseModel

try:
    from mcp.server import MCPServer
except ImportError:  # mcp 1
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("shop")

class Item(BaseModel):
    name: str
    count: int = 1

@server.tool()
def price(items: list[Item], currency: Literal["EUR", "USD"] = "EUR") -> str:
    """Return the price of a basket."""
    return f"{sum(len(item.name) * item.count for item in items)} {currency}"

@server.tool()
def refuse(reason: str) -> str:
    """Refuse."""
    raise ValueError(reason)

@server.tool()
async def sleep() -> str:
    """Sleep."""
    await asyncio.sleep(30)
    return "awake"

@server.tool()
def quit() -> str:
    """End the server."""
    os._exit(1)

if len(sys.argv) == 1:
    server.run()
else:
    import uvicorn
    uvicorn.run(server.streamable_http_app(), port=int(sys.argv[1]), log_level="error")
'''

PAGES = '''
"""A server that lists its tools on two pages, in plain JSON-RPC."""
import json, sys

schema = {"type": "object", "properties": {}}
results = {
    "empty": [{"type": "text", "text": ""}],
    "file": [{"type": "resource", "resource": {"uri": "file:///a", "text": "its text"}}],
    "picture": [{"type": "image", "data": "aGk=", "mimeType": "image/png"}],
}

def answer(method, params):
    if method == "initialize":
        about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "pages", "version": "1"}}
        return {"protocolVersion": params["protocolVersion"], **about}
    if method == "tools/list":
        names = ["file", "picture"] if params.get("cursor") == "2" else ["empty"]
        page = {"tools": [{"name": name, "inputSchema": schema} for name in names]}
        return page if params.get("cursor") else page | {"nextCursor": "2"}
    if method == "tools/call":
        return {"content": results[params["name"]]}

for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = answer(asked["method"], asked.get("params") or {})
        reply = {"result": result} if result else {"error": {"code": -32601, "message": "unknown"}}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **reply}), flush=True)
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return path


@pytest.fixture(scope="module")
def tools(script) -> list[Any]:
    return gw.mcp_tools(sys.executable, str(script))


def called(tools: Any, name: str, seconds: float = 20.0, **arguments: Any) -> Any:
    box = ToolExecutor.of(tools, seconds=seconds, characters=100)
    (call,) = box.answer([ParsedToolCall(name, arguments)], allowed=1)
    return call


def test_the_policy_sees_the_whole_schema_of_the_server(tools):
    assert [tool_of(tool).name for tool in tools] == ["price", "refuse", "sleep", "quit"]
    function = tool_of(tools[0]).schema["function"]
    assert function["description"] == "Return the price of a basket."
    parameters = function["parameters"]
    assert parameters["properties"]["currency"]["enum"] == ["EUR", "USD"]
    assert parameters["$defs"]["Item"]["properties"]["count"] == {
        "default": 1,
        "title": "Count",
        "type": "integer",
    }


def test_calls_are_answered_and_arguments_are_checked_against_the_schema(tools):
    basket = [{"name": "tea", "count": 2}, {"name": "milk"}]
    assert called(tools, "price", items=basket, currency="USD").result == "10 USD"
    assert "'GBP' is not one of ['EUR', 'USD']" in called(tools, "price", items=[], currency="GBP").error
    assert "items[0] 'name' is a required property" in called(tools, "price", items=[{"count": 1}]).error
    assert "Error executing tool refuse" in called(tools, "refuse", reason="no stock").error


def test_a_task_keeps_the_connection_in_its_process(tools):
    task = Task(name="t", examples=[{"q": "a"}], prompt=str, rewards={"r": lambda **_: []}, tools=tools)
    with isolated(task) as moved:
        assert called(moved.tools, "price", items=[]).result == "0 EUR"


def test_a_slow_tool_is_interrupted_and_a_server_that_has_ended_fails_the_rollout(script):
    own = gw.mcp_tools(f"{sys.executable} {script}")
    assert called(own, "sleep", seconds=0.2).error == "sleep took longer than 0.2 s"
    for _ in range(2):
        with pytest.raises(RolloutError, match=r"the MCP server .*server\.py did not answer"):
            called(own, "quit")


def test_all_pages_of_the_list_are_read_and_every_kind_of_result_is_text(tmp_path):
    (tmp_path / "pages.py").write_text(PAGES)
    tools = gw.mcp_tools(sys.executable, str(tmp_path / "pages.py"))
    assert [tool_of(tool).name for tool in tools] == ["empty", "file", "picture"]
    assert [called(tools, name).result for name in ("empty", "file", "picture")] == [
        "",
        "its text",
        "[image]",
    ]


@pytest.fixture
def served(script) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with script_server(script) as (port, server):
        yield f"http://127.0.0.1:{port}/mcp", server


def test_a_server_is_called_over_http_and_fails_the_rollout_when_it_has_ended(served):
    url, server = served
    tools = gw.mcp_tools(url, headers={"Authorization": "Bearer key"})
    assert called(tools, "price", items=[{"name": "tea", "count": 2}]).result == "6 EUR"
    assert "Error executing tool refuse" in called(tools, "refuse", reason="no stock").error
    assert called(tools, "sleep", seconds=0.2).error == "sleep took longer than 0.2 s"
    server.kill()
    server.wait()
    with pytest.raises(RolloutError, match=r"the MCP server http://.* did not answer"):
        called(tools, "price", items=[])


def test_a_server_that_does_not_start_is_the_users_mistake(tmp_path):
    with pytest.raises(ConfigError, match="cannot start the MCP server no-such-program"):
        gw.mcp_tools("no-such-program")
    with pytest.raises(ConfigError, match="cannot start the MCP server http://127"):
        gw.mcp_tools("http://127.0.0.1:9/mcp")
    with pytest.raises(ConfigError, match="requires a URL or a command"):
        gw.mcp_tools("")


def test_a_setting_that_the_server_cannot_use_is_refused():
    with pytest.raises(ConfigError, match=r"headers=….* requires a URL"):
        gw.mcp_tools("python", "server.py", headers={"Authorization": "Bearer key"})
    with pytest.raises(ConfigError, match=r"env=….* requires a command"):
        gw.mcp_tools("http://127.0.0.1:9/mcp", env={"KEY": "value"})
