"""Small modules under verl's names, so that files written against verl import where verl is not installed.

A file of a tool begins with `from verl.tools.base_tool import BaseTool`; here are the few classes that such files
inherit from or fill in. The signatures are those of verl/tools/base_tool.py, verl/tools/schemas.py and
verl/interactions/base.py in https://github.com/volcengine/verl. An installed verl is always taken instead.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar
from uuid import uuid4

from spmdrl.env.verl_gsm8k import compute_score, extract_solution, gsm8k_interaction, gsm8k_tool

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass
class AgentData:
    """The conversation, as verl hands it to a tool's `execute`; `extra_fields` is the tools' own, for one episode."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    image_data: Any = None
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


def rollout_trace_op(function: Function) -> Function:
    """Return the function: nothing is traced here."""
    return function


class BaseInteraction:
    """A user who answers the policy. One object serves all conversations, told apart by `instance_id`."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a conversation; kwargs are the row's `interaction_kwargs`. Return its id."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Return whether the conversation ends, the user's answer, the turn's score, and anything else."""
        raise NotImplementedError(f"{type(self).__name__} has no generate_response")

    async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:
        """Score the conversation as it stands."""
        return 0.0

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        """End a conversation and forget it."""


def _schemas() -> dict[str, Any]:
    """Make the models of verl.tools.schemas. Unlike verl's they keep every key of a JSON schema."""
    try:
        from pydantic import BaseModel, ConfigDict, Field
    except ImportError as e:
        raise ValueError("tools in verl's form need the package pydantic: pip install pydantic") from e

    class Model(BaseModel):
        model_config = ConfigDict(extra="allow")

    class OpenAIFunctionPropertySchema(Model):
        type: str | list[str] | None = None
        description: str | None = None
        enum: list[Any] | None = None

    class OpenAIFunctionParametersSchema(Model):
        type: str
        properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
        required: list[str] = Field(default_factory=list)

    class OpenAIFunctionSchema(Model):
        name: str
        description: str
        parameters: OpenAIFunctionParametersSchema = Field(
            default_factory=lambda: OpenAIFunctionParametersSchema(type="object")
        )
        strict: bool = False

    class OpenAIFunctionToolSchema(Model):
        type: str
        function: OpenAIFunctionSchema

    class OpenAIFunctionParsedSchema(Model):
        name: str
        arguments: str

    class OpenAIFunctionCallSchema(Model):
        name: str
        arguments: dict[str, Any]

        @staticmethod
        def from_openai_function_parsed_schema(parsed_schema: Any) -> tuple[Any, bool]:
            try:
                arguments = json.loads(parsed_schema.arguments)
            except ValueError:
                arguments = None
            wrong = not isinstance(arguments, dict)
            given = {} if wrong else arguments
            return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments=given), wrong

    class OpenAIFunctionToolCall(Model):
        id: str
        type: str = "function"
        function: OpenAIFunctionCallSchema

    class ToolResponse(BaseModel):
        text: str | None = None
        image: list[Any] | None = None
        video: list[Any] | None = None

        def is_empty(self) -> bool:
            return not (self.text or self.image or self.video)

        def is_text_only(self) -> bool:
            return bool(self.text) and not (self.image or self.video)

    local = locals()
    return {name: kind for name, kind in local.items() if name.startswith("OpenAI") or name == "ToolResponse"}


def _base_tool(schemas: dict[str, Any]) -> type:
    response = schemas["ToolResponse"]

    class BaseTool:
        """A tool. One object serves all conversations, told apart by `instance_id`."""

        def __init__(self, config: dict[str, Any], tool_schema: Any):
            self.config = config
            self.tool_schema = tool_schema or self.get_openai_tool_schema()
            if self.tool_schema is None:
                raise ValueError(f"{type(self).__name__} has no tool_schema, and its get_openai_tool_schema gives none")
            self.name: str = self.tool_schema.function.name

        def get_openai_tool_schema(self) -> Any:
            """Return the schema of the tool, for a YAML that gives none."""
            return getattr(self, "tool_schema", None)

        async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Any]:
            """Begin a conversation. Return its id and a text for the model, if any."""
            return instance_id or str(uuid4()), response()

        async def execute(
            self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
        ) -> tuple[Any, float, dict[str, Any]]:
            """Answer a call. Return the answer, its reward, and metrics."""
            raise NotImplementedError(f"{type(self).__name__} has no execute")

        async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
            """Return the reward of the conversation, at its end."""
            return 0.0

        async def release(self, instance_id: str, **kwargs: Any) -> None:
            """Forget a conversation."""

    return BaseTool


@cache
def _contents() -> dict[str, dict[str, Any]]:
    schemas = _schemas()
    tool = _base_tool(schemas)
    return {
        "verl.tools.schemas": schemas,
        "verl.tools.base_tool": {"BaseTool": tool, **schemas},
        "verl.tools.gsm8k_tool": {"Gsm8kTool": gsm8k_tool(tool, schemas["ToolResponse"])},
        "verl.interactions.base": {"BaseInteraction": BaseInteraction},
        "verl.interactions.gsm8k_interaction": {"Gsm8kInteraction": gsm8k_interaction(BaseInteraction)},
        "verl.utils.reward_score.gsm8k": {"compute_score": compute_score, "extract_solution": extract_solution},
        "verl.utils.rollout_trace": {"rollout_trace_op": rollout_trace_op},
        "verl.experimental.agent_loop.tool_agent_loop": {"AgentData": AgentData},
    }


class _Finder(MetaPathFinder, Loader):
    """Finds the modules where nothing else finds verl: it stands last in `sys.meta_path`."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "verl":
            return None
        if "." in fullname and getattr(sys.modules["verl"].__spec__, "loader", None) is not self:
            return None  # verl is installed
        known = any(f"{name}.".startswith(f"{fullname}.") for name in _contents())
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(_contents().get(module.__name__, {}))


_FINDER = _Finder()


def provide() -> None:
    """Let files import the modules from here on, unless verl is installed. May be called again."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)


def provided() -> list[str]:
    """Return the names of the modules, for messages."""
    return list(_contents())
