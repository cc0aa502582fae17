"""The tools that come with spmdrl, by name."""

from typing import Any

TOOLS = {
    "calculator": "spmdrl.env.calculator:Calculator",
    "python": "spmdrl.env.python_tool:Python",
    "python_session": "spmdrl.env.python_tool:PythonSession",
    "search": "spmdrl.env.search:Search",
    "mcp": "spmdrl.env.mcp_tools:Mcp",
}
"""Classes of environments, of which each is one tool or, of `mcp`, the tools of a server: `builtin:calculator`."""


def mcp_settings(name: str) -> dict[str, Any]:
    """Return the settings that `mcp:URL` or `mcp:COMMAND` stands for.

    Raises:
        ValueError: nothing follows the colon.
    """
    rest = name.partition(":")[2].strip()
    if not rest:
        raise ValueError(f"the environment {name!r} names no MCP server: write mcp:https://... or mcp:COMMAND")
    return {"url" if rest.startswith(("http://", "https://")) else "command": rest}
