"""Commands that write the files of a first environment, and that try an environment in the terminal.

    python -m spmdrl.env init NAME             writes NAME.py, a small environment, and test_NAME.py
    python -m spmdrl.env try ENVIRONMENT       plays an episode by hand: you are the assistant
    python -m spmdrl.env try ENVIRONMENT --model FOLDER [--episodes 2]      lets a model play

ENVIRONMENT is a value of `--env`: file.py:Class, package.module:Class, builtin:guess, or a YAML file of settings. The
flags --set, --python, --turns and --format override the settings of the YAML file.
"""

import argparse
import json
import keyword
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from spmdrl.config.environment import ROWS, read_environment
from spmdrl.data.images import has_items
from spmdrl.env.base import limits_of
from spmdrl.env.calls import FORMATS
from spmdrl.env.pictures import row_with_images
from spmdrl.env.play import Play, PlayError
from spmdrl.env.terminal import by_hand, by_model, load_player

PROG = "python -m spmdrl.env"
TEMPLATES = Path(__file__).resolve().parents[1] / "assets" / "environment"
"""Folder with the templates for the two files that `init` writes. They are filled in with `str.format`."""


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit code: 1 if the environment failed, 2 if the user made a mistake."""
    args = _parser().parse_args(argv)
    try:
        if args.command == "init":
            file, test = _init(args.name)
            print(f"wrote {file} and {test}; test it with: python -m pytest {test}")
            return 0
        return _try(args)
    except (ValueError, PlayError) as error:
        print(f"{PROG} {args.command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, PlayError) else 2
    except KeyboardInterrupt:
        print()
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    init = commands.add_parser("init", help="write a small environment as a start, and a test for it")
    init.add_argument("name", help="NAME or folder/NAME, without .py")
    trial = commands.add_parser("try", help="play an environment, by hand or with a model")
    trial.add_argument(
        "name", metavar="ENVIRONMENT", help="file.py:Class, package.module:Class, builtin:guess, or a YAML file"
    )
    trial.add_argument(
        "--row",
        default="{}",
        help="row of the data as a JSON object; its `prompt` is text or messages, its `images` are paths",
    )
    trial.add_argument("--seed", type=int, default=0, help="seed of the first episode; each later one adds 1")
    trial.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="argument of the class; VALUE is JSON or text"
    )
    trial.add_argument("--python", default="", help="Python interpreter with the environment's packages and PyYAML")
    trial.add_argument("--model", default="", help="folder or name of a Hugging Face model that plays")
    trial.add_argument("--episodes", type=int, default=1, help="number of episodes that the model plays")
    trial.add_argument("--turns", type=int, help="most turns of the model in an episode (default: max_turns, 16)")
    trial.add_argument("--format", default="", help="form of tool calls (default: read from the chat template)")
    trial.add_argument("--max-new-tokens", type=int, default=256, help="most tokens of a turn of the model")
    trial.add_argument("--temperature", type=float, default=1.0, help="sampling temperature; 0 for greedy decoding")
    return parser


def _init(name: str) -> tuple[Path, Path]:
    """Write `NAME.py` and `test_NAME.py`, and return both paths. `name` may begin with folders, which are created.

    Raises:
        ValueError: `name` is not a valid Python module name or belongs to another module, or one of the files exists.
    """
    path = Path(name.removesuffix(".py"))
    stem = path.name
    if not stem.isidentifier() or keyword.iskeyword(stem):
        raise ValueError(f"{name!r} is not a valid name of a Python module: use letters, digits and _")
    file, test = path.with_name(f"{stem}.py"), path.with_name(f"test_{stem}.py")
    for each in (file, test):
        if each.exists():
            raise ValueError(f"{each} exists already: choose another name, or remove the file")
    if stem in sys.stdlib_module_names or _is_installed(stem):
        raise ValueError(f"{file} would hide the module {stem} of Python or of a package: choose another name")
    kind = "".join(part[:1].upper() + part[1:] for part in stem.split("_")) or stem
    words = {"file": file.name, "test": test.name, "kind": kind if kind.isidentifier() else f"E{kind}"}
    file.parent.mkdir(parents=True, exist_ok=True)
    for each, template in ((file, "boxes.py.txt"), (test, "test_boxes.py.txt")):
        with each.open("x", encoding="utf-8") as out:  # "x" never overwrites a file, not even one made since the check
            out.write((TEMPLATES / template).read_text(encoding="utf-8").format(**words))
    return file, test


def _is_installed(name: str) -> bool:
    """Return whether Python finds a module with this name outside the working directory."""
    spec = PathFinder.find_spec(name, [each for each in sys.path if each and Path(each).resolve() != Path.cwd()])
    return spec is not None and spec.loader is not None


def _try(args: argparse.Namespace) -> int:
    row, found = _row(args.row), read_environment(args.name)
    if found.environment == ROWS:
        raise ValueError(f"{args.name}: each row of the data names an environment; give the name from one of the rows")
    settings = found.settings | _settings(args.set)
    args.turns = found.max_turns if args.turns is None else args.turns
    args.format = args.format or ("" if found.calls == "auto" else found.calls)
    for flag in ("episodes", "turns", "max_new_tokens"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be 1 or more")
    if args.temperature < 0:
        raise ValueError("--temperature must be 0 or more")
    if args.format not in ("", *FORMATS):
        raise ValueError(f"--format {args.format!r} must be one of {', '.join(FORMATS)}")
    if args.python and not shutil.which(args.python):
        raise ValueError(f"--python {args.python}: this interpreter was not found")
    with Play(found.environment, settings, limits_of(found, args.python)) as play:
        print(f"{args.name}: {play.hello}")
        if not args.model:
            by_hand(play, row, args.seed)
            return 0
        player = load_player(args.model, args.format, args.max_new_tokens, args.temperature, args.seed)
        total = 0.0
        for number in range(args.episodes):
            print(f"\n-- episode {number + 1}, seed {args.seed + number}")
            total += by_model(play, player, row, args.seed + number, args.turns)
        print(f"\nepisodes: {args.episodes}; rewards of an episode on average: {total / args.episodes:g}")
        return 0


def _row(text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--row is not valid JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError('--row must be a JSON object of columns, such as {"prompt": "..."}')
    return row_with_images(row) if has_items(row, text_only=True) else row


def _settings(given: list[str]) -> dict[str, Any]:
    out = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"--set {each!r}: write KEY=VALUE")
        try:
            out[key] = json.loads(value)
        except ValueError:
            out[key] = value
    return out


if __name__ == "__main__":
    sys.exit(main())
