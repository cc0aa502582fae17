"""Programs and sessions of the tool `python`, in a real sandbox."""

import pytest

from spmdrl.env.base import BrokenError
from spmdrl.env.calls import parse_turn
from spmdrl.env.play import Play, PlayError
from spmdrl.env.python_tool import SANDBOXES, Python, PythonSession
from spmdrl_sandbox.base import SandboxError
from spmdrl_sandbox.open import open_sandbox


@pytest.fixture(scope="module", autouse=True)
def one_sandbox():
    try:
        SANDBOXES.give_back("auto", open_sandbox())
    except SandboxError as error:
        pytest.skip(str(error))
    yield
    SANDBOXES.close()


def test_programs_stand_alone():
    tool = Python(seconds=3.0)
    assert tool.python("x = 20\nprint(x + 1)\nprint('Zürich 漢字')") == "21\nZürich 漢字"
    assert "NameError" in tool.python("print(x)")
    assert tool.python("x = 1") == "(nothing was printed)"
    assert "SyntaxError" in tool.python("def f(:")
    assert tool.python("import sys; sys.exit(3)") == "The program failed: exit code 3."
    printed = tool.python("print('before')\n1 / 0")
    assert printed.startswith("before\nTraceback") and printed.endswith("ZeroDivisionError: division by zero")
    tool.restore(tool.state())


def test_programs_are_stopped():
    tool = Python(seconds=1.0)
    assert tool.python("print('a', flush=True)\nwhile True: pass") == "a\nThe program was stopped after 1 s."
    endless = tool.python("while True: print('x' * 1000)")
    assert endless.endswith("it printed more than 256 KiB.")
    # The sandbox goes on.
    assert tool.python("print(1)") == "1"
    assert len(SANDBOXES.idle["auto"]) == 1


@pytest.mark.slow
def test_sessions_keep_variables_until_they_end():
    tool = PythonSession(seconds=2.0)
    tool.reset({}, 0)
    assert tool.python("x = 20\nx + 1") == "21"
    assert tool.python("x / 0") == "ZeroDivisionError: division by zero"
    assert tool.python("y = x * 2") == "(nothing was printed)"
    assert tool.python("print(y)") == "40"
    stopped = tool.python("while True: pass")
    assert "no answer within 2 s" in stopped and stopped.endswith("its variables are lost.")
    assert tool.python("x").startswith("NameError")
    assert "its variables are lost" in tool.python("import os; os._exit(1)")
    assert tool.python("z = 1\nz") == "1"
    tool.reset({}, 0)
    assert tool.python("z").startswith("NameError")
    tool.close()
    tool.close()
    assert not hasattr(tool, "state")


def test_a_provider_that_does_not_exist_is_named():
    with pytest.raises(BrokenError, match="no sandbox is called 'wonder'"):
        Python(provider="wonder").python("1")


def test_blocks_of_code_are_run_in_a_worker():
    text = "I work it out.\n```python\nx = 6\n```\nand\n```python\nx * 7\n```\n"
    with Play("spmdrl.env.python_tool:PythonSession") as play:
        play.open({"prompt": "What is 6 * 7?"})
        reply = play.turn(parse_turn(text, "python"))
        assert [message["content"] for message in reply.messages] == ["(nothing was printed)", "42"]
        assert not reply.done and reply.counts["calls"] == 2
        (message,) = play.turn(parse_turn("```python\nx", "python")).messages
        assert message["content"] == "The block of code is not closed by ```, so it was not run."
        assert play.turn(parse_turn("It is 42.", "python")).done
    with Play("spmdrl.env.python_tool:Python", {"provider": "wonder"}) as play:
        play.open({"prompt": "a"})
        with pytest.raises(PlayError, match="failed in tool python: no sandbox works on this machine"):
            play.call("python", code="1")
