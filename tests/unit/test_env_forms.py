"""Environments by name: what is taken, and what is said of names that are none."""

import json
import random
from pathlib import Path

import pytest

import spmdrl
from spmdrl.env.builtin import Guess
from spmdrl.env.forms import functions_of, load
from spmdrl.env.messages import messages_of
from spmdrl.env.operations import tool_of

TINY = Path(spmdrl.__file__).parent / "assets" / "tiny" / "tokenizer.json"
USER_FILE = '''
import functools
from dataclasses import dataclass

@dataclass
class Held:
    x: int = 0

def double(x: int) -> int:
    """Double a number.

    Args:
        x: The number.
    """
    return 2 * x

def half(x: float) -> float:
    """Halve a number."""
    return x / 2

def bare(x):
    return x

tools = [double, half]
empty = []
twice = [double, double]
number = 5

class Own:
    def __init__(self, size: int = 3):
        self.size = size

    def reset(self, row, seed):
        return None

    def double(self, x: int) -> int:
        """Double."""
        return 2 * x

class Inner:
    Own = Own

class NoReset:
    def step(self, message):
        return None, None, True

class Half(Own):
    def state(self):
        return {}

class BadStep(Own):
    def step(self, message, more):
        pass

class OldReset(Own):
    def reset(self):
        return None

    def step(self, message):
        return None, None, True

class NoCall(Own):
    def tool_schemas(self):
        return []

class Trl:
    """As TRL's documentation writes one."""
    def __init__(self):
        self.reward = 0.0

    def reset(self, word: str, **kwargs) -> str | None:
        self.word = word
        return None if kwargs.get("quiet") else " Begin."

    def step(self, letter: str) -> str:
        """Guess a letter.

        Args:
            letter: The letter.
        """
        self.reward += letter in self.word
        return "yes" if letter in self.word else "no"

class Judged(Trl):
    def reset(self, prompt):
        self.word = prompt[-1]["content"]
        return [{"type": "text", "text": "!"}]

    def get_reward(self) -> float:
        """Return the reward, which is no tool."""
        return {"score": 0.5, "part": 1}

class Images(Trl):
    def reset(self, sound=None, **kwargs):
        seen = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "See."}]
        return {"sound": sound} if sound else seen

large = functools.partial(Own, size=30)
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return str(path)


@pytest.mark.parametrize(
    ("name", "kind", "hello"),
    [
        ("Own", "class", "class Own"),
        ("Inner.Own", "class", "class Own"),
        ("large", "class", "class Own"),
        ("Trl", "trl", "TRL's class Trl"),
        ("tools", "tools", "tools double, half"),
        ("double", "tools", "tools double"),
    ],
)
def test_forms(file, name, kind, hello):
    form = load(f"{file}:{name}")
    assert (form.kind, form.hello) == (kind, hello)
    environment = form.make({})
    assert tool_of(functions_of(environment)[0]).name == ("step" if kind == "trl" else "double")


def test_settings_are_keyword_arguments(file):
    assert load(f"{file}:Own").make({"size": 4}).size == 4
    assert load(f"{file}:large").make({}).size == 30
    for name, settings in [("Own", {"sizes": 4}), ("tools", {"size": 4}), ("Trl", {"x": 1})]:
        with pytest.raises(ValueError, match=r"its settings \(given: \w+\) do not fit"):
            load(f"{file}:{name}").make(settings)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "FILE:Nothing",
            r"mine.py has no Nothing \(it has: Held, double, half, bare, tools, .*large\)",
        ),
        ("FILE:number", "is of the type int: name a class, a function that is a tool, or a list"),
        ("FILE:empty", "is an empty list"),
        ("FILE:twice", "has two tools named double: rename one"),
        ("FILE:bare", "bare is not a tool: .*docstring"),
        ("FILE:NoReset", r"has no reset: write def reset\(self, row, seed\)"),
        ("FILE:Half", "has state without restore: write both or neither"),
        ("FILE:NoCall", "has tool_schemas without call"),
        ("FILE:BadStep", r"step of .* is called as def step\(self, message\): missing a required argument: 'more'"),
        ("FILE:OldReset", r"reset of .* is called as def reset\(self, row, seed\)"),
        ("FILE", "names no environment: write file.py:Class"),
        ("nowhere.py:Own", "there is no file nowhere.py"),
        ("no.such.module:Own", "importing no.such.module raised ModuleNotFoundError"),
        ("guess", "names no environment: .* builtin:guess"),
        ("builtin:gues", r"there is no builtin:gues: did you mean builtin:guess\? Built-in ones: guess"),
    ],
)
def test_names_that_are_none(file, name, says):
    with pytest.raises(ValueError, match=says):
        load(name.replace("FILE", file))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("class Own(:\n", "bad.py:1: invalid syntax"),
        ("import nosuchmodule\n", "importing .*bad.py raised ModuleNotFoundError: .*bad.py:1"),
        ("import sys\nsys.exit(3)\n", "importing .*bad.py raised SystemExit: 3 .*bad.py:2"),
    ],
)
def test_files_that_do_not_load(tmp_path, text, says):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ValueError, match=says):
        load(f"{tmp_path / 'bad.py'}:Own")


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.py").write_text(USER_FILE.replace("size: int = 3", f"size: int = {ord(name)}"))
    assert [load(f"{tmp_path / name / 'same.py'}:Own").make({}).size for name in ("a", "b", "a")] == [97, 98, 97]


def test_class_of_trl(file):
    """trl 1.16, grpo_trainer.py: reset gets the columns, its text is appended to the last message."""
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "Guess."}]
    environment = load(f"{file}:Trl").make({})
    assert environment.reset({"prompt": prompt, "word": "abc", "more": 1}, 0)[-1]["content"] == "Guess. Begin."
    assert prompt[-1]["content"] == "Guess.", "the row is left as it is"
    assert environment.reset({"prompt": prompt, "word": "abc", "quiet": True}, 0) == prompt
    assert environment.reset({"word": "abc"}, 0) == [{"role": "user", "content": " Begin."}]
    assert environment.reset({"prompt": "text", "word": "abc"}, 0) == [{"role": "user", "content": "text Begin."}]
    assert [tool.__name__ for tool in environment.tools] == ["step"]
    assert environment.tools[0](letter="a") == "yes" and environment.reward() == 1.0
    judged = load(f"{file}:Judged").make({})
    told = judged.reset({"prompt": prompt, "no": "parameter"}, 0)
    assert messages_of(told, "reset", 100, "head")[0][-1]["content"] == "Guess.!"
    assert [tool.__name__ for tool in judged.tools] == ["step"]
    assert judged.reward() == {"score": 0.5, "part": 1}
    shows, seen = (
        load(f"{file}:Images").make({}),
        [{"type": "image", "image": "a.png"}, {"type": "text", "text": "See."}],
    )
    assert shows.reset({"prompt": prompt}, 0)[-1]["content"] == [{"type": "text", "text": "Guess."}, *seen]
    assert shows.reset({}, 0) == [{"role": "user", "content": seen}]
    with pytest.raises(TypeError, match="a text, parts or None, and returned dict"):
        shows.reset({"prompt": prompt, "sound": "a.wav"}, 0)


# ── the built-in game ────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", range(1, 9))
def test_halving_finds_every_number(number):
    for name in ("guess", "guess_tool"):
        game = load(f"builtin:{name}").make({"numbers": 8, "turns": 4, "late": 0.1})
        assert game.reset({"number": number}, 0) == "guess 1-8:"
        low, high, used, done, reward = 1, 8, 0, False, None
        while not done:
            middle = (low + high) // 2
            if name == "guess":
                text, reward, done = game.step({"role": "assistant", "content": f"i say {middle}"})
            else:
                answer = game.guess(middle)
                text, reward, done = answer.text, answer.reward, answer.done
            low, high = (middle + 1, high) if text == "higher" else (low, middle - 1)
            used += 1
        assert reward == pytest.approx(1 - 0.1 * (used - 1)) and used <= 4


def test_game_ends_without_the_number_and_goes_on_from_its_state():
    game = Guess(numbers=3, turns=2)
    game.reset({"number": 3, "prompt": "own"}, 0)
    assert game.step({"content": "no idea"}) == ("no number", None, False)
    other = Guess(numbers=3, turns=2)
    other.reset({"number": 3}, 0)
    other.restore(json.loads(json.dumps(game.state())))
    assert game.step({"content": "1"}) == other.step({"content": "1"}) == (None, 0.0, True)
    drawn = set()
    for seed in range(50):
        game.reset({}, seed)
        assert game._number == random.Random(seed).randint(1, 3)
        drawn.add(game._number)
    assert drawn == {1, 2, 3}
    for bad in ({"numbers": 0}, {"turns": 0}, {"late": 0.6}):
        with pytest.raises(ValueError, match="must be 1 or more"):
            Guess(numbers=bad.get("numbers", 3), turns=bad.get("turns", 2), late=bad.get("late", 0.0))


def test_texts_of_the_game_are_known_to_the_tiny_tokenizer():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TINY))
    for text in ("guess 1-8:", "higher", "lower", "yes", "no number"):
        assert tokenizer.decode(tokenizer.encode(text).ids).replace(" ", "") == text.replace(" ", "")
