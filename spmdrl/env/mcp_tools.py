"""Tools of an MCP server: any server of the Model Context Protocol becomes an environment with its tools."""

import json
import os
import re
import shlex
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as LateError
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from spmdrl.config.dump import redact_text
from spmdrl.env.base import BrokenError
from spmdrl.env.mcp_connection import Connection, McpError, on_loop, text_of

QUEUE_SECONDS = 3600.0
"""Longest wait before a start; longer than the start limits of all servers together."""
_starting = threading.BoundedSemaphore(4)
"""Limits the servers that a process starts side by side."""


@dataclass
class Slot:
    """The place of a connection, in which another one may follow it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    connection: Connection | None = None


_shared: dict[str, Slot] = {}
"""Connections of `shared` environments, by their settings."""


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
        connect: float = 30.0,
    ) -> None:
        """Take settings; nothing is started.

        Args:
            command: starts a server on standard input and output.
            url: of a server on HTTP instead.
            env: variables of the server's process, beside PATH, HOME and a few more. A value `$NAME` is that of the
                variable NAME of this process, so that no file of settings holds a secret.
            headers: of each request over HTTP, with values as those of `env`.
            only: names of the tools to offer; all without it.
            shared: all episodes of this process use one connection, for servers that keep nothing about a
                conversation.
            timeout: seconds of a call.
            connect: seconds in which the server has to list its tools, from its start. A process starts four
                side by side, and the wait before does not count.
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
        self.slot = _shared.setdefault(key, Slot()) if shared else Slot()

    def reset(self, row: dict, seed: int) -> None:
        """Begin an episode with the prompt of its row, and a connection of its own.

        Raises:
            BrokenError: the server does not start, or does not follow the protocol; the message gives the reason.
        """
        self.close()
        self._connected()

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the tools as OpenAI function schemas. Raises what `reset` does."""
        return self._connected().schemas

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool, after a server that has ended was started, or connected to, again.

        Raises:
            McpError: the tool failed, or the server ended or did not answer.
            BrokenError: the server cannot be started again.
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
            with self.slot.lock:
                connection, self.slot.connection = self.slot.connection, None
            if connection is not None:
                on_loop(connection.leave(), None)

    def _connected(self) -> Connection:
        with self.slot.lock:
            connection = self.slot.connection
            if connection is not None and not connection.ended:
                return connection
            connection = Connection(self.words, self.url, self.env, self.headers, self.only)
            try:
                with _starting if self.words else nullcontext():
                    on_loop(connection.enter(), self.connect)
            except Exception as error:
                on_loop(connection.leave(), None)
                late = isinstance(error, LateError)
                slow = f"it did not list its tools within {self.connect:g} s, which its setting `connect` changes"
                why = slow if late else connection.error_text(error)
                if errors := connection.last_errors():
                    why += f" (its standard error: {errors})"
                raise BrokenError(f"{connection.name} is no MCP server that can be used: {why}") from None
            self.slot.connection = connection
            return connection


def _installed() -> bool:
    try:
        return int(version("mcp").partition(".")[0]) >= 2
    except (PackageNotFoundError, ValueError):
        return False


def _filled(values: Mapping[str, str], setting: str) -> dict[str, str]:
    """Return values with `$NAME` replaced."""
    names = [value[1:] for value in values.values() if value.startswith("$")]
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(f"MCP tools: `{setting}` names the environment variable {missing[0]}, which is not set")
    return {key: os.environ[value[1:]] if value.startswith("$") else value for key, value in values.items()}
