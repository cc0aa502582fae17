"""Previews a job's rows before it runs: one row as the model sees it, and counts over the first rows."""

import re
import sys
from collections import Counter
from itertools import pairwise
from typing import Any

from spmdrl.data.mixture import Mixture
from spmdrl.data.row_columns import Row, unread_line
from spmdrl.data.shown import UNSHOWN, unshown_line
from spmdrl.data.tokens import Masked
from spmdrl.supervised.rows import Encode
from spmdrl.tracking.console import clean

ROWS = 200
"""Maximum number of rows that a preview reads."""
SHOWN = 2
"""Maximum number of sequences to show from the example row; a pair has two."""
LONGEST = 1500
"""Maximum number of characters to show from each sequence of the example row."""
REPEATED = re.compile(r"(<[^<>\s]{2,40}>)\1{3,}")
"""A control token that stands four times or more in a row, such as the placeholder of an image."""
GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


def preview(encode: Encode, tokenizer: Any, mixture: Mixture, colour: bool | None = None) -> list[str]:
    """Return lines that describe the first rows: counts, and one example row with its trained text marked.

    The trained text is green, or enclosed in [[ ]] without colour.

    colour: whether to use colour, or None to use it only if stdout is a terminal.

    Raises:
        ValueError: none of the first rows can be trained on.
    """
    notes, refused, unread = Counter(), [], dict[str, None]()
    sequences: list[Masked] = []
    example, pieces = "", list[Masked]()
    for drawn in mixture.draw(min(ROWS, mixture.rows or ROWS)):
        try:
            row = Row(drawn.read())
            found = encode(row)
        except ValueError as error:
            refused.append(f"{drawn.where}: {error}")
            continue
        notes += found.notes
        unread |= dict.fromkeys(row.unread)
        sequences += found.sequences
        if found.sequences and not pieces:
            example, pieces = drawn.where, found.sequences[:SHOWN]
    if not sequences:
        dropped = f"; sequences longer than --data.max-tokens: {notes['dropped']}" if notes["dropped"] else ""
        raise ValueError("\n  ".join([f"none of the first rows can be trained on{dropped}", *refused[:5]]))
    tokens, trained = sum(map(len, sequences)), sum(int(s.mask.sum()) for s in sequences)
    hidden = [name for name in notes if name.endswith(UNSHOWN)]
    counts = "".join(f"; {count} {name}" for name, count in notes.items() if count and name not in hidden)
    lines = [
        f"rows     the first ones give {len(sequences)} sequences of {tokens / len(sequences):,.0f} tokens on average, "
        f"{max(map(len, sequences)):,} at most; {trained / tokens:.0%} of the tokens are trained{counts}",
        *([f"columns  {unread_line(unread)}"] if unread else []),
        *([f"columns  {unshown_line(name.removesuffix(f' {UNSHOWN}') for name in hidden)}"] if hidden else []),
        *(f"refused  {line}" for line in refused[:3]),
        *([f"refused  {len(refused) - 3} more"] if len(refused) > 3 else []),
    ]
    coloured = sys.stdout.isatty() if colour is None else colour
    lines.append(f"example  {example}, the trained text {'in green' if coloured else 'in [[ ]]'}:")
    for number, piece in enumerate(pieces):
        lines += ["  ---"] * (number > 0) + [f"  {line}" for line in shown(piece, tokenizer, coloured).split("\n")]
    return lines


def shown(sequence: Masked, tokenizer: Any, colour: bool) -> str:
    """Return the text of a sequence with its trained spans in green or in [[ ]]. Control characters become dots.

    A repeated control token is shown once, with its count.
    """
    mask = sequence.mask.tolist()
    cuts = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    begin, end = (GREEN, PLAIN) if colour else ("[[", "]]")
    out, room = "", LONGEST
    for start, stop in pairwise(cuts):
        text = tokenizer.decode(sequence.tokens[start:stop].tolist(), clean_up_tokenization_spaces=False)
        text = REPEATED.sub(lambda found: f"{found[1]} (x {len(found[0]) // len(found[1])}) ", text)
        part = "\n".join(clean(line, LONGEST) for line in text[:room].split("\n"))
        room -= len(text)
        out += f"{begin}{part}{end}" if mask[start] else part
        if room <= 0:
            return out + " ..."
    return out
