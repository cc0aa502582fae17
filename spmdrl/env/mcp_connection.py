"""Connections to MCP servers. All connections of a process share one event loop, which runs in a separate thread.

The protocol: https://modelcontextprotocol.io/specification. The client comes from the official Python SDK, which is
asynchronous.
"""

import asyncio
import atexit
import json
import logging
import os
import shlex
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import TimeoutError as LateError
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from spmdrl.config.dump import LEAST, REDACTED, redact, redact_text
from spmdrl.workers import in_child

SHOWN = 300
"""Messages show at most this many characters of a command or of a server's standard error."""
MOST_PAGES = 100
"""Maximum number of pages to read from a server's tool list."""
T = TypeVar("T")


class McpError(RuntimeError):
    """A tool call failed. The message gives the reason, without secrets."""


class Connection:
    """A connection to an MCP server. The same event-loop task opens and closes the connection."""

    def __init__(self, words: list[str], url: str, env: dict[str, str], headers: dict[str, str], only: tuple[str, ...]):
        """Store the settings. words: the command that starts the server. The other arguments are as in `Mcp`."""
        self.words, self.url, self.env, self.headers, self.only = words, url, env, headers, only
        self.name = redact_text(url) if url else _shown(words)
        self.schemas: list[dict[str, Any]] = []
        self.client: Any = None
        self.ended = False
        self.task: asyncio.Task | None = None
        self.ready, self.over = asyncio.Event(), asyncio.Event()
        self.failure: BaseException | None = None
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115

    async def enter(self) -> None:
        """Connect to the server and list its tools. Raises McpError if a tool in `only` is missing, or an SDK error."""
        # The SDK requires that the same task opens and closes a connection.
        self.task = asyncio.get_running_loop().create_task(self._live())
        _entered.add(self)
        await self.ready.wait()
        if self.failure is not None:
            raise self.failure

    async def _live(self) -> None:
        from mcp import Client

        try:
            async with self._transport() as transport, Client(transport) as client:
                self.client = client
                self.schemas = await self._listed()
                self.ready.set()
                await self.over.wait()
        except BaseException as error:
            self.failure = error
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            _entered.discard(self)
            self.ended = True
            self.ready.set()

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        if self.url:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            limits = httpx2.Timeout(30.0, read=300.0)
            async with httpx2.AsyncClient(headers=self.headers, timeout=limits) as http:
                yield streamable_http_client(self.url, http_client=http)
        else:
            from mcp import StdioServerParameters, stdio_client

            # A server may ignore the end of its input, and runs in a separate process group, so it could survive when
            # this process is killed. `in_child` runs the server so that it dies with this process.
            words = ["-IS", in_child.__file__, str(os.getpid()), *self.words]
            server = StdioServerParameters(command=sys.executable, args=words, env=self.env)
            yield self._watched(stdio_client(server, errlog=self.errors))

    @asynccontextmanager
    async def _watched(self, transport: Any) -> AsyncIterator[Any]:
        """Set `ended` when the server ends, so that the next call opens a new connection."""
        async with transport as (read, write):
            yield Watched(read, self), write

    async def _listed(self) -> list[dict[str, Any]]:
        found: list[Any] = []
        cursor = None
        for _ in range(MOST_PAGES):
            page = await self.client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        names = [tool.name for tool in found]
        if missing := sorted(set(self.only) - set(names)):
            raise McpError(f"it has no tool {missing[0]!r} (`only`); its tools: {', '.join(names) or 'none'}")
        return [schema_of(tool) for tool in found if not self.only or tool.name in self.only]

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool and return its result. Set `ended` if the server has ended.

        Raises McpError if the server does not have the tool, or any exception of the SDK.
        """
        if name not in {schema["function"]["name"] for schema in self.schemas}:
            raise McpError(f"the server has no tool {name!r}")
        from mcp import MCPError

        try:
            return await self.client.call_tool(name, arguments)
        except MCPError:
            # The server sent this error, or the connection is lost. If the server can list its tools, it still works.
            try:
                await asyncio.wait_for(self.client.list_tools(cache_mode="bypass"), 2.0)
            except Exception:
                self.ended = True
            raise
        except Exception:
            self.ended = True
            raise

    async def leave(self) -> None:
        """Close the connection in the background. The server has a few seconds to exit."""
        self.ended = True
        self.over.set()
        if self.task is not None and not self.ready.is_set():
            self.task.cancel()
            self.ready.set()

    def error_text(self, error: BaseException) -> str:
        """Return the text of an error, without secrets."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        text = " ".join(str(error).split()) or type(error).__name__
        return redact_text(self.without_secrets(text))

    def last_errors(self) -> str:
        """Return the end of the server's standard error, without secrets."""
        # The server writes at the file position, which both processes share. `pread` reads without moving the position.
        size = os.fstat(self.errors.fileno()).st_size
        text = os.pread(self.errors.fileno(), 4 * SHOWN, max(0, size - 4 * SHOWN)).decode("utf-8", "replace")
        return redact_text(" ".join(self.without_secrets(text).split()))[-SHOWN:]

    def without_secrets(self, text: str) -> str:
        """Return the text without the values of the server's environment variables and HTTP headers."""
        for value in {*self.env.values(), *self.headers.values()}:
            if len(value) >= LEAST:
                text = text.replace(value, REDACTED)
        return text


class Watched:
    """The SDK's stream of messages from a server. When the stream ends, the connection is marked as ended."""

    def __init__(self, inner: Any, connection: Connection):
        self.inner, self.connection = inner, connection

    def __aiter__(self) -> "Watched":
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.inner.__anext__()
        except StopAsyncIteration:
            self.connection.ended = True
            raise

    async def __aenter__(self) -> "Watched":
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self.inner.__aexit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _shown(words: list[str]) -> str:
    """Return a command as text of bounded length, in which words and options that look like secrets are replaced."""
    shown, before = [], ""
    for word in words:
        option, equals, value = word.partition("=")
        name = option.strip("-").replace("-", ".")
        shown.append(f"{option}={redact(f'mcp.{name}', value)}" if equals else redact(f"mcp.{before}", word))
        before = name
    return redact_text(shlex.join(shown))[:SHOWN]


def schema_of(tool: Any) -> dict[str, Any]:
    """Return an MCP tool as an OpenAI function schema."""
    parameters = tool.input_schema or {"type": "object", "properties": {}}
    about = {"name": tool.name, "description": tool.description or tool.title or "", "parameters": parameters}
    return {"type": "function", "function": about}


def content_of(result: Any, images: bool) -> tuple[bool, str | list[dict[str, Any]]]:
    """Return whether a tool reports failure, and its result as text, or as parts if it shows images.

    images: True to show images; otherwise, and for other blocks without text, a note stands in their place.
    """
    parts, shown = [], images and not result.is_error and any(block.type == "image" for block in result.content)
    for block in result.content:
        inner = getattr(block, "resource", block)
        text = getattr(inner, "text", None)
        kind = getattr(inner, "mime_type", None) or block.type
        if shown and block.type == "image":
            parts.append({"type": "image", "image": f"data:{kind};base64,{block.data}"})
        else:
            parts.append(text if isinstance(text, str) else f"[{kind}, which cannot be shown]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return result.is_error, parts if shown else "\n".join(parts)


_entered: set[Connection] = set()
_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def on_loop(work: Coroutine[Any, Any, T], seconds: float | None) -> T:
    """Run a coroutine on the event loop of this process's connections and return its result.

    After `seconds` the coroutine is cancelled and TimeoutError is raised; None means no limit.
    """
    global _loop
    with _loop_lock:
        if _loop is None:
            # The SDK logs servers' addresses and messages, which may be secret. Errors are still raised as exceptions.
            for name in ("mcp", "httpx2"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, daemon=True, name="mcp").start()
            atexit.register(_end)
    future = asyncio.run_coroutine_threadsafe(work, _loop)
    try:
        return future.result(seconds)
    except LateError:
        future.cancel()
        raise


def _end() -> None:
    """Close all connections when this process exits, and wait up to 8 seconds for the servers to exit."""

    async def leave() -> None:
        entered = list(_entered)
        for connection in entered:
            await connection.leave()
        if tasks := [each.task for each in entered if each.task is not None]:
            await asyncio.wait(tasks, timeout=8.0)

    with suppress(LateError):
        on_loop(leave(), 10.0)
