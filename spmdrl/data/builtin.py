"""Small tasks generated from a fixed seed. They need no download, and held-out rows do not occur in training.

The `episodes` task is an exception: all its rows are equal.
"""

import difflib
import random

LETTERS = "abcdefghij"
REVERSE_EVAL, REVERSE_TRAIN = 512, 4096
ADDITION_EVAL = {1: 20, 2: 160}
"""Maps a number of digits to its number of held-out ordered pairs: 20 of 100 for one digit, 160 of 8,100 for two."""
ADDITION_TRAIN = 4000


def reverse(held_out: bool) -> list[dict]:
    """Return rows for reversing five letters (`abcde=` -> `edcba`): 512 held-out rows, or 4,096 for training."""
    codes = random.Random("spmdrl reverse").sample(range(len(LETTERS) ** 5), REVERSE_EVAL + REVERSE_TRAIN)
    texts = ["".join(LETTERS[code // len(LETTERS) ** i % len(LETTERS)] for i in range(5)) for code in codes]
    side = texts[:REVERSE_EVAL] if held_out else texts[REVERSE_EVAL:]
    return [{"prompt": text + "=", "answer": text[::-1]} for text in side]


def reverse_pairs(held_out: bool) -> list[dict]:
    """Return the rows of `reverse`, each with a correct response and a wrong one with two adjacent letters swapped.

    Rows of five equal letters are omitted, because swapping letters would not make the response wrong.
    """
    rng, rows = random.Random("spmdrl pairs"), []
    for row in reverse(held_out):
        right = row["answer"]
        places = [i for i in range(len(right) - 1) if right[i] != right[i + 1]]
        if places:
            i = rng.choice(places)
            wrong = right[:i] + right[i + 1] + right[i] + right[i + 2 :]
            rows.append(row | {"chosen": right, "rejected": wrong})
    return rows


def reverse_steps(held_out: bool) -> list[dict]:
    """Return the rows of `reverse` with a response of five labelled steps, one per letter.

    In about half of the rows, one letter of the answer is replaced by a letter that no prompt contains; its step and
    all later steps are labelled false.
    """
    rng, rows = random.Random("spmdrl steps"), []
    for row in reverse(held_out):
        steps = list(row["answer"])
        wrong = rng.randrange(len(steps)) if rng.random() < 0.5 else len(steps)
        if wrong < len(steps):
            steps[wrong] = rng.choice("klmnopqrstuvwxyz")
        rows.append(row | {"completions": steps, "labels": [i < wrong for i in range(len(steps))]})
    return rows


def addition(digits: int, held_out: bool) -> list[dict]:
    """Return rows for adding two numbers of 1 (0..9) or 2 (10..99) digits.

    If a + b is held out, so is b + a. One-digit addition has 80 training pairs and 20 held-out pairs; two-digit
    addition has 4,000 training pairs and 160 held-out pairs.
    """
    low, high = (0, 10) if digits == 1 else (10, 100)
    unordered = [(a, b) for a in range(low, high) for b in range(a, high)]
    rng = random.Random(f"spmdrl addition {digits}")
    rng.shuffle(unordered)
    sides: tuple[list, list] = ([], [])
    for a, b in unordered:
        orders = [(a, b)] if a == b else [(a, b), (b, a)]
        sides[len(sides[1]) + len(orders) <= ADDITION_EVAL[digits]].extend(orders)
    for side in sides:
        rng.shuffle(side)
    return [
        {"prompt": f"What is {a} + {b}? Answer with just the number.", "answer": str(a + b), "a": a, "b": b}
        for a, b in (sides[1] if held_out else sides[0][:ADDITION_TRAIN])
    ]


def episodes(held_out: bool) -> list[dict]:
    """Return 512 (held out) or 4,096 identical rows with an empty prompt, for environments that need only a seed."""
    return [{"prompt": "", "answer": ""} for _ in range(REVERSE_EVAL if held_out else REVERSE_TRAIN)]


BUILTINS = {
    "episodes": episodes,
    "reverse": reverse,
    "reverse-pairs": reverse_pairs,
    "reverse-steps": reverse_steps,
    "addition-1": lambda held_out: addition(1, held_out),
    "addition-2": lambda held_out: addition(2, held_out),
}
RAW = {"reverse", "reverse-pairs", "reverse-steps"}
"""Tasks whose prompts are plain text even if the tokenizer has a chat template."""


def nearest(name: str, names) -> str:
    """Return a hint for an error message: a suggestion if a known name is close, then up to 40 known names."""
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1)
    shown = ", ".join(names[:40]) + (f", ... ({len(names)} in all)" if len(names) > 40 else "")
    return (f"did you mean {close[0]!r}? " if close else "") + f"known: {shown}"


def builtin_rows(name: str, held_out: bool) -> list[dict]:
    """Return the rows of a named task. Raises ValueError for an unknown name; the message suggests a close one."""
    if name not in BUILTINS:
        raise ValueError(f"unknown task 'builtin:{name}': {nearest(name, BUILTINS)} (--data.train, --data.eval)")
    return BUILTINS[name](held_out)
