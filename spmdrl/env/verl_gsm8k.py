"""The tool and the interaction of verl's GSM8K examples, so that their YAML files work where verl is not installed.

Both compare the last number of an answer with the row's `ground_truth`, as verl/utils/reward_score/gsm8k.py in
https://github.com/volcengine/verl does: `strict` wants it after `####`, `flexible` takes any.
"""

import re
from typing import Any
from uuid import uuid4

STRICT = re.compile(r"#### (-?[0-9.,]+)")
FLEXIBLE = re.compile(r"(-?[0-9.,]+)")
LAST = 300
"""Characters at the end of an answer that are searched."""


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """Return the last number of an answer as text, or None. method: strict or flexible."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"the method is strict or flexible, not {method!r}")
    end = solution_str[-LAST:]
    if method == "strict":
        found = [each.replace(",", "") for each in STRICT.findall(end)]
    else:
        found = [each for each in FLEXIBLE.findall(end) if each != "."]
    return found[-1] if found else None


def compute_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return `score` for the truth, `format_score` for another number, 0 for none."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == ground_truth else format_score


def gsm8k_tool(base: type, response: type) -> type:
    """Make verl's Gsm8kTool over its BaseTool: the policy hands in an answer and is told its score."""

    class Gsm8kTool(base):
        def __init__(self, config: dict, tool_schema: Any):
            super().__init__(config, tool_schema)
            self._open: dict[str, dict[str, Any]] = {}

        async def create(
            self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
        ) -> tuple[str, Any]:
            if ground_truth is None:
                ground_truth = (kwargs.get("create_kwargs") or {}).get("ground_truth")
            key = instance_id or str(uuid4())
            self._open[key] = {"answer": "", "truth": ground_truth, "best": 0.0}
            return key, response()

        async def execute(self, instance_id: str, parameters: dict, **kwargs: Any) -> tuple[Any, float, dict]:
            answer, state = str(parameters.get("answer", "")), self._open[instance_id]
            state["answer"] = answer if answer.startswith("#### ") else f"#### {answer}"
            reward = await self.calc_reward(instance_id)
            cost = 0.0 if reward > state["best"] else -0.05
            state["best"] = reward
            return response(text=f"The answer {answer} scores {reward:g}."), cost, {}

        async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
            state = self._open[instance_id]
            return compute_score(state["answer"], state["truth"], method="flexible")

        async def release(self, instance_id: str, **kwargs: Any) -> None:
            self._open.pop(instance_id, None)

    return Gsm8kTool


def gsm8k_interaction(base: type) -> type:
    """Make verl's Gsm8kInteraction over its BaseInteraction: a user who says whether the answer is right."""

    class Gsm8kInteraction(base):
        def __init__(self, config: dict):
            super().__init__(config)
            self._open: dict[str, dict[str, Any]] = {}

        async def start_interaction(
            self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
        ) -> str:
            key = instance_id or str(uuid4())
            self._open[key] = {"answer": "", "truth": ground_truth}
            return key

        async def generate_response(
            self, instance_id: str, messages: list[dict], **kwargs: Any
        ) -> tuple[bool, str, float, dict]:
            said = [each.get("content") or "" for each in messages if each.get("role") == "assistant"]
            self._open[instance_id]["answer"] = said[-1] if said else ""
            reward = await self.calculate_score(instance_id)
            if reward == 1.0:
                return True, "This is correct.", reward, {}
            return False, "This is not correct. Think about it again, and give another answer.", reward, {}

        async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:
            return compute_score(self._open[instance_id]["answer"], self._open[instance_id]["truth"])

        async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
            self._open.pop(instance_id, None)

    return Gsm8kInteraction
