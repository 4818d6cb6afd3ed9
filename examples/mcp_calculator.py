"""A tool of an MCP server, here in the same file: `groupwise train mcp_calculator.py --model …`."""

import sys

from mcp.server.fastmcp import FastMCP

import groupwise as gw

server = FastMCP("calculator", log_level="WARNING")


@server.tool()
def multiply(a: int, b: int) -> int:
    """Return the product of two whole numbers."""
    return a * b


if "--serve" in sys.argv:
    server.run()
else:
    pairs = [(a, b) for a in range(101, 121) for b in range(201, 211)]
    rows = [{"chat": [{"role": "user", "content": f"{a} * {b} = ?"}], "answer": a * b} for a, b in pairs]
    tools = gw.mcp_tools(sys.executable, __file__, "--serve")
    right = gw.rewards.same_number()
    task = gw.Task(name="product", examples=rows, prompt=lambda row: row["chat"], rewards=right, tools=tools)
