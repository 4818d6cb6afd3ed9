"""A tool of an MCP server, here in the same file: `groupwise train mcp_calculator.py --model …`."""

import sys

import groupwise as gw

try:
    from mcp.server import MCPServer
except ImportError:  # mcp 1
    from mcp.server.fastmcp import FastMCP as MCPServer
server = MCPServer("calculator", log_level="WARNING")


@server.tool()
def multiply(a: int, b: int) -> int:
    """Return the product of two whole numbers."""
    return a * b


if "--serve" in sys.argv:
    sys.exit(server.run())
pairs = [(a, b) for a in range(101, 121) for b in range(201, 211)]
rows = [{"prompt": [{"role": "user", "content": f"{a} * {b} = ?"}], "answer": a * b} for a, b in pairs]
tools = gw.mcp_tools(sys.executable, __file__, "--serve")
task = gw.Task(name="product", examples=rows, rewards=gw.rewards.same_number(), tools=tools)
