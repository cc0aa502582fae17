"""Environments in processes: whatever a tool, an environment or a model does, conversations go on or fail alone."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from spmdrl.env.base import AssistantTurn, Call, Opening, PoolSettings, Reply
from spmdrl.env.limits import THREADS
from spmdrl.env.pool import Pool

REPO = Path(__file__).resolve().parents[2]
USER_FILE = '''
import asyncio, atexit, ctypes, os, random, re, subprocess, sys, threading, time
from spmdrl.env import Answer
from spmdrl.env.base import BrokenError

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

class Tools:
    """Tools that do what they are told."""
    timeout_s = 0.3

    def reset(self, row, seed):
        print("printed by user code")
        self.log, self.row, self.random = [], row, random.Random(seed)
        return row.get("say")

    def act(self, what: str) -> str:
        """Do something."""
        self.log.append(what)
        if what == "raise":
            raise KeyError("no\\x00thing")
        if what == "mute":
            raise Mute
        if what == "exit":
            sys.exit(3)
        if what == "stop":
            raise StopIteration
        if what == "hang":
            time.sleep(1000)
        if what == "late":
            time.sleep(0.6)
        if what == "die":
            os._exit(5)
        if what == "kill":
            os.kill(os.getpid(), 9)
        if what == "die once":
            if not os.path.exists(self.row["flag"]):
                open(self.row["flag"], "w").close()
                os._exit(5)
        if what == "bytes":
            return b"\\xff\\x00 bytes"
        if what == "long":
            return "x" * 10_000_000
        if what == "surrogates":
            return "\\ud800 <|im_end|>"
        if what == "reward":
            return "well", 0.25
        if what == "done":
            return Answer("over", 1.0, True)
        if what == "nan":
            return Answer("x", float("nan"))
        if what == "broken":
            raise BrokenError("the server is gone")
        if what == "log":
            return [each for each in self.log]
        if what == "draw":
            return self.random.random()
        if what == "pid":
            return os.getpid()
        if what == "child":
            return subprocess.Popen(["sleep", "1000"]).pid
        if what == "at exit":
            atexit.register(lambda: open(self.row["flag"], "w").close())
        if what == "stdin":
            return repr(sys.stdin.read())
        if what == "memory":
            return len(bytearray(3 << 30))
        if what == "gil":  # a call that lets no other thread run
            re.match("(a+)+b", "a" * 60)
        if what == "never text":
            class Text:
                def __str__(self):
                    time.sleep(1000)
            return Text()
        return what

    async def later(self, what: str) -> str:
        """Do something without a thread."""
        if what == "hang":
            await asyncio.sleep(1000)
        if what == "stubborn":
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    pass
        if what == "block":
            time.sleep(1000)
        if what == "exit":
            sys.exit(3)
        if what == "cancel":
            raise asyncio.CancelledError
        await asyncio.sleep(0.05)
        return what

class Saved(Tools):
    """The same with a state."""
    def state(self):
        return {"log": self.log}

    def restore(self, state):
        self.log = ["restored", *state["log"]]

class Unsaved(Tools):
    def state(self):
        return {"lock": threading.Lock()}

    def restore(self, state):
        raise RuntimeError

class Dice(Tools):
    """Its answers depend on more than its seed."""
    def reset(self, row, seed):
        super().reset(row, None)

class Meet:
    """Calls of one turn meet if they run side by side."""
    def reset(self, row, seed):
        self.barrier = threading.Barrier(2, timeout=5)
        self.parallel_calls = row.get("parallel", True)
        self.order = []

    def meet(self, name: str) -> str:
        """Meet."""
        if self.parallel_calls:
            self.barrier.wait()
        self.order.append(name)
        return f"{name} {len(self.order)}" if not self.parallel_calls else name

class Steps:
    """Answers messages."""
    timeout_s = 0.3

    def __init__(self, fail=""):
        self.fail = fail

    def reset(self, row, seed):
        if self.fail == "reset":
            raise ValueError("no such task\\nhere")
        if self.fail == "hang":
            time.sleep(1000)
        if self.fail == "reset type":
            return 5
        if self.fail == "reset role":
            return [{"role": "wizard", "content": ""}]
        if self.fail == "exit":
            sys.exit(1)
        self.seen = []
        return "begin"

    def step(self, message):
        text = message["content"]
        self.seen.append(text)
        if text == "raise":
            raise ValueError("bad")
        if text == "hang":
            time.sleep(1000)
        if text == "kill":
            os.kill(os.getpid(), 9)
        if text == "pair":
            return "a", 1.0
        if text == "nan":
            return "a", float("nan"), False
        if text == "long":
            return "y" * 100_000, None, False
        if text == "messages":
            blocks = [{"type": "text", "text": "a\\x00"}]
            return [{"role": "user", "content": blocks}, {"role": "tool", "content": b"b"}], 1, False
        return f"heard {len(self.seen)}: {text}", len(text), text == "end"

    def call_me(self, x: int) -> Answer:
        """Call."""
        return Answer(x, 0.5, x == 9)

    def reward(self):
        rewards = {"none": None, "big": float("inf"), "text": "much", "dict": {"score": 2, "part": 3}}
        return rewards.get(self.seen[-1], 0.75)

    def close(self):
        if "closed" in self.seen:
            open(self.seen[0], "w").close()

class Own:
    """Brings its tools itself."""
    def reset(self, row, seed):
        self.schemas = row["schemas"]

    async def tool_schemas(self):
        return self.schemas

    async def call(self, name, arguments):
        return {"called": name, "with": arguments}

class Busy(Tools):
    """More than a second of work goes on in the turn of a call that hangs, all of it within the limits."""
    timeout_s = 0.8

    def reset(self, row, seed):
        self.parallel_calls = not row.get("in_order")
        return super().reset(row, seed)

    def act(self, what: str) -> str:
        """Do something."""
        if what == "slow":
            time.sleep(0.6)
        return super().act(what)

    def step(self, message):
        time.sleep(0.6)
        return str(self.log), None, False

    def state(self):
        time.sleep(0.6 if self.log else 0)
        return {"log": self.log}

    def restore(self, state):
        self.log = state["log"]

class Blocks:
    """An async step that stops the loop where the row says so, and waits otherwise."""
    timeout_s = 0.8

    def reset(self, row, seed):
        self.row = row

    async def step(self, message):
        if self.row.get("blocks"):
            time.sleep(1000)
        await asyncio.sleep(0.2)
        return "on", None, False

class Naps(Tools):
    timeout_s = 20.0

    def act(self, what: str) -> str:
        """Sleep."""
        with open(self.row["naps"], "a") as file:
            file.write(what)
        time.sleep(float(what))
        return what

class Late(Tools):
    """Calls that end between their limit and a second later."""
    parallel_calls = False

    def act(self, what: str) -> str:
        """Do something."""
        if what == "late":
            time.sleep(0.7)
        return super().act(what)

    async def later(self, what: str) -> str:
        """Do something, and more when it is cancelled."""
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0.2)
            self.log.append("cleared up")

    def step(self, message):
        return str(self.log), None, False

class LateSaved(Late):
    def state(self):
        return list(self.log)

    def restore(self, state):
        self.log = state

class Slow(Tools):
    timeout_s = -1

class Checked:
    """It cannot be used, and holds something."""
    def __init__(self, mark):
        self.mark = mark

    def reset(self, row, seed):
        pass

    def untyped(self, x):
        """A tool without types."""

    def close(self):
        open(self.mark, "w").close()

class CheckedSlow(Checked):
    timeout_s = 0

def double(x: int) -> int:
    """Double.

    Args:
        x: A number.
    """
    return 2 * x

class Heavy(Tools):
    pass
'''


class Room:
    """A pool with one user file, and answers by key."""

    def __init__(self, folder: Path, **settings):
        self.file = folder / "mine.py"
        self.file.write_text(USER_FILE)
        self.folder = folder
        workers = settings.pop("workers", 1)
        self.pool = Pool(workers, PoolSettings(**{"timeout_s": 5.0, "reward_timeout_s": 5.0, **settings}))

    def answers(self, count: int = 1, within: float = 30.0) -> dict:
        found: list = []
        end = time.monotonic() + within
        while len(found) < count:
            assert time.monotonic() < end, f"{count - len(found)} answers did not come"
            found += self.pool.poll(0.5)
        assert len(found) == count and len(dict(found)) == count
        return dict(found)

    def begin(
        self, key, name: str, row: dict | None = None, seed: int = 0, settings: dict | None = None, **more
    ) -> None:
        row = {"prompt": "go", **(row or {})}
        self.pool.open(key, Opening(f"{self.file}:{name}", row, seed, settings or {}), **more)

    def open(self, key, name: str, row: dict | None = None, **more) -> Reply:
        self.begin(key, name, row, **more)
        reply = self.answers()[key]
        assert not reply.failure, reply.failure
        return reply

    def say(self, key, *calls: str, tool: str = "act", text: str = "") -> Reply:
        self.pool.say(key, AssistantTurn(text, acts(*calls, tool=tool)))
        return self.answers()[key]

    def told(self, key, *calls: str, tool: str = "act") -> list[str]:
        reply = self.say(key, *calls, tool=tool)
        assert not reply.failure, reply.failure
        return [message["content"] for message in reply.messages]

    def pids(self) -> list[int]:
        return [process.process.pid for process in self.pool._processes.all]


def acts(*what: str, tool: str = "act") -> list[Call]:
    return [Call(tool, {"what": each}, f"id{i}") for i, each in enumerate(what)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    room = Room(tmp_path_factory.mktemp("env"))
    yield room
    room.pool.shutdown()


@pytest.fixture
def room(shared):
    for key in list(shared.pool._records):
        shared.pool.close(key)
    return shared


@pytest.fixture
def make(tmp_path):
    rooms = []

    def start(**settings):
        rooms.append(Room(tmp_path, **settings))
        return rooms[-1]

    yield start
    for each in rooms:
        each.pool.shutdown()


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(true, within: float = 10.0) -> bool:
    end = time.monotonic() + within
    while not (done := true()) and time.monotonic() < end:
        time.sleep(0.02)
    return done


# ── turns ────────────────────────────────────────────────────────────────────


def test_an_episode_with_tools(room):
    before = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]
    assert room.open("b", "Tools", {"prompt": "go", "prompt_messages": before}).messages == before
    reply = room.open("a", "Tools", {"prompt": [{"role": "user", "content": "go"}]})
    assert reply.messages == [{"role": "user", "content": "go"}]
    assert [tool["function"]["name"] for tool in reply.tools] == ["act", "later"]
    reply = room.say("a", "x", "reward", "y")
    assert reply.messages == [
        {"role": "tool", "content": "x", "name": "act", "tool_call_id": "id0"},
        {"role": "tool", "content": "well", "name": "act", "tool_call_id": "id1"},
        {"role": "tool", "content": "y", "name": "act", "tool_call_id": "id2"},
    ]
    assert (reply.reward, reply.done, reply.failure) == (0.25, False, "")
    seconds = reply.counts.pop("seconds")
    assert 0 < seconds < 5
    assert reply.counts == {"calls": 3, "failed_calls": 0, "timeouts": 0, "cut": 0, "malformed": 0}
    reply = room.say("a", "done")
    assert (reply.reward, reply.done) == (1.0, True)
    room.pool.score("a")
    assert room.answers()["a"].reward is None, "it has no reward()"
    assert room.pool.pending == 0 and room.pool.poll(10.0) == [], "nothing is owed, and it does not wait"


def test_without_calls_an_episode_without_step_ends(room):
    room.open("a", "double", {"prompt": "go"})
    reply = room.say("a")
    assert reply.done and reply.messages == [] and reply.reward is None


def test_step_gets_the_message_after_the_calls(room):
    assert room.open("a", "Steps").messages == [{"role": "user", "content": "begin"}]
    reply = room.say("a", text="hello")
    assert reply.messages == [{"role": "user", "content": "heard 1: hello"}] and reply.reward == 5.0 and not reply.done
    room.pool.say("a", AssistantTurn("two", [Call("call_me", {"x": "4"})], {"role": "assistant", "content": "own"}))
    reply = room.answers()["a"]
    assert [message["content"] for message in reply.messages] == ["4", "heard 2: own"]
    assert "tool_call_id" not in reply.messages[0] and reply.reward == 3.5
    reply = room.say("a", text="messages")
    assert reply.messages == [{"role": "user", "content": "a\ufffd"}, {"role": "tool", "content": "b"}]
    room.pool.say("a", AssistantTurn("x", [Call("call_me", {"x": 9})]))
    reply = room.answers()["a"]
    assert reply.done and [message["content"] for message in reply.messages] == ["9"], "a tool ended it"
    reply = room.say("a", text="end")
    assert reply.done
    room.pool.score("a")
    assert room.answers()["a"].reward == 0.75


@pytest.mark.parametrize(
    ("text", "reward", "parts", "failure"),
    [
        ("none", None, {}, ""),
        ("dict", 2.0, {"part": 3.0}, ""),
        ("big", None, {}, "returned the reward inf, which is not finite"),
        ("text", None, {}, "failed in reward: it returned str, not a number"),
    ],
)
def test_final_rewards(room, text, reward, parts, failure):
    room.open("a", "Steps")
    room.say("a", text=text)
    room.pool.score("a")
    reply = room.answers()["a"]
    assert (reply.reward, reply.parts) == (reward, parts)
    assert failure in reply.failure and bool(failure) == bool(reply.failure)


def test_an_environment_that_brings_its_tools(room):
    schemas = [{"name": "one"}, {"type": "function", "function": {"name": "two", "parameters": {"type": "object"}}}]
    tools = room.open("a", "Own", {"schemas": schemas}).tools
    assert [tool["function"]["name"] for tool in tools] == ["one", "two"]
    room.pool.say("a", AssistantTurn("", [Call("two", {"x": 1})]))
    assert json.loads(room.answers()["a"].messages[0]["content"]) == {"called": "two", "with": {"x": 1}}
    for bad, says in [
        ([{"name": "one"}] * 2, "two tools named one"),
        ([5], "it has a tool whose schema is not"),
    ]:
        room.begin("b", "Own", {"schemas": bad})
        assert says in room.answers()["b"].failure
        room.pool.close("b")


def test_calls_of_a_turn_run_side_by_side_or_in_order(room):
    room.open("a", "Meet")
    assert room.told("a", "x", "y", tool="meet") == [
        'meet has no argument "what": its arguments are name' for _ in range(2)
    ]
    calls = [Call("meet", {"name": name}) for name in "xy"]
    room.pool.say("a", AssistantTurn("", calls))
    assert [message["content"] for message in room.answers()["a"].messages] == ["x", "y"]
    room.open("b", "Meet", {"parallel": False})
    room.pool.say("b", AssistantTurn("", calls * 3))
    texts = [message["content"] for message in room.answers()["b"].messages]
    assert texts == ["x 1", "y 2", "x 3", "y 4", "x 5", "y 6"]


# ── what models write ────────────────────────────────────────────────────────


def test_malformed_calls_are_answered(room):
    room.open("a", "double")
    calls = [
        Call("double", {"x": "3"}),
        Call("double", {"x": "three"}),
        Call("double", {"y": 3}),
        Call("doubel\x00\ud800" * 100, {"x": 3}),
        Call("double", None, "i", "the JSON of this call ends too early"),
        Call("double", None),
    ]
    room.pool.say("a", AssistantTurn("\ud800", calls))
    reply = room.answers()["a"]
    texts = [message["content"] for message in reply.messages]
    assert texts[0] == "6"
    assert texts[1] == 'the argument x of double must be an integer, but it is "three"'
    assert texts[2] == 'double has no argument "y": its arguments are x'
    assert texts[3].startswith("there is no tool 'doubel") and texts[3].endswith("the tools are: double")
    assert texts[4:] == ["the JSON of this call ends too early", "the arguments of this call cannot be read"]
    assert reply.counts["malformed"] == 5 and reply.counts["calls"] == 6 and not reply.failure and not reply.done
    for message in reply.messages:
        json.dumps(message, ensure_ascii=False).encode()


# ── what tools do ────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("what", "tool", "says", "count"),
    [
        ("raise", "act", "KeyError: 'no\\x00thing'", "failed_calls"),
        ("mute", "act", "Mute, whose text could not be made (RuntimeError)", "failed_calls"),
        ("exit", "act", "SystemExit: 3", "failed_calls"),
        ("stop", "act", "StopIteration: ", "failed_calls"),
        ("exit", "later", "SystemExit: 3", "failed_calls"),
        ("cancel", "later", "CancelledError: ", "failed_calls"),
        ("hang", "later", "the tool did not answer within 0.3 s", "timeouts"),
        ("bytes", "act", "\ufffd\ufffd bytes", ""),
        ("surrogates", "act", "\ufffd <|im_end|>", ""),
        ("stdin", "act", "''", ""),
        ("plain", "later", "plain", ""),
    ],
)
def test_whatever_a_tool_does_is_told(room, what, tool, says, count):
    room.open("a", "Tools")
    before = room.pids()
    reply = room.say("a", what, tool=tool)
    assert not reply.failure
    assert reply.messages[0]["content"] == says
    bad = ("failed_calls", "timeouts", "cut", "malformed")
    assert {key: reply.counts[key] for key in bad} == {key: int(key == count) for key in bad}
    assert room.told("a", "still here") == ["still here"]
    assert room.pids() == before


def test_long_answers_are_cut_and_that_is_said(make):
    room = make(longest_answer=100, cut="tail")
    room.open("a", "Tools")
    reply = room.say("a", "long")
    assert reply.messages[0]["content"] == f"[the tail of 10000000 characters: 100 are shown]\n{'x' * 100}"
    assert reply.counts["cut"] == 1
    room.open("b", "Steps")
    reply = room.say("b", text="long")
    assert len(reply.messages[0]["content"]) < 200 and reply.counts["cut"] == 1
    assert len(room.open("c", "Tools", {"say": "z" * 1000}).messages[0]["content"]) == 1000, "prompts are not cut"


@pytest.mark.parametrize("what", ["nan", "broken"])
def test_a_tool_of_a_broken_environment_is_a_failure(room, what):
    room.open((3, 1), "Tools")
    reply = room.say((3, 1), what)
    wanted = {"nan": "gave the reward nan, which is not a finite number", "broken": "the server is gone"}
    assert reply.failure.endswith(f"failed in tool act: {wanted[what]}")
    assert room.say((3, 1), "x").failure == reply.failure, "it stays failed until it is closed"


# ── environments that fail ───────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("Steps", {"fail": "reset"}, r"failed in reset: ValueError: no such task here \(.*mine.py:\d+\)"),
        ("Steps", {"fail": "exit"}, "failed in reset: SystemExit: 1"),
        ("Steps", {"fail": "reset type"}, "must return messages, a text or None from reset, and returned int"),
        ("Steps", {"fail": "reset role"}, "with a role of system, .* from reset, and returned .*wizard"),
        ("Steps", {"wrong": 1}, r"cannot be made: its settings \(given: wrong\) do not fit"),
        ("Slow", {}, "has the timeout_s -1: give a number of seconds above 0"),
        ("Nothing", {}, "cannot be loaded: .*mine.py has no Nothing"),
    ],
)
def test_an_environment_that_does_not_open(room, name, settings, says):
    room.begin("a", name, settings=settings)
    failure = room.answers()["a"].failure
    assert re.search(says, failure), failure
    room.open("b", "Tools")
    assert room.told("b", "x") == ["x"], "others are not touched"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise", r"failed in step: ValueError: bad"),
        ("pair", r"must return (messages, reward, done) from step, and returned tuple of 2"),
        ("nan", "gave the reward nan, which is not a finite number, in step"),
    ],
)
def test_a_step_that_fails(room, text, says):
    room.open("a", "Steps")
    assert says in room.say("a", text=text).failure


def test_rows_and_states_that_are_no_json_are_failures(room):
    for key, opening, more in [
        ("a", Opening(f"{room.file}:Tools", {"x": object()}, 0), {}),
        ("b", Opening(f"{room.file}:Tools", {}, 0), {"state": {1, 2}}),
    ]:
        room.pool.open(key, opening, **more)
        assert "are not JSON" in room.answers()[key].failure
    room.begin("c", "Tools", {"prompt": ""})
    assert "returned None from reset, and the row has no prompt" in room.answers()["c"].failure


def test_check_tells_at_start(room):
    assert room.pool.check("builtin:guess", {"numbers": 4}) == "class Guess, no tools"
    assert room.pool.check(f"{room.file}:Tools") == "class Tools, tools act, later"
    for name, settings, says in [
        ("nowhere.py:Own", {}, "the environment nowhere.py:Own cannot be loaded: there is no file nowhere.py"),
        ("builtin:guess", {"numbers": 0}, "builtin:guess cannot be made: ValueError: numbers and turns must be 1"),
        ("builtin:guess", {"size": 0}, r"cannot be made: its settings \(given: size\) do not fit: got an unexpected"),
        (f"{room.file}:Slow", {}, "has the timeout_s -1"),
    ]:
        with pytest.raises(ValueError, match=says):
            room.pool.check(name, settings)
    assert [process.holds for process in room.pool._processes.all] == [0]
    for name, says in [("Checked", "offers tools that cannot be used"), ("CheckedSlow", "has the timeout_s 0")]:
        mark = room.folder / name
        with pytest.raises(ValueError, match=says):
            room.pool.check(f"{room.file}:{name}", {"mark": str(mark)})
        assert mark.exists(), "it was closed"


# ── calls that hang, processes that die ──────────────────────────────────────


@pytest.mark.slow
def test_a_hung_call_is_told_and_its_process_is_gone_a_second_later(make):
    room = make()
    for key, name in [("a", "Tools"), ("b", "Tools"), ("c", "Saved"), ("d", "Dice"), ("e", "Steps")]:
        room.open(key, name, seed=5)
        if name != "Steps":
            room.told(key, "draw", "first")
    old = room.pids()
    said = AssistantTurn("", acts("second", "hang"))
    begin = time.monotonic()
    room.pool.say("a", said)
    reply = room.answers()["a"]
    assert 0.3 <= time.monotonic() - begin < 5 and not reply.failure and not reply.done
    assert [message["content"] for message in reply.messages] == ["second", "the tool did not answer within 0.3 s"]
    assert reply.counts["timeouts"] == 1 and [call.late for call in said.calls] == [False, True]
    room.pool.say("e", AssistantTurn("one"))
    assert wait_until(lambda: room.pool._processes.turn(0.05) or ended(old[0]))
    assert room.answers()["e"].messages[0]["content"] == "heard 1: one"
    # The replay ran all but the hung call; a state was restored; other answers of a replay are a failure.
    assert room.told("a", "log") == ['["draw", "first", "second", "log"]']
    assert room.told("b", "log") == ['["draw", "first", "log"]']
    assert room.told("c", "log") == ['["restored", "draw", "first", "log"]']
    assert "returned different messages when turn 1 was run again" in room.say("d", "x").failure
    assert room.pids() != old and room.pool.pending == 0


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [False, True])
def test_a_hung_call_is_made_once_whatever_else_the_turn_does(make, in_order):
    room = make()
    room.open("a", "Busy", {"in_order": in_order})
    said = AssistantTurn("", acts("slow", "hang", "slow"))
    room.pool.say("a", said)
    reply = room.answers(within=12)["a"]
    texts = [message["content"] for message in reply.messages]
    assert texts == ["slow", "the tool did not answer within 0.8 s", "slow", "['slow', 'slow']"]
    assert [call.late for call in said.calls] == [False, True, False] and reply.counts["timeouts"] == 1
    assert reply.counts["seconds"] > 0.8 + 0.6, "the first try counts"


@pytest.mark.slow
@pytest.mark.parametrize(("what", "within"), [("hang", 4.5), ("gil", 8.0)])
def test_calls_that_hang_or_block_delay_no_other_episode(make, what, within):
    """One episode after another has a call that costs its process, while a call of `b` takes longer than each."""
    room = make()
    naps = room.folder / "naps"
    room.open("b", "Naps", {"naps": str(naps)})
    old = room.pids()
    room.pool.say("b", AssistantTurn("", acts("2.5")))
    begin, texts, found = time.monotonic(), [], None
    room.begin(0, "Tools")
    while not found:
        assert time.monotonic() - begin < within
        for key, reply in room.pool.poll(0.1):
            assert not reply.failure
            if key == "b":
                found = reply
            elif reply.tools:
                room.pool.say(key, AssistantTurn("", acts(what)))
            else:
                texts.append(reply.messages[0]["content"])
                room.begin(key + 1, "Tools")
    assert found.messages[0]["content"] == "2.5" and found.counts["timeouts"] == 0
    assert len(texts) >= 2 and set(texts) == {"the tool did not answer within 0.3 s"}
    assert naps.read_text() == ("2.5" if what == "hang" else "2.52.5"), "a process that answers ends when b has"
    for key in list(room.pool._records):
        room.pool.close(key)
    assert wait_until(lambda: room.pool._processes.turn(0.05) or (len(room.pids()) == 1 and ended(old[0])))


@pytest.mark.slow
def test_threads_of_closed_environments_take_no_time_of_new_ones(make):
    room = make()
    for i in range(THREADS):
        room.begin(i, "Naps", {"naps": os.devnull})
    room.answers(THREADS)
    for i in range(THREADS):
        room.pool.say(i, AssistantTurn("", acts("1.5")))
    assert wait_until(lambda: room.pool._processes.turn(0.05) or all(r.begun for r in room.pool._records.values()))
    for i in range(THREADS):
        room.pool.close(i)
    room.open("new", "Steps")
    assert room.say("new", text="x").messages[0]["content"] == "heard 1: x"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Late", "LateSaved"])
def test_a_late_call_is_as_if_it_had_not_been_made(make, name):
    room = make()
    room.open("a", name)
    before = room.pids()
    turns = [AssistantTurn("", acts("x", "late", "y")), AssistantTurn("", acts("z"))]
    texts = []
    for said in turns:
        room.pool.say("a", said)
        texts.append([message["content"] for message in room.answers()["a"].messages])
        time.sleep(0.6)
    assert texts == [
        ["x", "the tool did not answer within 0.3 s", "y", "['x', 'y']"],
        ["z", "['x', 'y', 'z']"],
    ]
    assert room.pids() == before, "it ended in time"
    room.begin("b", name, replayed=turns)
    again = room.answers()["b"]
    assert [[message["content"] for message in messages] for messages in again.replayed] == texts


def test_an_async_call_that_is_cancelled_has_ended_before_anything_else_runs(room):
    room.open("a", "Late")
    room.pool.say("a", AssistantTurn("", [*acts("hang", tool="later"), *acts("x")]))
    texts = [message["content"] for message in room.answers()["a"].messages]
    assert texts == ["the tool did not answer within 0.3 s", "x", "['cleared up', 'x']"]


@pytest.mark.slow
def test_a_text_that_hangs_is_a_call_that_hangs(room):
    room.open("a", "Tools")
    old = room.pids()
    assert room.told("a", "never text") == ["the tool did not answer within 0.3 s"]
    assert wait_until(lambda: ended(old[0])), "it ends even if nobody polls"
    assert room.told("a", "x") == ["x"]


@pytest.mark.slow
def test_a_call_that_is_late_but_ends_costs_no_process(room):
    room.open("a", "Tools")
    before = room.pids()
    assert room.told("a", "late") == ["the tool did not answer within 0.3 s"]
    time.sleep(1.2)
    assert room.told("a", "x") == ["x"] and room.pids() == before


def test_on_timeout_end_ends_the_episode(make):
    room = make(on_timeout="end")
    room.open("a", "Tools")
    reply = room.say("a", "hang", tool="later")
    assert reply.done and reply.messages[0]["content"] == "the tool did not answer within 0.3 s"


@pytest.mark.slow
@pytest.mark.parametrize(("what", "tool"), [("stubborn", "later"), ("block", "later"), ("gil", "act")])
def test_calls_that_nothing_stops(make, what, tool):
    """An async call that is not cancelled, one that blocks the loop, and one that blocks the whole process."""
    room = make()
    room.open("a", "Tools")
    room.open("b", "Tools")
    room.told("b", "first")
    old = room.pids()
    assert room.told("a", what, tool=tool) == ["the tool did not answer within 0.3 s"]
    assert wait_until(lambda: room.pool._processes.turn(0.05) or ended(old[0]))
    assert room.told("b", "log") == ['["first", "log"]']
    assert room.told("a", "log") == ['["log"]']


@pytest.mark.slow
def test_a_step_that_stops_the_loop_fails_its_own_episode_alone(make):
    room = make()
    for key in range(6):
        room.open(key, "Blocks", {"blocks": key == 2})
    for _ in range(2):
        for key in range(6):
            room.pool.say(key, AssistantTurn("x"))
        replies = room.answers(6)
        assert "did not answer in step within its limit" in replies.pop(2).failure
        assert [reply.messages[0]["content"] for reply in replies.values()] == ["on"] * 5


def test_a_hung_step_or_reset_is_a_failure(make):
    room = make()
    room.open("a", "Steps")
    room.begin("b", "Steps", settings={"fail": "hang"})
    room.pool.say("a", AssistantTurn("hang"))
    replies = room.answers(2)
    assert "did not answer within 0.3 s in step" in replies["a"].failure
    assert "did not answer within 0.3 s in reset" in replies["b"].failure


@pytest.mark.parametrize(("what", "how"), [("die", "with exit code 5"), ("kill", "by signal SIGKILL")])
def test_a_process_that_dies_fails_its_cause_alone(make, what, how):
    room = make()
    for key in "abc":
        room.open(key, "Tools")
        room.told(key, f"first of {key}")
    room.pool.say("a", AssistantTurn("", acts(what)))
    room.pool.say("b", AssistantTurn("", acts("plain", tool="later")))
    replies = room.answers(2)
    assert f"ended its process {how}" in replies["a"].failure and "twice, in say" in replies["a"].failure
    assert replies["b"].messages[0]["content"] == "plain"
    assert room.told("c", "log") == ['["first of c", "log"]'], "it was opened again"
    assert room.told("b", "log") == ['["first of b", "log"]']


def test_a_process_that_dies_once_costs_nothing(make):
    room = make(workers=2)
    room.open("a", "Saved", {"flag": str(room.folder / "flag")})
    room.told("a", "first")
    assert room.told("a", "die once") == ["die once"]
    assert room.told("a", "log") == ['["restored", "first", "die once", "log"]']
    room.open("b", "Tools")
    for pid in room.pids():
        os.kill(pid, signal.SIGKILL)
    assert room.told("a", "x") == ["x"] and room.told("b", "log") == ['["log"]']


def test_a_file_that_ends_the_process_on_import(make):
    room = make()
    (room.folder / "bad.py").write_text("import os\nos._exit(3)\n")
    room.open("b", "Tools")
    room.pool.open("a", Opening(f"{room.folder / 'bad.py'}:Own", {"prompt": "x"}, 0))
    assert "ended its process with exit code 3, twice, in open" in room.answers()["a"].failure
    assert room.told("b", "x") == ["x"]
    with pytest.raises(ValueError, match="ended its process with exit code 3"):
        room.pool.check(f"{room.folder / 'bad.py'}:Own")


def test_memory_is_bounded(make):
    room = make(memory_mb=512)
    room.open("a", "Tools")
    assert room.told("a", "memory") == ["MemoryError: "]
    assert room.told("a", "x") == ["x"]


# ── saving ───────────────────────────────────────────────────────────────────


def test_a_state_or_the_turns_open_an_environment_again(make):
    room = make(workers=2)
    for name in ("Saved", "Tools"):
        room.open("a", name, seed=7)
        turns = [AssistantTurn("", acts("draw", "x")), AssistantTurn("", acts("hang", "y", tool="act"))]
        texts = []
        for said in turns:
            room.pool.say("a", said)
            texts.append(room.answers()["a"].messages)
        state = room.pool.state("a")
        room.begin("b", name, seed=7, state=state) if state else room.begin("b", name, seed=7, replayed=turns)
        reply = room.answers()["b"]
        if name == "Saved":
            assert state == {"log": ["restored", "draw", "x", "y"]} and reply.replayed == []
            assert room.told("b", "log") == ['["restored", "restored", "draw", "x", "y", "log"]']
        else:
            assert state is None and reply.replayed == texts, "the call that hung was not made again"
            assert room.told("b", "log") == ['["draw", "x", "y", "log"]']
        room.pool.close("a")
        room.pool.close("b")


def test_a_state_is_that_before_the_turn_under_way(room):
    room.open("a", "Saved")
    room.told("a", "x")
    room.pool.say("a", AssistantTurn("", acts("y")))
    assert room.pool.state("a") == {"log": ["x"]}
    room.answers()
    assert room.pool.state("a") == {"log": ["x", "y"]}


def test_a_state_that_is_no_json_is_told_once_and_replayed(make, caplog):
    room = make()
    with caplog.at_level(logging.WARNING, "spmdrl"):
        for key in "ab":
            room.open(key, "Unsaved")
            room.told(key, "x")
            assert room.pool.state(key) is None
    told = [record.getMessage() for record in caplog.records if "cannot be saved" in record.getMessage()]
    assert len(told) == 1 and "state is not a JSON value: TypeError: Object of type lock" in told[0]
    os.kill(room.pids()[0], signal.SIGKILL)
    assert room.told("a", "log") == ['["x", "log"]']
    room.begin("c", "Tools", state={"log": []})
    assert "was saved with a state and has no restore" in room.answers()["c"].failure


def test_replies_do_not_depend_on_workers_or_order(make):
    def run(workers: int) -> list[Reply]:
        room = make(workers=workers)
        for key in range(8):
            room.begin(key, "Tools", seed=key)
        room.answers(8)
        for key in range(8):
            room.pool.say(key, AssistantTurn("", acts("draw", "raise", "bytes")))
        replies = room.answers(8)
        for reply in replies.values():
            reply.counts.pop("seconds")
        return [replies[key] for key in range(8)]

    assert run(1) == run(3)


# ── closing ──────────────────────────────────────────────────────────────────


def test_close_forgets_requests_and_answers(room):
    room.open("a", "Tools")
    room.pool.say("a", AssistantTurn("", acts("hang", tool="later")))
    room.pool.close("a")
    room.begin("a", "Tools")
    assert list(room.answers()) == ["a"] and room.pool.pending == 0
    room.begin("b", "Tools")
    assert wait_until(lambda: room.pool._processes.turn(0.05) or room.pool._done)
    room.pool.close("b")
    assert room.pool.poll() == []


def test_shutdown_lets_environments_close(make):
    room = make(workers=2)
    marks = [str(room.folder / f"mark{i}") for i in range(3)]
    for i, mark in enumerate(marks):
        room.open(i, "Steps")
        room.say(i, text=mark)
        room.say(i, text="closed")
    room.pool.close(0)
    assert wait_until(lambda: Path(marks[0]).exists())
    room.open("hangs", "Tools")
    room.pool.say("hangs", AssistantTurn("", acts("hang")))
    pids = room.pids()
    room.pool.shutdown()
    room.pool.shutdown()
    assert all(ended(pid) for pid in pids) and all(Path(mark).exists() for mark in marks)


def test_shutdown_ends_children_and_runs_what_is_registered_for_the_exit(make):
    room = make()
    room.open("a", "Tools", {"flag": str(room.folder / "flag")})
    child = int(room.told("a", "child", "at exit")[0])
    assert not ended(child)
    room.pool.shutdown()
    assert wait_until(lambda: ended(child), within=2)
    assert (room.folder / "flag").exists()


def test_processes_die_with_their_parent(tmp_path):
    (tmp_path / "mine.py").write_text(USER_FILE)
    code = (
        "import time\n"
        "from spmdrl.env.base import Call, Opening, AssistantTurn\n"
        "from spmdrl.env.pool import Pool\n"
        "pool = Pool(2)\n"
        f"pool.open(0, Opening('{tmp_path / 'mine.py'}:Tools', {{'prompt': 'x'}}, 0))\n"
        "pool.poll(30.0)\n"
        "pool.say(0, AssistantTurn('', [Call('act', {'what': 'hang'})]))\n"
        "print(*(p.process.pid for p in pool._processes.all), flush=True)\n"
        "time.sleep(100)\n"
    )
    env = os.environ | {"PYTHONPATH": str(REPO)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and not any(ended(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: all(ended(pid) for pid in pids))


def test_hundreds_of_environments_of_one_process(make):
    room = make()
    for i in range(600):
        room.pool.open(i, Opening("builtin:guess", {}, i, {"numbers": 16}))
    room.answers(600)
    for i in range(600):
        room.pool.say(i, AssistantTurn("16"))
    texts = [reply.messages[0]["content"] if reply.messages else "" for reply in room.answers(600).values()]
    assert set(texts) == {"lower", ""}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"timeout_s": 0}, "timeout_s is 0: give a number of seconds above 0"),
        ({"reward_timeout_s": float("inf")}, "reward_timeout_s is inf"),
        ({"longest_answer": 0}, "longest_answer must be 1 or more"),
        ({"cut": "left"}, "cut must be head, tail or middle, not 'left'"),
        ({"on_timeout": "stop"}, "on_timeout must be tell or end, not 'stop'"),
    ],
)
def test_settings_that_mean_nothing(settings, says):
    with pytest.raises(ValueError, match=says):
        PoolSettings(**settings)
    with pytest.raises(ValueError, match="must be 1 or more, not 0"):
        Pool(0)


@pytest.mark.slow
def test_a_caller_that_comes_late_changes_nothing(make):
    """Answers wait in the pipe, which is full, and beyond it in the process."""
    room = make(longest_answer=50_000)
    for key in range(20):
        room.begin(key, "Tools")
    room.answers(20)
    old = room.pids()
    for key in range(20):
        room.pool.say(key, AssistantTurn("", acts("x" * 50_000)))
    time.sleep(1.5)
    assert all(reply.counts["timeouts"] == 0 and not reply.failure for reply in room.answers(20).values())
    assert room.pids() == old
