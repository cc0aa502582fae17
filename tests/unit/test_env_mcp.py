"""Tools of real MCP servers in processes of their own, over standard input and output and over HTTP."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

pytest.importorskip("mcp")

from spmdrl.env import mcp_tools, open_image
from spmdrl.env.base import BrokenError
from spmdrl.env.mcp_connection import McpError
from spmdrl.env.mcp_tools import Mcp
from spmdrl.env.play import Play, PlayError

SERVER = '''
import asyncio, os, signal, sys, time
from mcp.server import MCPServer

server = MCPServer("demo", log_level="ERROR")
calls = 0


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def picture() -> list:
    """Draw."""
    from mcp.types import ImageContent, TextContent

    png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="
    return [TextContent(type="text", text="look"), ImageContent(type="image", data=png, mime_type="image/png")]


@server.tool()
def tally() -> str:
    """Count calls."""
    global calls
    calls += 1
    return f"{calls} of {os.getpid()}"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def reveal() -> str:
    """Say what is secret."""
    return "the token is " + os.environ["DEMO_TOKEN"]


here = 0
all_here = asyncio.Event()


@server.tool()
async def meet() -> str:
    """Wait for two others."""
    global here
    here += 1
    if here == 3:
        all_here.set()
    await all_here.wait()
    return "met"


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


if sys.argv[1:] == ["stay"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server.run(transport="stdio")
    time.sleep(60)
elif sys.argv[1:]:
    server.run(transport="streamable-http", port=int(sys.argv[1]))
else:
    server.run(transport="stdio")
'''
SECRET = "hunter2secret"


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return str(path)


def gone(pid: int) -> None:
    until = time.monotonic() + 10
    while psutil.pid_exists(pid):
        assert time.monotonic() < until, "the server still runs"
        time.sleep(0.02)


def noticed(tool: Mcp) -> None:
    until = time.monotonic() + 10
    while tool.slot.connection is not None and not tool.slot.connection.ended:
        assert time.monotonic() < until, "the end of the server was not seen"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_server_over_stdio_and_what_it_survives(script, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("TOKEN_OF_THIS_TEST", SECRET)
    tool = Mcp(command=[sys.executable, script], env={"DEMO_TOKEN": "$TOKEN_OF_THIS_TEST"}, timeout=20.0)
    tool.reset({}, 0)
    schemas = {each["function"]["name"]: each["function"] for each in tool.tool_schemas()}
    assert list(schemas) == ["add", "picture", "tally", "die", "reveal", "meet", "wait"]
    assert schemas["add"]["description"] == "Add two numbers."
    assert schemas["add"]["parameters"]["properties"]["a"]["type"] == "integer"
    assert schemas["add"]["parameters"]["required"] == ["a"]
    assert tool.call("add", {"a": 40, "b": 2}) == "42"

    with pytest.raises(McpError, match="valid integer"):
        tool.call("add", {"a": "x"})
    with pytest.raises(McpError, match="no tool 'nothing'"):
        tool.call("nothing", {})
    tool.timeout = 0.3
    with pytest.raises(McpError, match="did not answer within 0.3 s"):
        tool.call("wait", {"seconds": 30})
    tool.timeout = 20.0
    assert tool.call("reveal", {}) == "the token is <redacted>"
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda _: tool.call("meet", {}), range(3))) == ["met"] * 3

    # It ends in a call, and is killed between two: the next call finds another one.
    first, pid = tool.call("tally", {}).split(" of ")
    with pytest.raises(McpError, match="the MCP server ended during the call"):
        tool.call("die", {})
    second, other = tool.call("tally", {}).split(" of ")
    assert first == second == "1" and other != pid
    os.kill(int(other), signal.SIGKILL)
    noticed(tool)
    third = tool.call("tally", {})
    assert third.startswith("1 of ") and third != f"1 of {other}"

    tool.close()
    tool.close()
    gone(int(third.split(" of ")[1]))
    assert SECRET not in caplog.text


def test_a_server_that_episodes_share(script):
    settings = {"command": f"{sys.executable} {script}", "shared": True, "only": ["tally"]}
    one, other = Mcp(**settings), Mcp(**settings)
    one.reset({}, 0)
    other.reset({}, 1)
    first, second = one.call("tally", {}).split(" of "), other.call("tally", {}).split(" of ")
    assert (first[0], second[0]) == ("1", "2") and first[1] == second[1]
    one.close()
    assert other.call("tally", {}).startswith("3 of ")
    assert [each["function"]["name"] for each in other.tool_schemas()] == ["tally"]
    with pytest.raises(McpError, match="no tool 'add'"):
        other.call("add", {"a": 1})
    os.kill(int(first[1]), signal.SIGKILL)


def test_images_in_results_are_shown_if_set(script):
    for images in (True, False):
        tool = Mcp(f"{sys.executable} {script}", images=images)
        tool.reset({}, 0)
        found = tool.call("picture", {})
        tool.close()
        if images:
            assert found[0] == "look" and open_image(found[1]).size == (1, 1)
        else:
            assert found == "look\n[image/png, which cannot be shown]"


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def started(script: str, port: int) -> subprocess.Popen:
    server = subprocess.Popen([sys.executable, script, str(port)], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return server
        time.sleep(0.02)
    raise AssertionError("the server does not start")


@pytest.mark.slow
def test_a_server_over_http_that_is_killed_and_comes_back(script):
    port = free_port()
    server = started(script, port)
    tool = Mcp(url=f"http://127.0.0.1:{port}/mcp", timeout=5.0, headers={"Authorization": f"Bearer {SECRET}"})
    try:
        tool.reset({}, 0)
        assert tool.call("add", {"a": 1}) == "2"
        assert tool.call("tally", {}).startswith("1 of ")
        server.kill()
        server.wait()
        for kind, why in ((McpError, "the MCP server ended"), (BrokenError, "cannot use .* as an MCP server")):
            with pytest.raises(kind, match=why) as error:
                tool.call("add", {"a": 1})
            assert SECRET not in str(error.value)
        server = started(script, port)
        assert tool.call("add", {"a": 2}) == "3"
        # Another server in its place between two calls.
        server.kill()
        server.wait()
        server = started(script, port)
        try:
            assert tool.call("add", {"a": 3}) == "4"
        except McpError:
            assert tool.call("add", {"a": 3}) == "4"
    finally:
        tool.close()
        server.kill()
        server.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, why",
    [
        ({"command": "cat"}, "cannot use cat as an MCP server"),
        (
            {"command": "sleep 30", "connect": 0.5},
            "^cannot use sleep 30 as an MCP server: it did not list its tools within 0.5 s, which the setting "
            "`connect` changes",
        ),
        (
            {"command": f"cat --api-key {SECRET} --token={SECRET}"},
            "^cannot use cat --api-key '<redacted>' '--token=<redacted>' as an MCP server",
        ),
        ({"command": "yes", "connect": 0.5}, "cannot use yes as an MCP server"),
        ({"command": "echo hello"}, "cannot use echo hello as an MCP server"),
        ({"command": "no-such-command-here"}, "No such file"),
        ({"command": ["sh", "-c", "echo bad token $KEY >&2"], "env": {"KEY": SECRET}}, "error: bad token <redacted>"),
        ({"url": "http://127.0.0.1:9/mcp"}, "cannot use http://127.0.0.1:9/mcp as an MCP server"),
        ({"url": f"http://user:{SECRET}@127.0.0.1:9/mcp"}, "as an MCP server"),
    ],
)
def test_a_server_that_speaks_no_protocol_is_refused(settings, why):
    begun = time.monotonic()
    with pytest.raises(BrokenError, match=why) as error:
        Mcp(**settings).reset({}, 0)
    assert time.monotonic() - begun < 10
    assert SECRET not in str(error.value)


def test_servers_start_a_few_at_once_and_the_wait_before_counts_for_none(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("import time; time.sleep(0.6)")
    command = [sys.executable, str(tmp_path / "script.py")]
    monkeypatch.setattr(mcp_tools, "_starting", threading.BoundedSemaphore(2))

    def begin(_: int) -> str:
        with pytest.raises(BrokenError) as error:
            Mcp(command=command, connect=0.3).reset({}, 0)
        return str(error.value)

    begun = time.monotonic()
    with ThreadPoolExecutor(6) as threads:
        said = list(threads.map(begin, range(6)))
    assert all("script.py as an MCP server" in each and "within 0.3 s" in each for each in said)
    assert time.monotonic() - begun >= 0.9
    assert Mcp(command=command).timeout_s > mcp_tools.QUEUE_SECONDS


def test_settings_that_make_no_sense():
    for settings in ({}, {"command": "a", "url": "http://a"}):
        with pytest.raises(ValueError, match="either `command`"):
            Mcp(**settings)
    with pytest.raises(ValueError, match="http or https address"):
        Mcp(url="ftp://a")
    with pytest.raises(ValueError, match="NO_SUCH_VARIABLE_HERE, which is not set"):
        Mcp(command="a", env={"A": "$NO_SUCH_VARIABLE_HERE"})


def test_a_package_that_is_missing_or_old_is_named(monkeypatch):
    monkeypatch.setattr(mcp_tools, "version", lambda name: "1.28.0")
    with pytest.raises(ValueError, match="pip install 'mcp>=2'"):
        Mcp(command="a")


@pytest.mark.slow
def test_a_tool_that_is_not_there_is_named(script):
    with pytest.raises(BrokenError, match="subtract.*its tools: add, picture, tally, die, reveal, meet, wait"):
        Mcp(command=[sys.executable, script], only=["subtract"]).reset({}, 0)


@pytest.mark.slow
def test_a_server_in_a_worker(script):
    with Play("spmdrl.env.mcp_tools:Mcp", {"command": [sys.executable, script]}) as play:
        opened = play.open({"prompt": "Add."})
        assert opened.tools[0]["function"]["name"] == "add"
        assert play.call("add", a=1, b="2").messages[0]["content"] == "3"
        assert "the MCP server ended during the call" in play.call("die").messages[0]["content"]
    why = "failed in reset: .*cannot use cat as an MCP server"
    with Play("spmdrl.env.mcp_tools:Mcp", {"command": "cat"}) as play, pytest.raises(PlayError, match=why):
        play.open({"prompt": "Add."})


@pytest.mark.slow
def test_a_server_that_ignores_the_end_of_its_input_ends_with_its_worker(script):
    with Play("spmdrl.env.mcp_tools:Mcp", {"command": [sys.executable, script, "stay"]}) as play:
        play.open({"prompt": "Add."})
        pid = int(play.call("tally").messages[0]["content"].split(" of ")[1])
        assert psutil.pid_exists(pid)
    gone(pid)
