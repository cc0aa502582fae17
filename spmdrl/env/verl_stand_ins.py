"""Stand-ins for the verl classes that user files and YAML files name, for machines without verl.

The signatures are those of verl/tools/base_tool.py, verl/tools/schemas.py, verl/interactions/base.py and
verl/utils/reward_score/gsm8k.py in https://github.com/volcengine/verl. Unlike in verl, the schemas keep every key of a
JSON schema. `verl_form.py` lets files import these classes under verl's names.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, create_model

Function = TypeVar("Function", bound=Callable[..., Any])
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"(-?[0-9.,]+)")
_SEARCHED = 300
"""Number of characters at the end of an answer that are searched for a number, as in verl."""


def rollout_trace_op(function: Function) -> Function:
    """Return the function unchanged, without tracing."""
    return function


class _Schema(BaseModel):
    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Schema):
    """Schema of a tool argument."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


_schema = partial(create_model, __base__=_Schema)
_TEXT: tuple[Any, Any] = (str, ...)
OpenAIFunctionParametersSchema: Any = _schema(
    "OpenAIFunctionParametersSchema",
    type=_TEXT,
    properties=(dict[str, OpenAIFunctionPropertySchema], Field(default_factory=dict)),
    required=(list[str], Field(default_factory=list)),
)
OpenAIFunctionSchema: Any = _schema(
    "OpenAIFunctionSchema",
    name=_TEXT,
    description=_TEXT,
    parameters=(OpenAIFunctionParametersSchema, OpenAIFunctionParametersSchema(type="object")),
    strict=(bool, False),
)
OpenAIFunctionToolSchema: Any = _schema("OpenAIFunctionToolSchema", type=_TEXT, function=(OpenAIFunctionSchema, ...))
OpenAIFunctionParsedSchema: Any = _schema("OpenAIFunctionParsedSchema", name=_TEXT, arguments=_TEXT)


class OpenAIFunctionCallSchema(_Schema):
    """A tool call with its arguments."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(parsed_schema: Any) -> tuple["OpenAIFunctionCallSchema", bool]:
        """Return the call, and whether its arguments cannot be read."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except ValueError:
            arguments = None
        wrong = not isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments={} if wrong else arguments), wrong


OpenAIFunctionToolCall = _schema(
    "OpenAIFunctionToolCall", id=_TEXT, type=(str, "function"), function=(OpenAIFunctionCallSchema, ...)
)


class ToolResponse(BaseModel):
    """A tool's response: text, images or videos."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """Return True if there is no text, image or video."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Return True if there is text, but no image and no video."""
        return bool(self.text) and not (self.image or self.video)


class BaseTool:
    """A tool. One object serves all conversations, which `instance_id` distinguishes."""

    def __init__(self, config: dict[str, Any], tool_schema: Any):
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(f"{type(self).__name__} has no tool_schema, and its get_openai_tool_schema returned None")
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """Return the tool's own schema, which is used if the YAML file has none, or None."""
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Any]:
        """Start a conversation, and return its id and a first response."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict]:
        """Run the tool, and return its response, a reward and metrics."""
        raise NotImplementedError(f"{type(self).__name__} has no execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of a conversation."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End a conversation."""
        pass


class BaseInteraction:
    """A user who answers the policy. One object serves all conversations, which `instance_id` distinguishes."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Start a conversation, and return its id."""
        return instance_id or str(uuid4())

    async def generate_response(self, instance_id: str, messages: list, **kwargs: Any) -> tuple[bool, str, float, dict]:
        """Answer the messages. Return whether the conversation ends, the answer, a reward and metrics."""
        raise NotImplementedError(f"{type(self).__name__} has no generate_response")

    async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:
        """Return the score of a conversation."""
        return 0.0

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        """End a conversation."""
        pass


# ── verl's GSM8K examples: they compare the last number of an answer with the row's `ground_truth` ────────────────────


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """Return the last number of an answer as text, or None.

    method: `strict` for the last number after ####, `flexible` for the last number anywhere.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"the method must be strict or flexible, not {method!r}")
    end = solution_str[-_SEARCHED:]
    if method == "strict":
        found = [each.replace(",", "") for each in _STRICT.findall(end)]
    else:
        found = [each for each in _FLEXIBLE.findall(end) if each != "."]
    return found[-1] if found else None


def compute_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return `score` for the right number, `format_score` for another number, and 0 if there is no number."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == ground_truth else format_score


class Gsm8kTool(BaseTool):
    """A tool that scores the answer in its argument `answer`."""

    def __init__(self, config: dict, tool_schema: Any):
        super().__init__(config, tool_schema)
        self._open: dict[str, dict[str, Any]] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, Any]:
        """Start a conversation, and return its id and a first response."""
        if ground_truth is None:
            ground_truth = (kwargs.get("create_kwargs") or {}).get("ground_truth")
        key, response = await super().create(instance_id)
        self._open[key] = {"answer": "", "truth": ground_truth, "best": 0.0}
        return key, response

    async def execute(self, instance_id: str, parameters: dict, **kwargs: Any) -> tuple[Any, float, dict]:
        """Run the tool, and return its response, a reward and metrics."""
        answer, state = str(parameters.get("answer", "")), self._open[instance_id]
        state["answer"] = answer if answer.startswith("#### ") else f"#### {answer}"
        reward = await self.calc_reward(instance_id)
        cost = 0.0 if reward > state["best"] else -0.05
        state["best"] = reward
        return ToolResponse(text=f"The answer {answer} scores {reward:g}."), cost, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of a conversation."""
        state = self._open[instance_id]
        return compute_score(state["answer"], state["truth"], method="flexible")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End a conversation."""
        self._open.pop(instance_id, None)


class Gsm8kInteraction(BaseInteraction):
    """A simulated user who replies whether the assistant's last answer is right."""

    def __init__(self, config: dict):
        super().__init__(config)
        self._open: dict[str, dict[str, Any]] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        """Start a conversation, and return its id."""
        key = await super().start_interaction(instance_id)
        self._open[key] = {"answer": "", "truth": ground_truth}
        return key

    async def generate_response(self, instance_id: str, messages: list, **kwargs: Any) -> tuple[bool, str, float, dict]:
        """Answer the messages. Return whether the conversation ends, the answer, a reward and metrics."""
        answers = [each.get("content") or "" for each in messages if each.get("role") == "assistant"]
        self._open[instance_id]["answer"] = answers[-1] if answers else ""
        reward = await self.calculate_score(instance_id)
        if reward == 1.0:
            return True, "This is correct.", reward, {}
        return False, "This is not correct. Think about it again, and give another answer.", reward, {}

    async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:
        """Return the score of a conversation."""
        return compute_score(self._open[instance_id]["answer"], self._open[instance_id]["truth"])

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        """End a conversation."""
        self._open.pop(instance_id, None)


SCHEMAS = [name for name in globals() if name.startswith("OpenAI") or name == "ToolResponse"]
MODULES: dict[str, list[str]] = {
    "verl.tools.schemas": SCHEMAS,
    "verl.tools.base_tool": ["BaseTool", *SCHEMAS],
    "verl.tools.gsm8k_tool": ["Gsm8kTool"],
    "verl.interactions.base": ["BaseInteraction"],
    "verl.interactions.gsm8k_interaction": ["Gsm8kInteraction"],
    "verl.utils.reward_score.gsm8k": ["compute_score", "extract_solution"],
    "verl.utils.rollout_trace": ["rollout_trace_op"],
}
"""Names of verl's modules, each with the names that files can import from it."""
