"""Tools of a real MCP server, over standard input and output."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import groupwise as gw
from groupwise.errors import ConfigError, RolloutError
from groupwise.rollout.tool_calls import ParsedToolCall
from groupwise.rollout.tool_executor import ToolExecutor
from groupwise.rollout.tools import tool_of
from groupwise.tasks import Task, isolated

pytest.importorskip("mcp", reason="mcp is not installed")

SERVER = '''
import asyncio, os
from typing import Literal
from pydantic import BaseModel
from mcp.server.fastmcp import FastMCP

server = FastMCP("shop")

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

server.run()
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
    assert "no stock" in called(tools, "refuse", reason="no stock").error


def test_a_task_keeps_the_connection_in_its_process(tools):
    task = Task(name="t", examples=[{"q": "a"}], prompt=str, rewards={"r": lambda **_: []}, tools=tools)
    with isolated(task) as moved:
        assert called(moved.tools, "price", items=[]).result == "0 EUR"


def test_a_slow_tool_is_interrupted_and_a_server_that_has_ended_fails_the_rollout(script):
    own = gw.mcp_tools(f"{sys.executable} {script}")
    assert called(own, "sleep", seconds=0.2).error == "sleep took longer than 0.2 s"
    for _ in range(2):
        with pytest.raises(RolloutError, match=r"the MCP server .*server\.py (did not answer|has ended)"):
            called(own, "quit")


def test_a_server_that_does_not_start_is_the_users_mistake(tmp_path):
    with pytest.raises(ConfigError, match="cannot start the MCP server no-such-program"):
        gw.mcp_tools("no-such-program")
    with pytest.raises(ConfigError, match="requires a command"):
        gw.mcp_tools("")
