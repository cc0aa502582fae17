"""Tools of an MCP server: any server of the Model Context Protocol becomes an environment with its tools."""

import json
import os
import re
import shlex
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as LateError
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from spmdrl.config.dump import redact_text
from spmdrl.env.base import BrokenError
from spmdrl.env.mcp_connection import Connection, Line, McpError, on_loop, text_of

CONNECT_SECONDS = 30.0
"""Longest that a server may take to speak the protocol and to list its tools."""
AT_ONCE = 4
"""Servers that a process starts side by side; a further one waits, and its `connect` does not run."""
QUEUE_SECONDS = 3600.0
"""Longest wait for a place to start; longer than the start limits of all servers together."""
_starting = threading.BoundedSemaphore(AT_ONCE)
_lines: dict[str, Line] = {}
"""Connections that are shared, by their settings."""


class Mcp:
    """The tools of an MCP server (needs mcp), which is started, or connected to, when an episode begins."""

    def __init__(
        self,
        command: str | Sequence[str] = "",
        url: str = "",
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        only: Sequence[str] = (),
        shared: bool = False,
        timeout: float = 30.0,
        connect: float = CONNECT_SECONDS,
    ) -> None:
        """Take settings; nothing is started.

        Args:
            command: starts a server that speaks over its standard input and output.
            url: of a server that speaks over HTTP instead.
            env: variables of the server's process, beside PATH, HOME and a few more. A value `$NAME` is that of the
                variable NAME of this process, so that no file of settings holds a secret.
            headers: of each request over HTTP, with values as those of `env`.
            only: names of the tools to offer; all without it.
            shared: all episodes of this process use one connection, for servers that keep nothing about a
                conversation.
            timeout: seconds of a call.
            connect: seconds in which the server has to list its tools, from its start. A process starts four
                side by side, and the wait before does not count.

        Raises:
            ValueError: settings that make no sense, or the package mcp is missing.
        """
        words = shlex.split(command) if isinstance(command, str) else list(command)
        if bool(words) == bool(url):
            raise ValueError("MCP tools need either `command`, which starts a server, or `url`, the address of one")
        if url and not re.match(r"https?://[^/]", url):
            raise ValueError(f"MCP tools: `url` is an http address, not {redact_text(url)!r}")
        if not _installed():
            raise ValueError("MCP tools need the package mcp, version 2 or later: pip install 'mcp>=2'")
        self.words, self.url, self.only = words, url, tuple(only)
        self.env, self.headers = _filled(env or {}, "env"), _filled(headers or {}, "headers")
        self.timeout, self.connect = timeout, connect
        # Calls and starts have limits of their own; that of the worker also has to hold the wait before a start.
        self.timeout_s = QUEUE_SECONDS + timeout + connect
        key = json.dumps([words, url, self.env, self.headers, self.only])
        self.shared = shared
        self.line = _lines.setdefault(key, Line()) if shared else Line()

    def reset(self, row: dict, seed: int) -> None:
        """Begin an episode with the prompt of its row, and a connection of its own.

        Raises:
            BrokenError: the server does not start, or speaks no MCP; the message says why.
        """
        self.close()
        self._connected()

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the tools as OpenAI function schemas. Raises what `reset` does."""
        return self._connected().schemas

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool. A server that has ended is started, or connected to, again before the call.

        Raises:
            McpError: the tool failed, or the server ended or did not answer.
            BrokenError: the server ended earlier, and cannot be started again.
        """
        connection = self._connected()
        try:
            failed, text = text_of(on_loop(connection.call(name, arguments), self.timeout))
        except LateError:
            raise McpError(f"the tool did not answer within {self.timeout:g} s") from None
        except Exception as error:
            why = connection.error_text(error)
            raise McpError(f"the MCP server ended during the call: {why}" if connection.ended else why) from None
        if failed:
            raise McpError(connection.without_secrets(text) or "the tool failed")
        return connection.without_secrets(text)

    def close(self) -> None:
        """End a connection that is not shared, and the server where it was started here. May be called twice."""
        if not self.shared:
            with self.line.lock:
                connection, self.line.connection = self.line.connection, None
            if connection is not None:
                on_loop(connection.leave(), None)

    def _connected(self) -> Connection:
        with self.line.lock:
            held = self.line.connection
            if held is not None and not held.ended:
                return held
            connection = Connection(self.words, self.url, self.env, self.headers, self.only)
            try:
                with _starting if self.words else nullcontext():
                    on_loop(connection.enter(), self.connect)
            except Exception as error:
                on_loop(connection.leave(), None)
                late = isinstance(error, LateError)
                slow = f"it did not list its tools within {self.connect:g} s, which its setting `connect` changes"
                why = slow if late else connection.error_text(error)
                if complaints := connection.complaints():
                    why += f" (it said: {complaints})"
                raise BrokenError(f"{connection.name} is no MCP server that can be used: {why}") from None
            self.line.connection = connection
            return connection


def _installed() -> bool:
    try:
        return int(version("mcp").partition(".")[0]) >= 2
    except (PackageNotFoundError, ValueError):
        return False


def _filled(values: Mapping[str, str], setting: str) -> dict[str, str]:
    """Return values with `$NAME` replaced. Raises ValueError that names the variable, not the value."""
    out = {}
    for key, value in values.items():
        if value.startswith("$"):
            if value[1:] not in os.environ:
                raise ValueError(f"MCP tools: `{setting}` names the environment variable {value[1:]}, which is not set")
            value = os.environ[value[1:]]
        out[key] = value
    return out
