"""The commands init and try: as functions where they can be, as processes where a user sees the difference."""

import ast
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl.env.__main__ import main
from spmdrl.env.base import Call
from spmdrl.env.forms import BUILTIN, mcp_settings
from spmdrl.env.play import Play, PlayError
from spmdrl.env.terminal import ModelPlayer, by_hand, by_model, parse_line

ROOT = Path(__file__).resolve().parents[2]
GAME = '''
import functools

from spmdrl.env import Answer


class Game:
    """Say the word."""

    def __init__(self, word="red"):
        self.word = word

    def reset(self, row, seed):
        if row.get("fail"):
            raise RuntimeError("no game today")
        return [{"role": "system", "content": f"seed {seed}"}, {"role": "user", "content": row.get("prompt", "Guess.")}]

    def look(self, place: str, deep: bool = False) -> Answer:
        """Look somewhere.

        Args:
            place: A place.
        """
        return Answer(f"{place} {deep}: \\x1b[31m{self.word}\\x07", 0.25)

    def reward(self):
        return {"score": 1.0, "style": 0.5}


class Opened(Game):
    def reset(self, row, seed):
        self.file = open(__file__)

    def close(self):
        self.file.close()


class Cached(Game):
    @functools.lru_cache
    def again(self, word: str) -> str:
        """Say a word again."""
        return word * 2


class Idle:
    def reset(self, row, seed):
        return "?"

    def look(self, place: str):  # no docstring
        return place


class Filled(Idle):
    tools: list = []

    def reset(self, row, seed):
        if row.get("fill"):
            self.tools = [Game().look]
        return "?"


class Method(Idle):
    def tools(self):
        return [self.look]
'''


@pytest.fixture
def game(tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    return f"{tmp_path / 'game.py'}:Game"


def lines(*said: str):
    """What a person types, and then the end of the input."""
    given = iter(said)

    def read(prompt: str) -> str:
        try:
            return next(given)
        except StopIteration:
            raise EOFError from None

    return read


def test_an_environment_is_played_by_hand(game):
    shown: list[str] = []
    read = lines("look(place='box', deep=True)", "look(place=", '[{"name": "look", "arguments": {}}]', "I\\", "stop")
    with Play(game, {"word": "blue"}) as play:
        total = by_hand(play, {"prompt": "Find it."}, 7, read, shown.append)
    assert total == 1.25
    assert shown[1:] == [
        "tool: look(place: string, deep: boolean)  Look somewhere.",
        "system: seed 7",
        "user: Find it.",
        "tool look: box True: blue\ufffd",
        "reward 0.25",
        "not understood: write a call as look(key=value) with literal values "
        "('(' was never closed (<unknown>, line 1))",
        "tool look: the call of look lacks the argument place",
        "final reward 1 (style 0.5)",
        "the episode has ended, with rewards of 1.25 in all",
    ]


def test_a_game_without_tools_by_hand_and_its_early_end():
    with Play("builtin:guess", {"numbers": 4, "turns": 3}) as play:
        shown: list[str] = []
        assert by_hand(play, {"number": 3}, 0, lines("2", "3"), shown.append) == 1.0
        assert shown[1:] == [
            "user: guess 1-4:",
            "user: higher",
            "reward 1",
            "the episode has ended, with rewards of 1 in all",
        ]
        assert by_hand(play, {"number": 3}, 0, lines("2", "/quit", "3"), shown.append) == 0.0
        assert shown[-1] == "the episode has ended early, with rewards of 0 in all"


def test_a_history_of_the_environment_is_shown_and_is_all_that_a_model_sees(tmp_path):
    code = "from spmdrl.env import History\n\n\nclass Notes:\n    def reset(self, row, seed):\n        return 'go'\n\n"
    code += "    def step(self, message):\n        return History('so far: ' + message['content']), None, False\n"
    (tmp_path / "notes.py").write_text(code)
    heard: list[list[str]] = []

    def speak(messages, tools):
        heard.append([m["content"] for m in messages])
        return f"note {len(heard)}"

    with Play(f"{tmp_path / 'notes.py'}:Notes") as play:
        shown: list[str] = []
        by_hand(play, {}, 0, lines("a"), shown.append)
        assert shown[1:4] == ["user: go", "the conversation continues from only these messages:", "user: so far: a"]
        by_model(play, ModelPlayer(speak, "none"), {}, 0, 3, shown.append)
    assert heard == [["go"], ["so far: note 1"], ["so far: note 2"]]
    assert shown.count("the conversation continues from only these messages:") == 4


@pytest.mark.parametrize(
    "line, text, calls",
    [
        ("hello (there)", "hello (there)", []),
        ("print(1)", "print(1)", []),
        ("f()", "", [("f", {})]),
        (" f(a=[1, {'b': None}], c='x(') ", "", [("f", {"a": [1, {"b": None}], "c": "x("})]),
        ('{"name": "g", "arguments": {"a": 1}}', "", [("g", {"a": 1})]),
        ('[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "", [("f", {}), ("g", {})]),
    ],
)
def test_lines_are_parsed(line, text, calls):
    said, found = parse_line(line, {"f"})
    assert (said, [(call.name, call.arguments) for call in found]) == (text, calls)


@pytest.mark.parametrize(
    "line",
    ["f(1)", "f(a=g())", "f(**{})", "f(a=1) and more", "f(a={1, 2})", "{not json", '{"name": "f"}', '[{"name": 1}]'],
)
def test_lines_that_begin_as_calls_and_are_none(line):
    with pytest.raises(ValueError, match="write a call as|not JSON"):
        parse_line(line, {"f"})


def test_a_model_plays_and_its_calls_are_read(game):
    """A speaker that says given texts stands where a model is loaded; the next test loads one."""
    texts = iter(
        [
            "<think>Where?</think>I look."
            '<tool_call>{"name": "look", "arguments": {"place": "box"}}</tool_call><tool_call>{</tool_call>',
            "It is red.",
        ]
    )
    heard: list[list[dict]] = []

    def speak(messages, tools):
        heard.append(json.loads(json.dumps(messages)))
        return next(texts)

    shown: list[str] = []
    with Play(game) as play:
        assert by_model(play, ModelPlayer(speak, "hermes"), {}, 1, 5, shown.append) == 1.25
        with pytest.raises(ValueError, match="name the form of its calls with --format"):
            by_model(play, ModelPlayer(speak, "none"), {}, 1, 5, shown.append)
    assert shown[2:7] == [
        "assistant (thought): Where?",
        "assistant: I look.",
        'assistant calls look(place="box")',
        "assistant calls a call: The tool call is malformed: not valid JSON: Expecting property name enclosed in "
        "double quotes at character 1.",
        "tool look: box False: red\ufffd",
    ]
    assert shown[-1] == "the episode has ended, with rewards of 1.25 in all"
    assert [message["role"] for message in heard[1]] == ["system", "user", "assistant", "tool", "tool"]
    assert [call["function"]["name"] for call in heard[1][2]["tool_calls"]] == ["look", "malformed_call"]


@pytest.mark.slow
def test_a_real_model_plays(capsys):
    words = ["try", "builtin:guess", "--model", "tiny", "--episodes", "2", "--turns", "2", "--max-new-tokens", "4"]
    assert main([*words, "--row", '{"prompt": "2+2=", "number": 4}']) == 0
    out = capsys.readouterr().out
    assert (
        out.count("user: 2+2=") == 2
        and out.count("-- episode") == 2
        and "episodes: 2; rewards of an episode on average: " in out
    )
    assert 2 <= out.count("assistant: ") <= 4


def run(*words: str, given: str = "", folder: Path | None = None) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", *words],
        input=given,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        timeout=120,
    )


@pytest.mark.slow
def test_what_init_writes_works_and_passes_its_test(tmp_path):
    made = run("spmdrl.env", "init", "coin_game", folder=tmp_path)
    assert made.returncode == 0 and "wrote coin_game.py and test_coin_game.py" in made.stdout, made.stderr
    assert len((tmp_path / "coin_game.py").read_text().splitlines()) <= 35
    ast.parse((tmp_path / "test_coin_game.py").read_text())
    tested = run("pytest", "-q", "-p", "no:cacheprovider", "test_coin_game.py", folder=tmp_path)
    assert tested.returncode == 0 and "2 passed" in tested.stdout, tested.stdout
    given = "open_box(number=1)\nopen_box(number=2)\nopen_box(number=3)\ndone\n"
    tried = run("spmdrl.env", "try", "coin_game.py:CoinGame", "--set", "boxes=3", given=given, folder=tmp_path)
    assert tried.returncode == 0 and "the coin is here" in tried.stdout, tried.stderr

    before = (tmp_path / "coin_game.py").read_text()
    again = run("spmdrl.env", "init", "coin_game", folder=tmp_path)
    assert again.returncode == 2 and "coin_game.py exists already" in again.stderr
    assert (tmp_path / "coin_game.py").read_text() == before


def test_names_for_init(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "envs/two_boxes.py"]) == 0
    assert "class TwoBoxes:" in (tmp_path / "envs" / "two_boxes.py").read_text()
    for name in ("a-b", "class", "", "1st", "envs/a-b"):
        assert main(["init", name]) == 2
        assert "is not a valid name of a Python module" in capsys.readouterr().err
    for name in ("json", "envs/random", "numpy"):
        assert main(["init", name]) == 2
        assert f"would hide the module {name.rpartition('/')[2]} of Python or of a package" in capsys.readouterr().err
    assert [each.name for each in (tmp_path / "envs").iterdir() if "two_boxes" not in each.name] == []
    (tmp_path / "test_other.py").write_text("mine")
    assert main(["init", "other"]) == 2
    assert not (tmp_path / "other.py").exists() and (tmp_path / "test_other.py").read_text() == "mine"


@pytest.mark.parametrize(
    "words, code, why",
    [
        (["--row", "[1]"], 2, "--row must be a JSON object"),
        (["--row", "{"], 2, "--row is not valid JSON"),
        (["--set", "word"], 2, "write KEY=VALUE"),
        (["--set", "colour=red"], 2, "do not fit"),
        (["--model", "tiny", "--turns", "0"], 2, "--turns must be 1 or more"),
        (["--format", "xml"], 2, "must be one of hermes"),
        (["--row", '{"fail": true}'], 1, "no game today"),
    ],
)
def test_mistakes_are_said_in_one_line(game, capsys, words, code, why):
    assert main(["try", game, *words]) == code
    err = capsys.readouterr().err
    assert why in err and "Traceback" not in err


def test_an_environment_that_does_not_exist_or_fails(game, capsys):
    assert main(["try", "builtin:gues"]) == 2
    assert "builtin:guess" in capsys.readouterr().err
    with Play(game) as play:
        with pytest.raises(PlayError, match=f"^the environment {game} of prompt 0 .*no game today"):
            play.open({"fail": True})
        assert play.open(seed=3).messages[0]["content"] == "seed 3"


def test_a_file_of_settings_is_tried_with_its_limits(game, tmp_path, capsys, monkeypatch):
    file = tmp_path / "game.yaml"
    file.write_text(f"environment: {game}\nsettings: {{word: 'blue'}}\nlongest_answer: 4\ncut: head\nmax_turns: 2\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("look(place='a')\n"))
    assert main(["try", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{file}: class Game, tools look\n") and "tool look: a Fa" in out and "the head of 19 " in out
    monkeypatch.setattr("sys.stdin", io.StringIO("look(place='a')\n"))
    assert main(["try", str(file), "--set", "word=green"]) == 0
    assert "of 20 " in capsys.readouterr().out
    file.write_text("environment: rows\n")
    assert main(["try", str(file)]) == 2
    assert "each row of the data names an environment" in capsys.readouterr().err
    file.write_text("environment: builtin:guess\nmax_turn: 2\n")
    assert main(["try", str(file)]) == 2 and main(["try", "game.yml"]) == 2 and main(["try", "games"]) == 2
    said = capsys.readouterr().err
    assert "max_turn" in said and "game.yml" in said and "a YAML file of settings" in said


def test_close_may_need_what_reset_made(game):
    with Play(game.replace(":Game", ":Opened")) as play:
        assert play.open({"prompt": "?"}).messages == [{"role": "user", "content": "?"}]


def test_the_start_names_the_tools_and_what_offers_none_is_refused(game):
    file = game.removesuffix(":Game")
    with Play(f"{file}:Cached") as play:
        assert play.hello == "class Cached, tools look, again"
        play.open()
        assert play.call("again", word="x").messages[0]["content"] == "xx"
    with pytest.raises(ValueError, match="Idle has neither tools nor step, .*docstring"):
        Play(f"{file}:Idle")
    with pytest.raises(ValueError, match=r"tools is of the type method: make it a list of functions"):
        Play(f"{file}:Method")
    with Play(f"{file}:Filled") as play:
        assert [tool["function"]["name"] for tool in play.open({"fill": True}).tools] == ["look"]
        with pytest.raises(PlayError, match="has neither tools nor step"):
            play.open()


def test_tools_that_come_with_it_can_be_played():
    with Play(BUILTIN["calculator"]) as play:
        opened = play.open({"prompt": "What is 2 ** 100?"})
        assert [tool["function"]["name"] for tool in opened.tools] == ["calculate"]
        reply = play.say(
            "", Call("calculate", {"expression": "2 ** 100"}, "a"), Call("calculate", {"expression": "x"}, "b")
        )
        assert [message["content"] for message in reply.messages] == [
            str(2**100),
            "ValueError: cannot work out 'x': only numbers, + - * / // % ** and parentheses are allowed",
        ]
        assert play.say("done").done
    assert mcp_settings("mcp:https://a/b") == {"url": "https://a/b"}
    assert mcp_settings("mcp:python server.py") == {"command": "python server.py"}
    with pytest.raises(ValueError, match="names no MCP server"):
        mcp_settings("mcp:")


def test_workers_do_without_torch():
    names = [name.partition(":")[0] for name in BUILTIN.values()] + ["spmdrl.env.calls", "spmdrl.env.__main__"]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
