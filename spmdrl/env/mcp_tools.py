"""Makes an environment that offers the tools of a Model Context Protocol (MCP) server."""

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
from spmdrl.env.mcp_connection import Connection, McpError, content_of, on_loop

QUEUE_SECONDS = 3600.0
"""Maximum number of seconds that an episode waits in the queue before its server is started."""
_starting = threading.BoundedSemaphore(4)
"""Limits the number of servers that a process starts at the same time."""


@dataclass
class Slot:
    """Holds the current connection of one environment, or of all environments that share it, and a lock for the slot.

    If the server has ended, the next call replaces the connection.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    connection: Connection | None = None


_shared: dict[str, Slot] = {}
"""The `Slot` of each shared connection. The key is the JSON text of the connection's settings."""


class Mcp:
    """The tools of an MCP server. Each episode starts a server or connects to one, unless `shared` is true. Needs the
    package mcp.
    """

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
        images: bool = False,
    ) -> None:
        """Check and store the settings. No server is started.

        Args:
            command: command that starts a server, which communicates over standard input and output.
            url: URL of an HTTP server, used instead of a command.
            env: environment variables for the server's process, in addition to PATH, HOME and a few others. A value
                `$NAME` is replaced by this process's variable NAME, so that settings files need no secrets.
            headers: headers for each HTTP request. A value `$NAME` is replaced as in `env`.
            only: names of the tools to offer; if empty, all are offered.
            shared: True to share one connection between all episodes of this process. Use it only if the server keeps
                no per-conversation state.
            timeout: time limit per call, in seconds.
            connect: time limit in seconds for a server to start and list its tools. A process starts at most four
                servers at the same time; the time that a server waits for its turn does not count.
            images: True to show the images in results, to a model that reads them; else a note stands in their place.
        """
        words = shlex.split(command) if isinstance(command, str) else list(command)
        if bool(words) == bool(url):
            raise ValueError("MCP tools need either `command`, which starts a server, or `url`, the address of one")
        if url and not re.match(r"https?://[^/]", url):
            raise ValueError(f"MCP tools: `url` must be an http or https address, not {redact_text(url)!r}")
        if not _installed():
            raise ValueError("MCP tools need the package mcp, version 2 or later: pip install 'mcp>=2'")
        self.words, self.url, self.only = words, url, tuple(only)
        self.env, self.headers = _filled(env or {}, "env"), _filled(headers or {}, "headers")
        self.timeout, self.connect, self.images = timeout, connect, images
        # Calls and starts have separate time limits. The worker's limit `timeout_s` also covers the time in the queue.
        self.timeout_s = QUEUE_SECONDS + timeout + connect
        key = json.dumps([words, url, self.env, self.headers, self.only])
        self.shared = shared
        self.slot = _shared.setdefault(key, Slot()) if shared else Slot()

    def reset(self, row: dict, seed: int) -> None:
        """Start an episode with its row's prompt, and connect to the server.

        Raises:
            BrokenError: the server does not start or does not follow the protocol; the message gives the reason.
        """
        self.close()
        self._connected()

    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the tools as OpenAI function schemas. Raises BrokenError, like `reset`."""
        return self._connected().schemas

    def call(self, name: str, arguments: dict[str, Any]) -> str | list[Any]:
        """Call a tool and return its result: text, or a list of texts and images.

        If the connection has ended, a new one is opened before the call.

        Raises:
            McpError: the tool failed, or the server ended or did not answer.
            BrokenError: the server could not be restarted.
        """
        connection = self._connected()
        try:
            failed, content = content_of(on_loop(connection.call(name, arguments), self.timeout), self.images)
        except LateError:
            raise McpError(f"the tool did not answer within {self.timeout:g} s") from None
        except Exception as error:
            why = connection.error_text(error)
            raise McpError(f"the MCP server ended during the call: {why}" if connection.ended else why) from None
        if isinstance(content, list):
            return [connection.without_secrets(each) if isinstance(each, str) else each for each in content]
        text = connection.without_secrets(content)
        if failed:
            raise McpError(text or "the tool failed")
        return text

    def close(self) -> None:
        """Close the connection unless it is shared, and end a server that `command` started. May be called twice."""
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
                slow = f"it did not list its tools within {self.connect:g} s, which the setting `connect` changes"
                why = slow if late else connection.error_text(error)
                if errors := connection.last_errors():
                    why += f" (its standard error: {errors})"
                raise BrokenError(f"cannot use {connection.name} as an MCP server: {why}") from None
            self.slot.connection = connection
            return connection


def _installed() -> bool:
    try:
        return int(version("mcp").partition(".")[0]) >= 2
    except (PackageNotFoundError, ValueError):
        return False


def _filled(values: Mapping[str, str], setting: str) -> dict[str, str]:
    """Return the values with `$NAME` replaced by environment variables."""
    names = [value[1:] for value in values.values() if value.startswith("$")]
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(f"MCP tools: `{setting}` names the environment variable {missing[0]}, which is not set")
    return {key: os.environ[value[1:]] if value.startswith("$") else value for key, value in values.items()}
