"""Runs one open environment in a worker process: serves requests one at a time, and reports failures of user code."""

import asyncio
import json
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from spmdrl.config.user_code import error_text, place
from spmdrl.data.scores import as_score
from spmdrl.env.answers import BadRewardError, History, ToolResult, finite, tool_result, valid
from spmdrl.env.arguments import ArgumentsError
from spmdrl.env.base import BrokenError, PoolSettings, digest
from spmdrl.env.forms import functions_of
from spmdrl.env.limits import LateError, Limits, RaisedError
from spmdrl.env.messages import OPENING, FailedError, messages_of, text_of_error, type_name
from spmdrl.env.operations import Tool, by_name, checked_schema, tool_of
from spmdrl.env.pictures import encoded, has_images


class AnewError(Exception):
    """Calls that timed out are still running and may change the environment, so the pool must reopen it."""

    def __init__(self, late: list[int], calls: list[asyncio.Future]):
        """Create the error. late: indices of the timed-out calls. calls: futures of the calls that still run."""
        super().__init__(late)
        self.late, self.calls = late, calls


@dataclass
class _Answer:
    """The answer to one assistant turn, filled in while the turn runs."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    anew: bool = False
    """True if the messages replace the whole conversation."""
    done: bool = False
    late: list[int] = field(default_factory=list)
    """Indices of the calls that timed out."""
    running: list[asyncio.Future] = field(default_factory=list)
    """Futures of timed-out calls that are still running."""
    counts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("calls", "failed_calls", "timeouts", "cut", "malformed", "seconds"), 0)
    )


class EnvInstance:
    """An open environment. `open`, `say` and `score` return `Reply` fields, or raise FailedError after a failure."""

    def __init__(
        self, environment: Any, row: dict[str, Any], settings: PoolSettings, limits: Limits, begins: Callable[..., None]
    ):
        """Wrap a row's environment. begins: called when a function starts (`Limits.run`); each request replaces it."""
        self._environment, self._row, self._settings, self._limits = environment, row, settings, limits
        self.begins = begins
        own = getattr(environment, "timeout_s", None)
        self._seconds, self._wrong = settings.timeout_s, ""
        if isinstance(own, int | float) and 0 < own < math.inf:
            self._seconds = own
        elif own is not None:
            self._wrong = f"has the timeout_s {own!r}: give a number of seconds above 0"
        self._tools: dict[str, Tool] = {}

    # ── requests ─────────────────────────────────────────────────────────────

    def typed_tools(self, opened: bool = False) -> dict[str, Tool]:
        """Return the tools that are typed functions, by name. opened: True after `reset`, which may add tools."""
        if self._wrong:
            raise FailedError(self._wrong)
        if hasattr(self._environment, "tool_schemas"):
            return {}
        try:
            tools = by_name(map(tool_of, functions_of(self._environment)), "it")
        except ValueError as e:
            raise FailedError(f"offers tools that cannot be used: {e}") from None
        may_come = hasattr(self._environment, "tools") and not opened
        if not tools and not may_come and not hasattr(self._environment, "step"):
            why = "so nothing answers the model: write def step(self, message), or tools: public methods with types"
            raise FailedError(f"has neither tools nor step, {why} and a docstring, or a list `tools` of functions")
        return tools

    async def open(self, seed: int, state: Any, turns: list[dict], digests: list[str]) -> dict[str, Any]:
        """Reset the environment, restore `state` unless it is None, and replay `turns`.

        digests: digests of the environment's previous answers to these turns, which the new answers must match.
        """
        self.typed_tools()
        result = await self._own("reset", partial(self._environment.reset, row=self._row, seed=seed))
        if result is None:
            result = self._row.get(OPENING) or self._row.get("prompt")
            if not result:
                raise FailedError("returned None from reset, and the row has no prompt: return messages or a text")
        result = await self._encoded("reset", result)
        messages = messages_of(result, "reset", math.inf, "head")[0]
        if not messages:
            raise FailedError("returned no messages from reset")
        self._tools, key = await self._offered(), await self._key()
        if state is not None:
            if not hasattr(self._environment, "restore"):
                raise FailedError("was saved with a state and has no restore(state)")
            await self._own("restore", partial(self._environment.restore, state))
        replayed, anew = [], []
        for i, turn in enumerate(turns):
            try:
                answer = await self._turn(turn, again=True)
            except AnewError:
                raise FailedError(f"did not answer within its limit when turn {i + 1} was run again") from None
            anew += [i] if answer.anew else []
            if i < len(digests) and digest(answer.messages) != digests[i]:
                raise FailedError(
                    f"returned different messages when turn {i + 1} was run again: an environment that depends on more "
                    "than row and seed needs state() and restore(state)"
                )
            replayed.append(answer.messages)
        tools = [tool.schema for tool in self._tools.values()]
        opened = {"messages": messages, "tools": tools, "replayed": replayed, "replayed_anew": anew}
        return opened | {"state_key": key, **await self._saved()}

    async def say(self, turn: dict) -> dict[str, Any]:
        """Run a turn's calls, then `step`. Raises AnewError if calls timed out and are still running."""
        begin = time.monotonic()
        answer = await self._turn(turn)
        answer.counts["seconds"] = time.monotonic() - begin
        return {
            "messages": answer.messages,
            "anew": answer.anew,
            "reward": math.fsum(answer.rewards) if answer.rewards else None,
            "done": answer.done,
            "state_key": "" if answer.done else await self._key(),
            "counts": answer.counts,
            "late": answer.late,
            "digest": digest(answer.messages),
            **await self._saved(),
        }

    async def score(self) -> dict[str, Any]:
        """Call the environment's `reward`, and return the final reward and its parts."""
        value = None
        if hasattr(self._environment, "reward"):
            value = await self._own("reward", self._environment.reward, self._settings.reward_timeout_s)
        if value is None:
            return {"reward": None, "parts": {}}
        try:
            score, parts = as_score(value)
        except TypeError as e:
            raise FailedError(f"failed in reward: {e}") from None
        if not math.isfinite(score):
            raise FailedError(f"returned the reward {score}, which is not finite")
        return {"reward": score, "parts": parts}

    async def close(self) -> None:
        """Call the environment's `close`, if it has one."""
        if hasattr(self._environment, "close"):
            await self._own("close", self._environment.close)

    # ── one turn ─────────────────────────────────────────────────────────────

    async def _turn(self, turn: dict, again: bool = False) -> _Answer:
        answer, calls = _Answer(), turn["calls"]
        at_once = bool(getattr(self._environment, "parallel_calls", True))

        def begun(i: int, call: dict) -> Coroutine[Any, Any, ToolResult]:
            begins = self.begins if again else partial(self.begins, call=i, alone=not at_once)
            return self._call(i, call, answer, begins)

        if at_once:
            results = await asyncio.gather(*(begun(i, call) for i, call in enumerate(calls)))
        else:
            results = [await begun(i, call) for i, call in enumerate(calls) if not answer.running]
        answer.late.sort()
        if answer.running:
            raise AnewError(answer.late, answer.running)
        for call, result in zip(calls, results, strict=True):
            message = {"role": "tool", "content": result.text, "name": valid(call["name"][:100])}
            if call["id"]:
                message["tool_call_id"] = valid(call["id"][:100])
            answer.messages.append(message)
            answer.counts["cut"] += result.was_cut
            answer.done |= result.done
            if result.reward is not None:
                answer.rewards.append(result.reward)
        answer.counts["calls"] = len(calls)
        if not answer.done:
            if hasattr(self._environment, "step"):
                await self._step(turn["message"] or {"role": "assistant", "content": turn["content"]}, answer)
            else:
                answer.done = not calls
        return answer

    async def _call(self, index: int, call: dict, answer: _Answer, begins: Callable[[str, float], None]) -> ToolResult:
        """Return a call's result. All errors except BrokenError and BadRewardError become text for the model."""
        late = LateError(self._seconds)
        try:
            if call["late"]:
                raise late
            if call["error"] or call["arguments"] is None:
                raise ArgumentsError(call["error"] or "the arguments of this call cannot be read")
            tool = self._tools.get(call["name"])
            if tool is None:
                known = ", ".join(self._tools) or "none"
                raise ArgumentsError(f"there is no tool {call['name'][:100]!r}; the tools are: {known}")
            made = tool.bound(call["arguments"])
            what = f"tool {tool.name}"
            result = await self._limits.run(what, self._seconds, begins, made)
            as_text = partial(tool_result, result, self._settings.longest_answer, self._settings.cut)
            if isinstance(result, str | bytes):
                return as_text()
            # Converting other values to text may run the environment's code (`__str__`), so it has a time limit.
            return await self._limits.run(what, self._seconds, begins, as_text)
        except ArgumentsError as e:
            answer.counts["malformed"] += 1
            return tool_result(str(e), self._settings.longest_answer, self._settings.cut)
        except LateError as e:
            answer.counts["timeouts"] += 1
            answer.late.append(index)
            if e.call is not None:
                answer.running.append(e.call)
            return ToolResult(f"the tool {e}", done=self._settings.on_timeout == "end")
        except RaisedError as e:
            if isinstance(e.error, BrokenError | BadRewardError):
                raise FailedError(f"failed in tool {call['name']}: {e.error}") from None
            answer.counts["failed_calls"] += 1
            return tool_result(text_of_error(e.error), self._settings.longest_answer, self._settings.cut)

    async def _step(self, message: dict, answer: _Answer) -> None:
        result = await self._own("step", partial(self._environment.step, message))
        if not isinstance(result, tuple | list) or len(result) != 3:
            raise FailedError(f"must return (messages, reward, done) from step, and returned {type_name(result)}")
        messages, reward, done = result
        anew = isinstance(messages, History)
        messages = await self._encoded("step", messages.messages if isinstance(messages, History) else messages)
        if anew:
            answer.messages, answer.anew = messages_of(messages, "step", math.inf, "head")[0], True
            if not answer.messages:
                raise FailedError("returned a History without messages from step")
        else:
            limit = self._settings.longest_answer
            made, cuts = messages_of([] if messages is None else messages, "step", limit, self._settings.cut)
            answer.messages += made
            answer.counts["cut"] += cuts
        try:
            number = finite(reward)
        except BadRewardError as e:
            raise FailedError(f"{e}, in step") from None
        if number is not None:
            answer.rewards.append(number)
        answer.done = bool(done)

    # ── functions of the environment that are not tools ──────────────────────

    async def _own(self, what: str, function: Callable[[], Any], seconds: float = 0.0) -> Any:
        """Call a function of the environment that is not a tool. Raises FailedError if it fails or times out."""
        try:
            return await self._limits.run(what, seconds or self._seconds, self.begins, function)
        except LateError as e:
            raise FailedError(f"{e} in {what}") from None
        except RaisedError as e:
            where = "" if isinstance(e.error, BrokenError) else f" ({place(e.error)})"
            raise FailedError(f"failed in {what}: {error_text(e.error)}{where}") from None

    async def _encoded(self, what: str, value: Any) -> Any:
        """Return messages from the environment's function `what` with their images as data URLs (`pictures.py`)."""
        # Encoding takes a while, so it runs in a thread.
        return await self._own(what, partial(encoded, value)) if has_images(value) else value

    async def _offered(self) -> dict[str, Tool]:
        """Return the environment's tools by name."""
        if not hasattr(self._environment, "tool_schemas"):
            return self.typed_tools(opened=True)
        schemas = await self._own("tool_schemas", self._environment.tool_schemas)
        try:
            tools = []
            for schema in schemas or []:
                whole = checked_schema(schema, "it")
                call = partial(self._environment.call, whole["function"]["name"])
                tools.append(Tool(whole, call, by_keyword=False, closed=False))
            return by_name(tools, "it")
        except ValueError as e:
            raise FailedError(f"offers tools that cannot be used: {e}") from None

    async def _key(self) -> str:
        """Return the digest of `state_key()`, or "" if the environment does not define it."""
        if not hasattr(self._environment, "state_key"):
            return ""
        value = await self._own("state_key", self._environment.state_key)
        try:
            return "" if value is None else digest(value)
        except (TypeError, ValueError, RecursionError) as e:
            raise FailedError(f"returned a value from state_key that is not JSON: {error_text(e)}") from None

    async def _saved(self) -> dict[str, Any]:
        """Return `{"state": JSON value}`, `{"unsaved": reason}` if saving failed, or `{}` if there is no `state()`."""
        if not hasattr(self._environment, "state"):
            return {}
        try:
            state = await self._limits.run("state", self._seconds, self.begins, self._environment.state)
            # The reply gets a copy, because the environment's threads may change the state before the reply is sent.
            return {"state": json.loads(json.dumps(state, allow_nan=False))}
        except LateError as e:
            return {"unsaved": f"state {e}"}
        except RaisedError as e:
            return {"unsaved": f"state raised {error_text(e.error)}"}
        except (TypeError, ValueError, RecursionError) as e:
            return {"unsaved": f"state is not a JSON value: {error_text(e)}"}
