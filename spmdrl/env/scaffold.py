"""Writes an environment to begin with, and a test for it."""

import keyword
import sys
from importlib.machinery import PathFinder
from pathlib import Path

ENVIRONMENT = '''"""Boxes: one of them holds a coin. Try it: python -m spmdrl.env try {file}:{kind}"""

import random


class {kind}:
    """The policy opens boxes until it finds the coin, and gets less for each box that was empty."""

    timeout_s = 5.0

    def __init__(self, boxes: int = 3):
        self.boxes = boxes

    def reset(self, row: dict, seed: int) -> str:
        """Begin an episode; return messages, the text of the user, or None for the prompt of the row."""
        self.coin = random.Random(seed).randint(1, self.boxes)
        self.opened: list[int] = []
        return f"One of {{self.boxes}} boxes holds a coin. Open boxes until you find it, then say: done."

    def open_box(self, number: int) -> str:
        """Open a box and look into it.

        Args:
            number: The box, from 1.
        """
        if not 1 <= number <= self.boxes:
            raise ValueError(f"there are boxes 1 to {{self.boxes}}")
        self.opened.append(number)
        return "the coin is here" if number == self.coin else "empty"

    def reward(self) -> float:
        """Grade the episode at its end."""
        return 1.0 / len(self.opened) if self.coin in self.opened else 0.0
'''
TEST = '''"""python -m pytest {test}"""

from pathlib import Path

from spmdrl.env.play import Play

NAME = f"{{Path(__file__).parent / '{file}'}}:{kind}"


def test_the_coin_is_found():
    with Play(NAME, {{"boxes": 2}}) as play:
        opened = play.open(seed=0)
        assert "2 boxes" in opened.messages[0]["content"]
        assert [tool["function"]["name"] for tool in opened.tools] == ["open_box"]
        found = [play.call("open_box", number=n).messages[0]["content"] for n in (1, 2)]
        assert sorted(found) == ["empty", "the coin is here"]
        assert play.say("done").done
        assert play.score().reward == 0.5


def test_the_seed_decides_where_it_is_and_wrong_calls_are_answered():
    with Play(NAME) as play:
        seen = []
        for seed in (1, 1, 2, 3, 4, 5):
            play.open(seed=seed)
            seen.append(tuple(play.call("open_box", number=n).messages[0]["content"] for n in (1, 2, 3)))
        assert seen[0] == seen[1] and len(set(seen)) > 1
        assert "boxes 1 to 3" in play.call("open_box", number=9).messages[0]["content"]
        assert "number" in play.call("open_box").messages[0]["content"]
        assert play.call("open_box", number=2).reward is None
'''


def scaffold(name: str) -> tuple[Path, Path]:
    """Write `NAME.py` and `test_NAME.py`, and return both. name: may begin with folders, which are made.

    Raises:
        ValueError: it is no name of a Python module, that of an installed one, or one of the files is there.
    """
    path = Path(name.removesuffix(".py"))
    stem = path.name
    if not stem.isidentifier() or keyword.iskeyword(stem):
        raise ValueError(f"{name!r} is no name of a Python module: take letters, digits and _")
    file, test = path.with_name(f"{stem}.py"), path.with_name(f"test_{stem}.py")
    for each in (file, test):
        if each.exists():
            raise ValueError(f"{each} is there already: take another name, or remove it")
    if stem in sys.stdlib_module_names or _is_installed(stem):
        raise ValueError(f"{stem} is a module of Python or of a package, which {file} would hide: take another name")
    kind = "".join(part[:1].upper() + part[1:] for part in stem.split("_")) or stem
    words = {"file": file.name, "test": test.name, "kind": kind if kind.isidentifier() else f"E{kind}"}
    file.parent.mkdir(parents=True, exist_ok=True)
    # Made anew: a file that appeared meanwhile stays as it is.
    for each, text in ((file, ENVIRONMENT), (test, TEST)):
        with each.open("x", encoding="utf-8") as out:
            out.write(text.format(**words))
    return file, test


def _is_installed(name: str) -> bool:
    """True if the name is that of a module beyond the folder in which Python was started."""
    spec = PathFinder.find_spec(name, [each for each in sys.path if each and Path(each).resolve() != Path.cwd()])
    return spec is not None and spec.loader is not None
