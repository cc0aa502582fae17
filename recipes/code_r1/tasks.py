"""Makes easy programming tasks in the format of HumanEval: one function each, with a docstring, a solution and tests.

    python recipes/code_r1/tasks.py FOLDER [--held-out 96] [--seed 0]

It writes FOLDER/train.jsonl and FOLDER/held_out.jsonl. Two tasks differ in their operation or in its number. The
columns are those of https://github.com/openai/human-eval: task_id, prompt, entry_point, canonical_solution, test.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

NUMBERS = range(2, 26)
INTEGERS = (0, 1, 7, -4, 30, 125)
TEXTS = ("", "a", "spam and eggs", "a much longer text, which has more than thirty characters")
LISTS = ([], [3], [5, 1, 12, 8], [30, -2, 7, 7, 19, 2, 11])
KINDS: dict[str, tuple[str, str, str]] = {
    # Description of the result -> kind and name of the argument, expression of the result. {n} is a number.
    "x plus {n}": ("number", "x", "x + {n}"),
    "x minus {n}": ("number", "x", "x - {n}"),
    "{n} minus x": ("number", "x", "{n} - x"),
    "x times {n}": ("number", "x", "x * {n}"),
    "the square of x plus {n}": ("number", "x", "x * x + {n}"),
    "the remainder of x divided by {n}": ("number", "x", "x % {n}"),
    "the larger one of x and {n}": ("number", "x", "max(x, {n})"),
    "True if x is greater than {n}": ("number", "x", "x > {n}"),
    "True if x can be divided by {n}": ("number", "x", "x % {n} == 0"),
    "the first {n} characters of s": ("text", "s", "s[:{n}]"),
    "s repeated {n} times": ("text", "s", "s * {n}"),
    "True if s has more than {n} characters": ("text", "s", "len(s) > {n}"),
    "the length of s plus {n}": ("text", "s", "len(s) + {n}"),
    "the sum of xs plus {n}": ("list", "xs", "sum(xs) + {n}"),
    "the number of items in xs times {n}": ("list", "xs", "len(xs) * {n}"),
    "the items of xs that are greater than {n}": ("list", "xs", "[x for x in xs if x > {n}]"),
    "a list of the items of xs, each times {n}": ("list", "xs", "[x * {n} for x in xs]"),
    "how often {n} is in xs": ("list", "xs", "xs.count({n})"),
    "the distance between x and {n}": ("number", "x", "abs(x - {n})"),
    "the last digit of x plus {n}": ("number", "x", "(x + {n}) % 10"),
    "the last {n} characters of s": ("text", "s", "s[-{n}:]"),
    "s in upper case, repeated {n} times": ("text", "s", "s.upper() * {n}"),
    "the sum of the items of xs that are greater than {n}": ("list", "xs", "sum(x for x in xs if x > {n})"),
    "the smallest item of xs, or {n} if xs is empty": ("list", "xs", "min(xs, default={n})"),
}
ARGUMENTS = {"number": INTEGERS, "text": TEXTS, "list": LISTS}


def tasks() -> Iterator[dict[str, str]]:
    """Yield all tasks as rows of HumanEval."""
    for place, (result, (kind, name, returns)) in enumerate(KINDS.items()):
        for n in NUMBERS:
            solution = returns.format(n=n)
            wanted = [(each, eval(solution, {name: each})) for each in ARGUMENTS[kind]]
            checks = "".join(f"    assert candidate({each!r}) == {value!r}\n" for each, value in wanted)
            yield {
                "task_id": f"easy/{place}/{n}",
                "prompt": f'def solve({name}):\n    """Return {result.format(n=n)}."""\n    return',
                "entry_point": "solve",
                "canonical_solution": f" {solution}\n",
                "test": f"def check(candidate):\n{checks}",
            }


def main() -> None:
    """Write FOLDER/train.jsonl and FOLDER/held_out.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--held-out", type=int, default=96, help="tasks kept out of training")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order, which decides the held-out tasks")
    args = parser.parse_args()
    every = list(tasks())
    random.Random(args.seed).shuffle(every)
    if not 0 < args.held_out < len(every):
        parser.error(f"--held-out {args.held_out}: must be a number from 1 to {len(every) - 1}")
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("held_out", every[: args.held_out]), ("train", every[args.held_out :])):
        (args.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{len(rows)} tasks in {args.folder / name}.jsonl")


if __name__ == "__main__":
    main()
