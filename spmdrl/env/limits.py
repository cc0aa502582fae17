"""Calls user code with a time limit: async functions on the event loop, others in threads."""

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

THREADS = 128
"""Maximum number of plain (not async) functions that run at the same time in a process. Additional calls wait in a
queue, and their time limits start when they leave the queue."""
GONE_WITHIN = 1.0
"""Maximum number of seconds that a call may keep running after its time limit. If it takes longer, its process must
exit, since Python cannot kill a thread."""


class LateError(Exception):
    """A call did not return within its time limit."""

    def __init__(self, seconds: float, call: asyncio.Future | None = None):
        """Create the error. seconds: the limit. call: the call if it may still change its environment, else None."""
        super().__init__(f"did not answer within {seconds:g} s")
        self.call = call


class RaisedError(Exception):
    """A call raised an exception."""

    def __init__(self, error: BaseException):
        """Wrap `error`, the exception that the call raised."""
        super().__init__(repr(error))
        self.error = error


class Limits:
    """Runs calls with time limits, and reports calls that hang."""

    def __init__(self, hangs: Callable[[str], None]):
        """Store a function `hangs`, which gets the name of a call that runs `GONE_WITHIN` seconds beyond its limit."""
        self._hangs = hangs
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="environment")
        self._free = asyncio.Semaphore(THREADS)

    async def run(
        self, what: str, seconds: float, begins: Callable[[str, float], None], function: Callable[[], Any]
    ) -> Any:
        """Call a function and return its result.

        what: name of the function. begins: called when the function starts, with the name and the deadline
        (time.monotonic()).

        Raises:
            LateError: the function did not return within `seconds`. An async function was cancelled and had
                `GONE_WITHIN` seconds to end; a thread continues to run.
            RaisedError: the function raised any exception.
        """
        if inspect.iscoroutinefunction(_innermost(function)):
            end = time.monotonic() + seconds
            begins(what, end)
            return await self._awaited(what, seconds, end, function())
        await self._free.acquire()
        end = time.monotonic() + seconds
        begins(what, end)
        thread = asyncio.wrap_future(self._threads.submit(_outcome, function))
        thread.add_done_callback(lambda _: self._free.release())  # a late function keeps its thread until it returns
        result = await self._within(what, seconds, end, thread)
        if inspect.isawaitable(result):  # the plain function returned a coroutine
            return await self._awaited(what, seconds, end, result)
        return result

    async def _awaited(self, what: str, seconds: float, end: float, result: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(_outcome_of(result))
        return await self._within(what, seconds, end, task)

    async def _within(self, what: str, seconds: float, end: float, work: asyncio.Future) -> Any:
        try:
            await asyncio.wait({work}, timeout=max(0.0, end - time.monotonic()))
        except asyncio.CancelledError:  # the environment was closed while this call was running
            self._stop(what, end, work)
            raise
        if not work.done():
            self._stop(what, end, work)
            if isinstance(work, asyncio.Task):
                await asyncio.wait({work}, timeout=GONE_WITHIN)
                raise LateError(seconds, None if work.done() else work)
            raise LateError(seconds, work)
        if work.cancelled():
            raise RaisedError(asyncio.CancelledError())
        result, error = work.result()
        if error is not None:
            raise RaisedError(error)
        return result

    def _stop(self, what: str, end: float, work: asyncio.Future) -> None:
        def look() -> None:
            if not work.done():
                self._hangs(what)

        if isinstance(work, asyncio.Task):
            work.cancel()
        asyncio.get_running_loop().call_later(max(0.0, end - time.monotonic()) + GONE_WITHIN, look)


def _innermost(function: Callable[[], Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    # An object whose `__call__` is async counts as an async function, too.
    return function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004


def _outcome(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return (result, None) or (None, error).

    Errors are returned because futures cannot hold StopIteration, and SystemExit would end the event loop.
    """
    try:
        return function(), None
    except BaseException as e:
        return None, e


async def _outcome_of(result: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    try:
        return await result, None
    except asyncio.CancelledError:
        raise
    except BaseException as e:
        return None, e
