"""Runs verl's tools and interactions as environments, with the interfaces of its `BaseTool` and `BaseInteraction`
(https://verl.readthedocs.io/en/latest/sglang_multiturn/multiturn.html and interaction_system.html).

A tool lives as long as its episode, as in the older of verl's two rollout loops, which uses all four keys of
`tools_kwargs`. `create` runs at the first call, or at the start if the row names the tool. `execute` runs for each
call. At the end, `calc_reward` runs and then `release`. (verl's agent loop creates and releases a tool around each
call, and never calls `calc_reward`.) `create` gets its keyword arguments both by name and in the dict `create_kwargs`,
since some tools read the names and others the dict. An interaction answers each assistant message that calls no tool.

verl passes tool rewards and interaction scores to the reward function. This module counts each of them as a reward of
the turn that produced it, and the sum of all `calc_reward` results as the final reward. With `count_rewards: false`,
none of these numbers counts as a reward: the final score is 0, and `calc_reward` only supplies parts of the reward.
"""

import asyncio
import inspect
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spmdrl.data.scores import as_number
from spmdrl.env.answers import Answer
from spmdrl.env.base import EPISODE, BrokenError, digest
from spmdrl.env.messages import prompt_of
from spmdrl.env.pictures import open_image

KEYWORDS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
OLD_NAME = "gsm8k"
"""Interaction for rows that name none if the YAML file has several, as in older versions of verl."""

_OPEN: dict[str, asyncio.Event] = {}
"""Events of the episodes that are open in this process, by episode id. Closing an episode sets its event."""
_UNNAMED = itertools.count()
"""Numbers that stand in for the names of unnamed episodes."""


@dataclass
class AgentData:
    """The conversation, as verl passes it to a tool's `execute`. Tools may store their own data in `extra_fields`."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    image_data: Any = None
    """PIL images of the prompt, followed by the images that tools returned; None if there are none."""
    video_data: Any = None
    metrics: dict[str, Any] = field(default_factory=dict)
    request_id: str = ""
    tools_kwargs: dict[str, Any] = field(default_factory=dict)
    interaction: Any = None
    interaction_kwargs: dict[str, Any] = field(default_factory=dict)
    turn_scores: list[float] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)
    user_turns: int = 0
    assistant_turns: int = 0
    extra_fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class Parts:
    """Tools and interactions from YAML files. As in verl, all environments of a process share these objects."""

    tools: dict[str, Any] = field(default_factory=dict)
    """Tools by name, with the interface of verl's BaseTool."""
    interactions: dict[str, Any] = field(default_factory=dict)
    """Interactions by name, with the interface of verl's BaseInteraction."""


class VerlTools:
    """An environment with verl tools. The episode ends with the first message that calls no tool."""

    def __init__(self, parts: Parts, count_rewards: bool = True):
        self._parts, self._counts = parts, count_rewards
        self._kwargs: dict[str, dict[str, dict]] = {}
        self._created: dict[str, asyncio.Task[tuple[str, str | list]]] = {}
        self._agent = AgentData()
        self._id, self._tries = "", itertools.count()
        self._closed: asyncio.Event | None = None

    async def reset(self, row: dict, seed: int) -> list[dict] | None:
        """Create the tools that the row names. Return the messages so far if `create` returned a text, else None.

        row: as in verl, `extra_info` has `tools_kwargs` (tool -> `KEYWORDS` -> values) and `need_tools_kwargs`.

        Raises:
            ValueError: the row names a tool that is not in the YAML file, or its required `tools_kwargs` are missing.
        """
        extra = row.get("extra_info") or {}
        self._kwargs = _tools_kwargs(row.get("tools_kwargs") or extra.get("tools_kwargs") or {}, self._parts.tools)
        if extra.get("need_tools_kwargs") and not self._kwargs:
            raise ValueError("the row's extra_info has need_tools_kwargs, but its tools_kwargs are empty: add them")
        await self._take_id(seed)
        self._agent = AgentData(messages=prompt_of(row), request_id=self._id, tools_kwargs=self._kwargs)
        urls = [each for each in row.get("images") or () if isinstance(each, str) and each.startswith("data:")]
        self._agent.image_data = [open_image(url) for url in urls] or None
        made = await asyncio.gather(*map(self._instance, self._kwargs))
        shown = zip(self._kwargs, made, strict=True)
        answers = [{"role": "tool", "name": name, "content": content} for name, (_, content) in shown if content]
        self._agent.messages += answers
        return list(self._agent.messages) if answers else None

    async def _take_id(self, seed: int) -> None:
        """Set the episode's id, which stays the same when the episode is reopened, since tools may print it.

        The shared tools distinguish episodes by this id, so an earlier opening of the episode must be closed first.
        """
        self._id = digest([seed, EPISODE.get() or next(_UNNAMED)])
        while earlier := _OPEN.get(self._id):
            await earlier.wait()
        self._closed = _OPEN[self._id] = asyncio.Event()

    def tool_schemas(self) -> list[dict]:
        """Return the tools' schemas in OpenAI's format."""
        return [schema_of(tool) for tool in self._parts.tools.values()]

    async def call(self, name: str, arguments: dict) -> Answer:
        """Execute a tool. Return its text and images, and its reward.

        Raises:
            BrokenError: `execute` did not return verl's three values.
            Exception: the tool raised an error; the model gets its text.
        """
        tool, kwargs = self._parts.tools[name], self._of(name, "execute_kwargs")
        key, _ = await self._instance(name)
        more = {"agent_data": self._agent} if _takes(tool.execute, "agent_data") else {}
        result = await _awaited(tool.execute(key, _arguments(tool, arguments), **{**more, **kwargs}))
        if not isinstance(result, tuple) or len(result) != 3:
            raise BrokenError(f"execute of {name} returned {type(result).__name__}, not (response, reward, metrics)")
        content, reward = _content(result[0]), result[1]
        self._agent.messages.append({"role": "tool", "name": name, "content": content})
        if images := [part["image"] for part in content if isinstance(part, dict) and part["type"] == "image"]:
            self._agent.image_data = [*(self._agent.image_data or ()), *images]
        if reward is not None:
            self._agent.tool_rewards.append(reward)
        return Answer(content, reward if self._counts else None)

    async def reward(self) -> dict[str, float]:
        """Return each tool's `calc_reward` by the tool's name, and their sum as `score` (0 without `count_rewards`)."""

        async def of(name: str) -> float:
            key, _ = await self._created[name]
            value = await _awaited(self._parts.tools[name].calc_reward(key, **self._of(name, "calc_reward_kwargs")))
            number = 0.0 if value is None else as_number(value)
            if number is None:
                raise TypeError(f"calc_reward of {name} returned {value!r}; it must return a number")
            return number

        names = [name for name, made in self._created.items() if _succeeded(made)]
        parts = dict(zip(names, await asyncio.gather(*map(of, names)), strict=True))
        return {**parts, "score": sum(parts.values()) if self._counts else 0.0}

    async def close(self) -> None:
        """Release the tools, and finalize the interaction."""
        try:
            await self._release()
        finally:
            if self._closed is not None:
                self._closed.set()
                del _OPEN[self._id]
                self._closed = None

    async def _release(self) -> None:
        made, self._created = self._created, {}
        for name, task in made.items():
            if _succeeded(task):
                await _awaited(self._parts.tools[name].release(task.result()[0], **self._of(name, "release_kwargs")))

    def _of(self, name: str, keyword: str) -> dict:
        return self._kwargs.get(name, {}).get(keyword, {})

    async def _instance(self, name: str) -> tuple[str, str | list]:
        """Return a tool's id in this episode and the content from `create`, which is called again only if it failed."""
        task = self._created.get(name)
        if task is None or (task.done() and not _succeeded(task)):
            task = self._created[name] = asyncio.ensure_future(self._create(name))
        return await asyncio.shield(task)

    async def _create(self, name: str) -> tuple[str, str | list]:
        tool, kwargs = self._parts.tools[name], self._of(name, "create_kwargs")
        own = digest([self._id, name, next(self._tries)])
        more = {"create_kwargs": kwargs} if _takes(tool.create, "create_kwargs") else {}
        result = await _awaited(tool.create(own, **{**more, **kwargs}))
        key, response = result if isinstance(result, tuple) else (result, "")
        return (key if isinstance(key, str) else own), _content(response)


class VerlInteraction(VerlTools):
    """An environment with a verl interaction, and optionally tools."""

    _interaction: Any = None
    _interaction_name = ""
    _instance_id = ""
    _answered = 0
    """Number of messages up to the interaction's last answer. The assistant's next message is inserted at this index,
    before the results of its tool calls."""

    async def reset(self, row: dict, seed: int) -> list[dict] | None:
        """Create the tools, and start the interaction that the row names in `interaction_kwargs` or `extra_info`."""
        begun = await super().reset(row, seed)
        self._answered = len(self._agent.messages)
        extra, known = row.get("extra_info") or {}, self._parts.interactions
        given = _present(row.get("interaction_kwargs") or extra.get("interaction_kwargs") or {})
        if not given and self._parts.tools:
            return begun  # as in verl, the episode has tools but no interaction
        name = given.get("name") or (next(iter(known)) if len(known) == 1 else OLD_NAME)
        if name not in known:
            raise ValueError(
                f"the row needs the interaction {name!r} (interaction_kwargs); the YAML has {', '.join(known)}"
            )
        self._interaction_name, self._interaction = name, known[name]
        self._agent.interaction, self._agent.interaction_kwargs = self._interaction, given
        key = await _awaited(self._interaction.start_interaction(self._id, **given))
        self._instance_id = key if isinstance(key, str) else self._id
        return begun

    async def step(self, message: dict) -> tuple[str | list | None, float | None, bool]:
        """Let the interaction answer a message without tool calls. Return (content, score, whether it is over)."""
        agent = self._agent
        agent.messages.insert(self._answered, message)
        self._answered = len(agent.messages)
        agent.assistant_turns += 1
        agent.user_turns += 1
        if message.get("tool_calls"):
            return None, None, False
        if self._interaction is None:
            return None, None, True
        answer = self._interaction.generate_response(
            self._instance_id, list(agent.messages), **agent.interaction_kwargs
        )
        result = await _awaited(answer)
        if not isinstance(result, tuple) or len(result) != 4:
            raise TypeError(
                f"generate_response of the interaction {self._interaction_name} returned {type(result).__name__}, not "
                "(should_terminate, response, score, other data)"
            )
        done, content, score = bool(result[0]), _content(result[1]), result[2]
        agent.messages.append({"role": "user", "content": content})
        self._answered += 1
        if score is not None:
            agent.turn_scores.append(score)
        return content, score if self._counts else None, done

    async def _release(self) -> None:
        await super()._release()
        interaction, self._interaction = self._interaction, None
        if interaction is not None:
            end = interaction.finalize_interaction
            await _awaited(end(self._instance_id) if _takes(end, "instance_id") else end())


def schema_of(tool: Any) -> dict:
    """Return a tool's schema as a dict. The tool stores it as a dict or as one of verl's pydantic models."""
    schema = tool.tool_schema
    return schema if isinstance(schema, dict) else schema.model_dump(exclude_unset=True, exclude_none=True)


def _tools_kwargs(given: dict, tools: dict[str, Any]) -> dict[str, dict[str, dict]]:
    """Return the keyword arguments of each tool that the row names: tool -> `KEYWORDS` -> values."""
    found = _present(given)
    if unknown := sorted(found.keys() - tools.keys()):
        raise ValueError(f"the row's tools_kwargs name {unknown[0]!r}; tools of the YAML: {', '.join(tools) or 'none'}")
    out = {}
    for name, value in found.items():
        if wrong := sorted(value.keys() - set(KEYWORDS)):
            raise ValueError(f"the row's tools_kwargs of {name} have {wrong[0]!r}; known keys: {', '.join(KEYWORDS)}")
        out[name] = {word: _present(kwargs) for word, kwargs in _present(value).items()}
    return out


def _present(given: dict) -> dict:
    """Return the items that are not None. Parquet gives every row the keys of all rows, and missing values are None."""
    return {key: value for key, value in given.items() if value is not None}


def _content(response: Any) -> str | list:
    """Return the content of an answer, which is verl's ToolResponse, a dict with its keys, or (in old versions) text.

    As in verl, images stand before the text. Videos are left out.
    """
    if response is None or isinstance(response, str):
        return response or ""
    if not isinstance(response, dict):
        if not hasattr(response, "text"):
            return str(response)
        response = {key: getattr(response, key, None) for key in ("text", "image", "video")}
    texts = [response["text"]] if response.get("text") else []
    text = "\n".join([*texts, *([f"({len(response['video'])} videos are not shown)"] if response.get("video") else [])])
    images = response.get("image") or ()
    shown = [{"type": "image", "image": each} for each in (images if isinstance(images, list | tuple) else [images])]
    return [*shown, *([{"type": "text", "text": text}] if text else [])] if shown else text


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _takes(function: Callable[..., Any], keyword: str) -> bool:
    """Return whether a function accepts an argument of this name."""
    parameters = inspect.signature(function).parameters
    return keyword in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _arguments(tool: Any, arguments: dict) -> dict | str:
    """Return a call's arguments, as JSON text if the tool's signature has `parameters: str`."""
    wanted = inspect.signature(tool.execute).parameters.get("parameters")
    return json.dumps(arguments) if wanted is not None and wanted.annotation in (str, "str") else arguments


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
