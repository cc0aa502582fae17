"""Files written against verl's tools and interactions, unchanged, as environments.

The files below are users' files: they import verl's modules, which are not installed here.
"""

import asyncio
import importlib
import json
import os
import signal
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest

from spmdrl.env.answers import Answer
from spmdrl.env.base import AssistantTurn, BrokenError, Call, Opening, PoolSettings, Reply
from spmdrl.env.pool import Pool
from spmdrl.env.verl_form import is_mine, is_verl_yaml, load_yaml, modules, provide, wrap
from spmdrl.env.verl_stand_ins import compute_score, extract_solution

TOOLS = '''
import asyncio
import json
from typing import Any, Optional
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

LOG = []


class Safe(BaseTool):
    """Opens for the right number; keeps its state by instance id, as verl's tools do."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.rooms = {}

    async def create(self, instance_id: Optional[str] = None, code: int = 0, **kwargs) -> tuple[str, ToolResponse]:
        LOG.append(("create", instance_id, code, kwargs))
        self.rooms[instance_id] = {"code": code, "open": False}
        return instance_id, ToolResponse(text=self.config.get("greeting"))

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        agent = kwargs.pop("agent_data")
        LOG.append(("execute", instance_id, parameters, kwargs, [m["role"] for m in agent.messages]))
        agent.extra_fields["tries"] = agent.extra_fields.get("tries", 0) + 1
        room = self.rooms[instance_id]
        room["open"] = room["open"] or parameters["number"] == room["code"]
        text = f"try {agent.extra_fields['tries']}: " + ("open" if room["open"] else "shut")
        return ToolResponse(text=text), self.config["bonus"] if room["open"] else -0.25, {"tried": 1}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        LOG.append(("calc_reward", instance_id, kwargs))
        return 1.0 if self.rooms[instance_id]["open"] else 0.0

    async def release(self, instance_id: str, **kwargs) -> None:
        LOG.append(("release", instance_id, kwargs))
        del self.rooms[instance_id]


class Shy(BaseTool):
    """Tells its id, and takes its time to forget it."""

    open = set()

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        self.open.add(instance_id)
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        assert instance_id in self.open
        return ToolResponse(text=instance_id), 0.0, {}

    async def release(self, instance_id: str, **kwargs) -> None:
        await asyncio.sleep(0.3)
        self.open.remove(instance_id)


class Old(BaseTool):
    """The forms of verl's first releases: create returns an id, execute takes JSON and returns a text."""

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> str:
        return "mine"

    async def execute(self, instance_id: str, parameters: str, **kwargs) -> tuple[str, float, dict]:
        return f"{instance_id} {json.loads(parameters)['word'][::-1]}", 0.5, {}


class Later(BaseTool):
    """Reads create_kwargs as a whole, gives its schema itself, and answers by a dict."""

    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate(
            {"type": "function", "function": {"name": "later", "description": "Waits.", "parameters": {
                "type": "object", "properties": {"all": {"type": "array", "items": {"type": "string"}}}}}}
        )

    async def create(self, instance_id=None, **kwargs):
        self.seen = kwargs["create_kwargs"]["secret"]
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        return {"text": self.seen, "image": ["a.png"], "video": [1, 2]}, None, {}


class Nameless(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return "text alone"


class Broken(BaseTool):
    made = 0

    async def create(self, instance_id=None, **kwargs):
        Broken.made += 1
        raise RuntimeError("no room")


class Odd(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="odd"), float("nan"), {}

    async def calc_reward(self, instance_id, **kwargs):
        return "much"


class NoTool:
    pass
'''

USERS = '''
from verl.interactions.base import BaseInteraction

LOG = []


class TeacherInteraction(BaseInteraction):
    """Says hotter or colder; ends when the truth is said, or after `patience` answers."""

    def __init__(self, config: dict):
        super().__init__(config)
        self.states = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs) -> str:
        LOG.append(("start", self.name, ground_truth, kwargs))
        self.states[instance_id] = {"truth": ground_truth, "said": 0}
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        LOG.append(("respond", [m["role"] for m in messages], kwargs))
        state = self.states[instance_id]
        state["said"] += 1
        state["last"] = messages[-1]["content"]
        score = await self.calculate_score(instance_id)
        done = score == 1.0 or state["said"] >= self.config.get("patience", 10**9)
        return done, "right" if score == 1.0 else "wrong", score, {"said": state["said"]}

    async def calculate_score(self, instance_id, **kwargs) -> float:
        state = self.states[instance_id]
        return float(state["last"] == state["truth"])

    async def finalize_interaction(self, instance_id, **kwargs) -> None:
        LOG.append(("finalize", self.name))
        del self.states[instance_id]


class Bare(BaseInteraction):
    """Relies on verl's own start, and ends without arguments, as verl's base class does."""

    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "done", None, {}

    async def finalize_interaction(self):
        LOG.append(("finalize", self.name))


class Wrong(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return "yes"
'''
SCHEMA = {
    "type": "function",
    "function": {
        "name": "open_safe",
        "description": "Tries a number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "The number."}},
            "required": ["number"],
        },
    },
}


@pytest.fixture(autouse=True)
def users(tmp_path, monkeypatch):
    """Two files of a user's in a folder of its own; what this puts in sys.modules and sys.path goes again."""
    (tmp_path / "safe_tools.py").write_text(TOOLS)
    (tmp_path / "safe_users.py").write_text(USERS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("verl", "safe_tools", "safe_users"):
            del sys.modules[name]


def yaml_of(folder, text: str, name: str = "tools.yaml") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def tool_entry(kind: str, name: str = "", **config) -> dict:
    schema = json.loads(json.dumps(SCHEMA))
    schema["function"]["name"] = name or kind.lower()
    return {"class_name": f"safe_tools.{kind}", "config": {"type": "native", **config}, "tool_schema": schema}


def tools_yaml(folder, *entries: dict, **more) -> str:
    return yaml_of(folder, json.dumps({"tools": list(entries), **more}))  # JSON is YAML


def logs() -> list:
    return sys.modules["safe_tools"].LOG


async def played(env, row: dict, turns: list) -> tuple:
    """Play turns: a text, or a list of (name, arguments) to call side by side. Return the start and all answers."""
    begun, said = await env.reset(row, 7), []
    for turn in turns:
        if isinstance(turn, str):
            message = {"role": "assistant", "content": turn}
        else:
            said.append(await asyncio.gather(*(env.call(name, arguments) for name, arguments in turn)))
            message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": n}} for n, _ in turn]}
        if hasattr(env, "step"):
            said.append(await env.step(message))
    return begun, said


def test_every_hook_of_a_tool_is_called_with_the_rows_keywords(users):
    path = tools_yaml(users, tool_entry("Safe", "open_safe", bonus=0.5))
    assert is_verl_yaml(path) and is_mine(None, path)
    env = load_yaml(path)({})
    assert env.tool_schemas() == [SCHEMA] and not hasattr(env, "step")
    kwargs = {"create_kwargs": {"code": 42}, "execute_kwargs": {"hint": "h"}, "calc_reward_kwargs": {"scale": 1}}
    row = {
        "prompt": [{"role": "user", "content": "Open it."}],
        "extra_info": {
            "need_tools_kwargs": True,
            "tools_kwargs": {"open_safe": {**kwargs, "release_kwargs": {"why": "end"}}},
        },
    }

    async def run():
        begun, said = await played(env, row, [[("open_safe", {"number": 1})], [("open_safe", {"number": 42})]])
        return begun, said, await env.reward(), await env.close()

    begun, said, reward, _ = asyncio.run(run())
    assert begun is None
    assert said == [[Answer("try 1: shut", -0.25)], [Answer("try 2: open", 0.5)]]
    assert reward == {"open_safe": 1.0, "score": 1.0}
    key = logs()[0][1]
    assert logs() == [
        ("create", key, 42, {"create_kwargs": {"code": 42}}),
        ("execute", key, {"number": 1}, {"hint": "h"}, ["user"]),
        ("execute", key, {"number": 42}, {"hint": "h"}, ["user", "tool"]),
        ("calc_reward", key, {"scale": 1}),
        ("release", key, {"why": "end"}),
    ]


def test_a_greeting_of_create_is_a_message_and_empty_columns_of_parquet_are_absent(users):
    env = load_yaml(tools_yaml(users, tool_entry("Safe", bonus=1, greeting="A safe stands here."), tool_entry("Old")))(
        {}
    )
    row = {
        "prompt": "Open it.",
        "extra_info": {
            "tools_kwargs": {"safe": {"create_kwargs": {"code": 5, "other": None}, "execute_kwargs": None}, "old": None}
        },
    }

    async def run():
        return await env.reset(row, 0), await env.reward(), await env.close()

    begun, reward, _ = asyncio.run(run())
    assert begun == [
        {"role": "user", "content": "Open it."},
        {"role": "tool", "name": "safe", "content": "A safe stands here."},
    ]
    assert reward == {"safe": 0.0, "score": 0.0}, "the row names one tool"
    assert logs()[0][2:] == (5, {"create_kwargs": {"code": 5}})


def test_episodes_share_a_tool_and_not_its_state(users):
    make = load_yaml(tools_yaml(users, tool_entry("Safe", bonus=1)))
    rows = [{"extra_info": {"tools_kwargs": {"safe": {"create_kwargs": {"code": code}}}}} for code in range(8)]

    async def one(row: dict, code: int):
        env = make({})
        _, said = await played(env, row, [[("safe", {"number": code})]])
        reward = await env.reward()
        await env.close()
        return said[0][0].reward, reward["score"]

    async def all_of_them():
        return await asyncio.gather(*(one(row, 3) for row in rows))

    assert asyncio.run(all_of_them()) == [(1, 1.0) if code == 3 else (-0.25, 0.0) for code in range(8)]
    made = {entry[1] for entry in logs() if entry[0] == "create"}
    assert len(made) == 8 and {entry[1] for entry in logs() if entry[0] == "release"} == made


@pytest.mark.slow
def test_ids_belong_to_the_episode_and_come_again_with_it(users):
    """A tool that prints its id passes its replay, after a death of its process and in another pool."""
    opening = Opening(tools_yaml(users, tool_entry("Shy")), {"prompt": "go"}, 7)
    said = AssistantTurn("", [Call("shy", {"number": 1})])

    def answers(pool: Pool, count: int) -> dict:
        found: dict = {}
        while len(found) < count:
            found |= pool.poll(1.0)
        assert not any(reply.failure for reply in found.values()), found
        return found

    def texts(pool: Pool, keys: list) -> list[str]:
        for key in keys:
            pool.say(key, said)
        found = answers(pool, len(keys))
        return [found[key].messages[0]["content"] for key in keys]

    first, second = Pool(1), Pool(1)
    try:
        keys = [(0, 0), (0, 1)]
        for key in keys:
            first.open(key, opening)
        answers(first, 2)
        ids = texts(first, keys)
        assert len(set(ids)) == 2, "samples of one seed share the tool"
        os.kill(first._processes.all[0].process.pid, signal.SIGKILL)
        assert texts(first, keys) == ids
        # The same episode is opened while its earlier opening is still released, which takes a while.
        first.close(keys[0])
        first.open(keys[0], opening, [said])
        assert answers(first, 1)[keys[0]].replayed[0][0]["content"] == ids[0]
        assert texts(first, keys) == ids
        second.open(keys[1], opening)
        answers(second, 1)
        assert texts(second, keys[1:]) == ids[1:]
    finally:
        first.shutdown()
        second.shutdown()


def test_the_older_and_the_newer_forms_of_tools(users):
    later = tool_entry("Later")
    del later["tool_schema"]
    path = tools_yaml(users, tool_entry("Old", "old"), later)
    env = load_yaml(path)({})
    row = {"tools_kwargs": {"later": {"create_kwargs": {"secret": "psst"}}}}

    async def run():
        return await played(env, row, [[("old", {"word": "abc"}), ("later", {"all": ["a"]})]])

    _, said = asyncio.run(run())
    shown = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "psst\n(2 videos are not shown)"}]
    assert said == [[Answer("mine cba", 0.5), Answer(shown, None)]]
    assert env.tool_schemas()[1]["function"]["parameters"]["properties"]["all"]["items"] == {"type": "string"}


def test_calls_side_by_side_make_a_tool_once_and_a_failed_one_is_tried_again(users):
    env = load_yaml(tools_yaml(users, tool_entry("Safe", bonus=1), tool_entry("Broken")))({})

    async def run():
        await env.reset({}, 0)
        calls = [env.call("safe", {"number": n}) for n in range(3)] + [env.call("broken", {}) for _ in range(2)]
        said = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(RuntimeError, match="no room"):
            await env.call("broken", {})
        reward = await env.reward()
        await env.close()
        return said, reward

    said, reward = asyncio.run(run())
    assert [each.text for each in said[:3]] == ["try 1: open", "try 2: open", "try 3: open"]
    assert all(isinstance(each, RuntimeError) for each in said[3:])
    assert sum(entry[0] == "create" for entry in logs()) == 1 and sys.modules["safe_tools"].Broken.made == 2
    assert reward == {"safe": 1.0, "score": 1.0}


def test_rewards_can_be_left_to_the_reward_function(users):
    path = tools_yaml(users, tool_entry("Safe", bonus=1))
    row = {"tools_kwargs": {"safe": {"create_kwargs": {"code": 1}}}}
    env = load_yaml(path)({"count_rewards": False})

    async def run():
        _, said = await played(env, row, [[("safe", {"number": 1})]])
        return said, await env.reward()

    assert asyncio.run(run()) == ([[Answer("try 1: open", None)]], {"safe": 1.0, "score": 0.0})


def test_an_interaction_answers_until_it_ends(users):
    interactions = [
        {"name": "teacher", "class_name": "safe_users.TeacherInteraction", "config": {"patience": 3}},
        {"class_name": "safe_users.TeacherInteraction", "config": {}, "name": "endless"},
        {"class_name": "safe_users.Bare"},
    ]
    path = yaml_of(users, json.dumps({"interaction": interactions}))
    make = load_yaml(path)
    row = {"prompt": "2+2?", "extra_info": {"interaction_kwargs": {"name": "teacher", "ground_truth": "4", "no": None}}}

    async def run(row: dict, turns: list[str]):
        env = make({})
        begun, said = await played(env, row, turns)
        reward = await env.reward()
        await env.close()
        return begun, said, reward

    begun, said, reward = asyncio.run(run(row, ["3", "4"]))
    log = sys.modules["safe_users"].LOG
    assert begun is None and reward == {"score": 0.0}
    assert said == [("wrong", 0.0, False), ("right", 1.0, True)]
    kwargs = {"name": "teacher", "ground_truth": "4"}
    assert log == [
        ("start", "teacher", "4", {"name": "teacher"}),
        ("respond", ["user", "assistant"], kwargs),
        ("respond", ["user", "assistant", "user", "assistant"], kwargs),
        ("finalize", "teacher"),
    ]
    assert asyncio.run(run(row, ["1", "2", "3"]))[1][-1] == ("wrong", 0.0, True), "its patience is over"
    row["extra_info"]["interaction_kwargs"]["name"] = "endless"
    said = asyncio.run(run(row, ["1"] * 50))[1]
    assert said == [("wrong", 0.0, False)] * 50, "it never ends by itself: the caller's limits end it"
    row["extra_info"]["interaction_kwargs"]["name"] = "bare"
    assert asyncio.run(run(row, ["1"]))[1] == [("done", None, True)]
    row["extra_info"]["interaction_kwargs"]["name"] = "nobody"
    with pytest.raises(ValueError, match="'nobody' .*; the YAML has teacher, endless, bare"):
        asyncio.run(run(row, ["1"]))
    del row["extra_info"]["interaction_kwargs"]["name"]
    with pytest.raises(ValueError, match="'gsm8k' .*; the YAML has"):
        asyncio.run(run(row, ["1"]))


def test_tools_and_an_interaction_together(users):
    """The interaction hears the calls and their answers in order; a row without interaction_kwargs has tools alone."""
    second = yaml_of(users, "interaction: [{class_name: safe_users.TeacherInteraction, config: {}}]", "users.yaml")
    assert is_verl_yaml(second)
    make = load_yaml(tools_yaml(users, tool_entry("Safe", bonus=1)))
    settings = {"interaction_config_path": "users.yaml"}
    kwargs = {"tools_kwargs": {"safe": {"create_kwargs": {"code": 9}}}}
    turns = [[("safe", {"number": 8}), ("safe", {"number": 9})], "4", "5"]
    row = {"prompt": "Go.", "extra_info": {**kwargs, "interaction_kwargs": {"ground_truth": "5"}}}

    async def run(row: dict, turns: list):
        env = make(settings)
        _, said = await played(env, row, turns)
        return said, await env.reward(), await env.close()

    said, reward, _ = asyncio.run(run(row, turns))
    assert [each.text for each in said[0]] == ["try 1: shut", "try 2: open"]
    assert said[1:] == [(None, None, False), ("wrong", 0.0, False), ("right", 1.0, True)]
    assert reward == {"safe": 1.0, "score": 1.0}
    heard = sys.modules["safe_users"].LOG[1][1]
    assert heard == ["user", "assistant", "tool", "tool", "assistant"]
    said = asyncio.run(run({"prompt": "Go.", "extra_info": kwargs}, ["4"]))[0]
    assert said == [(None, None, True)]


def test_verls_gsm8k_examples_work_without_verl(users):
    text = """
        tools:
          - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
            config: {type: native}
            tool_schema:
              type: "function"
              function:
                name: "calc_gsm8k_reward"
                description: "Scores an answer."
                parameters:
                  type: "object"
                  properties: {answer: {type: "string", description: "Digits."}}
                  required: ["answer"]
        interaction:
          - class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
            config: {}
    """
    env = load_yaml(yaml_of(users, text))({})
    tools_kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}}
    row = {
        "prompt": "?",
        "extra_info": {
            "need_tools_kwargs": True,
            "tools_kwargs": tools_kwargs,
            "interaction_kwargs": {"query": "?", "ground_truth": "72"},
        },
    }
    turns = [[("calc_gsm8k_reward", {"answer": 71})], [("calc_gsm8k_reward", {"answer": "72"})], "It is 72.", "#### 72"]

    async def run():
        _, said = await played(env, row, turns)
        return said, await env.reward(), await env.close()

    said, reward, _ = asyncio.run(run())
    assert [each[0].reward for each in (said[0], said[2])] == [-0.05, 0.0]
    assert [each[1:] for each in said[4:]] == [(0.0, False), (1.0, True)]
    assert reward == {"calc_gsm8k_reward": 1.0, "score": 1.0}


def test_classes_of_users_call_verls_gsm8k_classes_by_position(users):
    provide()
    tools, talks = (f"verl.{name}" for name in ("tools.gsm8k_tool", "interactions.gsm8k_interaction"))
    tool = importlib.import_module(tools).Gsm8kTool({}, SimpleNamespace(function=SimpleNamespace(name="score")))
    talk = importlib.import_module(talks).Gsm8kInteraction({})

    async def run():
        key, _ = await tool.create("a", None, create_kwargs={"ground_truth": "72"})
        other, _ = await tool.create("b", "72")
        scores = [(await tool.execute(each, {"answer": "72"}))[1] for each in (key, other)]
        return scores, await talk.generate_response(
            await talk.start_interaction("c", "72"), [{"role": "assistant", "content": "#### 72"}]
        )

    scores, (done, *_) = asyncio.run(run())
    assert scores == [0.0, 0.0] and done


@pytest.mark.parametrize(
    "text, method, found",
    [
        ("#### 5\n#### 1,200", "strict", "1200"),
        ("#### -3.5", "strict", "-3.5"),
        ("it is 5", "strict", None),
        ("#### 7" + "." * 300, "strict", None),
        ("2 + 2 = 4 . ", "flexible", "4"),
        ("none", "flexible", None),
    ],
)
def test_numbers_of_gsm8k(text, method, found):
    assert extract_solution(text, method) == found


def test_scores_of_gsm8k():
    scores = [compute_score(text, "72", format_score=0.1) for text in ("#### 72", "#### 71", "72", "")]
    assert scores == [1.0, 0.1, 0.0, 0.0]
    with pytest.raises(ValueError, match="strict or flexible"):
        extract_solution("1", "loose")


def test_a_class_alone_is_an_environment(users):
    provide()
    sys.path.append(str(users))
    safe, teacher = (importlib.import_module(name) for name in ("safe_tools", "safe_users"))
    nothing, safe, teacher = safe.NoTool, safe.Safe, teacher.TeacherInteraction
    assert is_mine(safe, "x:Safe") and is_mine(teacher, "x:TeacherInteraction")
    assert not is_mine(nothing, "x:NoTool") and not is_mine(3, "x:y")
    env = wrap(safe, {"config": {"bonus": 2}, "tool_schema": SCHEMA})
    _, said = asyncio.run(played(env, {}, [[("open_safe", {"number": 0})]]))
    assert said == [[Answer("try 1: open", 2)]]
    _, said = asyncio.run(played(wrap(teacher, {}), {"interaction_kwargs": {"ground_truth": "a"}}, ["a"]))
    assert said == [("right", 1.0, True)]


BAD_FILES = {
    "no class": ("tools: [{config: {type: native}}]", r"tools\[0\] has no class_name"),
    "class without module": ("tools: [{class_name: Safe}]", "has no module: give it as package.module.Class"),
    "no such module": ("tools: [{class_name: nowhere_at_all.Safe}]", "cannot import nowhere_at_all"),
    "no such class": ("tools: [{class_name: safe_tools.Nothing}]", "has no class Nothing: change class_name"),
    "not a tool": ("tools: [{class_name: safe_tools.NoTool}]", "NoTool is not a class of tools, as it has no create"),
    "part of verl": (
        "tools: [{class_name: verl.tools.search_tool.SearchTool}]",
        "only these modules of it exist: verl.tools.schemas, ",
    ),
    "no schema": ("tools: [{class_name: safe_tools.Nameless}]", "has no tool_schema"),
    "no name": ("tools: [{class_name: safe_tools.Safe, tool_schema: {type: function, function: {}}}]", "has no name"),
    "no function": ("tools: [{class_name: safe_tools.Safe, tool_schema: {type: function}}]", "has no `function`"),
    "no description": (
        "tools: [{class_name: safe_tools.Safe, tool_schema: {type: function, function: {name: a}}}]",
        "description",
    ),
    "mcp": ("tools: [{class_name: verl.tools.mcp.Tool, config: {type: mcp}}]", "this type is 'mcp'; use an MCP"),
    "config": ("tools: [{class_name: safe_tools.Safe, config: 3}]", "config must be a mapping, not 3"),
    "no list": ("tools: {class_name: safe_tools.Safe}", "must have a list `tools` or a list `interaction`"),
    "not YAML": ("tools: [", "is not valid YAML"),
    "twice": (
        "interaction: [{class_name: safe_users.Bare}, {class_name: safe_users.Bare}]",
        "two interactions are named 'bare'",
    ),
    "no interaction": ("interaction: [{class_name: safe_tools.NoTool}]", "it has no generate_response"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_refused(users, name):
    text, message = BAD_FILES[name]
    with pytest.raises(ValueError, match=message):
        load_yaml(yaml_of(users, text))


def test_other_files_are_refused(users):
    with pytest.raises(ValueError, match="two tools are named 'safe'"):
        load_yaml(tools_yaml(users, tool_entry("Safe"), tool_entry("Safe")))
    with pytest.raises(ValueError, match="cannot read"):
        load_yaml(str(users / "missing.yaml"))
    with pytest.raises(ValueError, match="environments of verl have no setting 'turns'"):
        load_yaml(yaml_of(users, json.dumps({"tools": [tool_entry("Safe")]}), "one.yaml"))({"turns": 3})
    for text in ("- 1", "tools: 3", "other: []"):
        assert not is_verl_yaml(yaml_of(users, text, "other.yaml"))
    assert not is_verl_yaml(str(users / "safe_tools.py")) and not is_verl_yaml(str(users / "missing.yaml"))


def test_values_of_omegaconf_are_filled_in_or_refused(users, monkeypatch):
    text = """
        limit: 4
        interaction: [{class_name: safe_users.TeacherInteraction, config: {patience: "${limit}"}}]
    """
    path = yaml_of(users, text)
    try:
        import omegaconf  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match="pip install omegaconf, or write out the values"):
            load_yaml(path)
    else:
        assert load_yaml(path)({})._parts.interactions["teacher"].config["patience"] == 4


def test_rows_that_are_refused(users):
    env = load_yaml(tools_yaml(users, tool_entry("Safe", bonus=1)))({})
    bad = {
        "'vault'; tools of the YAML: safe": {"tools_kwargs": {"vault": {}}},
        "have 'create'; known keys: create_kwargs": {"tools_kwargs": {"safe": {"create": {}}}},
        "its tools_kwargs are empty": {"need_tools_kwargs": True, "tools_kwargs": {"safe": None}},
    }
    for message, extra in bad.items():
        with pytest.raises(ValueError, match=message):
            asyncio.run(env.reset({"extra_info": extra}, 0))


def test_results_that_are_refused(users):
    path = tools_yaml(
        users, tool_entry("Odd"), tool_entry("Nameless"), interaction=[{"class_name": "safe_users.Wrong"}]
    )
    env = load_yaml(path)({})

    async def run():
        await env.reset({"interaction_kwargs": {"query": "?"}}, 0)
        answer = await env.call("odd", {})
        assert answer.text == "odd" and answer.reward != answer.reward, "the pool refuses rewards that are not finite"
        with pytest.raises(TypeError, match="calc_reward of odd returned 'much'; it must return a number"):
            await env.reward()
        with pytest.raises(BrokenError, match=r"execute of nameless returned str, not \(response, reward, metrics\)"):
            await env.call("nameless", {})
        with pytest.raises(TypeError, match="generate_response of the interaction wrong returned str"):
            await env.step({"role": "assistant", "content": ""})

    asyncio.run(run())


def test_an_installed_verl_is_taken(users):
    """Its modules are its own, and none is added to it."""
    (users / "verl" / "tools").mkdir(parents=True)
    for folder in ("verl", "verl/tools"):
        (users / folder / "__init__.py").touch()
    (users / "verl" / "tools" / "base_tool.py").write_text("BaseTool = 7")
    sys.path.insert(0, str(users))
    importlib.invalidate_caches()
    provide()
    assert importlib.import_module("verl.tools.base_tool").BaseTool == 7
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("verl.tools.schemas")


def test_modules_that_stand_in_for_verls():
    provide()
    provide()
    for name in modules():
        assert importlib.import_module(name).__name__ == name
    assert sum(type(finder).__name__ == "_Finder" for finder in sys.meta_path) == 1
    schemas = importlib.import_module("verl.tools.schemas")
    parsed = schemas.OpenAIFunctionCallSchema.from_openai_function_parsed_schema
    as_parsed = schemas.OpenAIFunctionParsedSchema
    assert parsed(as_parsed(name="a", arguments='{"b": 1}'))[0].arguments == {"b": 1}
    assert [parsed(as_parsed(name="a", arguments=text))[1] for text in ("{}", "[]", "{")] == [False, True, True]
    response = schemas.ToolResponse
    assert response().is_empty() and response(text="a").is_text_only() and not response(image=[1]).is_text_only()
    with pytest.raises(ValueError):
        response(image=1)


def test_verls_files_in_a_pool(users):
    """A YAML and a class, in a process where nothing of verl is imported yet; a reward that is no number fails."""
    path = tools_yaml(users, tool_entry("Safe", bonus=1), tool_entry("Odd"))
    pool = Pool(1, PoolSettings())

    def asked(what: str, *given) -> Reply:
        getattr(pool, what)(*given)
        deadline = time.monotonic() + 60
        while not (found := pool.poll(1.0)):
            assert time.monotonic() < deadline, "the pool does not answer"
        return found[0][1]

    try:
        assert pool.check(path, {}) and pool.check(f"{users}/safe_users.py:TeacherInteraction", {})
        with pytest.raises(ValueError, match="environments of verl have no setting 'turns'"):
            pool.check(path, {"turns": 3})
        row = {"prompt": "Open.", "extra_info": {"tools_kwargs": {"safe": {"create_kwargs": {"code": 3}}}}}
        begun = asked("open", "a", Opening(path, row, 1))
        assert [tool["function"]["name"] for tool in begun.tools] == ["safe", "odd"]
        calls = [Call("safe", {"number": "2"}, "1"), Call("safe", {"number": 3}, "2"), Call("safe", {}, "3")]
        answer = asked("say", "a", AssistantTurn("", calls))
        texts = [message["content"] for message in answer.messages]
        assert texts[:2] == ["try 1: shut", "try 2: open"] and "lacks the argument number" in texts[2]
        assert (answer.reward, answer.done, answer.counts["malformed"]) == (0.75, False, 1)
        assert asked("say", "a", AssistantTurn("It is open.")).done
        score = asked("score", "a")
        assert (score.reward, score.parts) == (1.0, {"safe": 1.0})
        pool.close("a")
        asked("open", "b", Opening(path, row, 1))
        assert "not a finite number" in asked("say", "b", AssistantTurn("", [Call("odd", {"number": 1})])).failure
        pool.close("b")
        users_row = {"prompt": "2+2?", "extra_info": {"interaction_kwargs": {"ground_truth": "4"}}}
        asked("open", "c", Opening(f"{users}/safe_users.py:TeacherInteraction", users_row, 1))
        answer = asked("say", "c", AssistantTurn("3"))
        assert (answer.messages, answer.reward, answer.done) == ([{"role": "user", "content": "wrong"}], 0.0, False)
        assert asked("say", "c", AssistantTurn("4")).done
        pool.close("c")
    finally:
        pool.shutdown()
