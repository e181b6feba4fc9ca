"""A server of the Model Context Protocol with one tool, for the probes of clients that know it."""

from typing import Literal

from mcp.server.mcpserver import MCPServer

prices = MCPServer("prices")


@prices.tool()
def price(wood: Literal["oak", "ash"]) -> str:
    """What a board costs."""
    return f"three for {wood}"


prices.run("stdio")
