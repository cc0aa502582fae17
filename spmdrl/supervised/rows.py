"""Draws each step's rows identically on all ranks, encodes each row on one rank, and counts and logs rejected rows."""

import logging
import math
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from spmdrl.config.supervised import SupervisedConfig, split_weight
from spmdrl.data.batch import Batch
from spmdrl.data.mixture import Blocks, Drawn, Mixture, Permuted
from spmdrl.data.placeholders import with_images
from spmdrl.data.row_columns import Row, unread_line
from spmdrl.data.rowfiles import Table, open_rows
from spmdrl.data.shown import UNSHOWN, unshown_line
from spmdrl.data.tokens import Masked
from spmdrl.spmd.exchange import all_gather_text, all_reduce
from spmdrl.spmd.seeds import seed_for
from spmdrl.spmd.world import World
from spmdrl.supervised.encoder import Encoded

log = logging.getLogger("spmdrl")

Placed = list[tuple[int, int, Masked]]
"""For each sequence: (index of its row in the step, index of the sequence in the row, sequence)."""

STRIDE = 0x9E3779B1
"""Multiplier of a token's position in its noise seed, so that neighboring tokens have seeds that differ in many
bits."""
FEW = 1000
"""Minimum denominator for the fraction of rejected rows. For a smaller dataset, it is the dataset's number of rows."""
COUNTED = ("rows", "refused", "truncated", "dropped", "split", "departs", "unstopped", "unanswered")
"""Names of a step's counts, in the order of the tensor that is reduced over ranks."""
NAMED = ("truncated", "dropped", "unanswered")
"""Names of the counts whose rows are logged, because these rows are trained on only partly or not at all."""


def open_mixture(cfg: SupervisedConfig) -> Mixture:
    """Open the sources of `--data.train`.

    Raises:
        ValueError: a source cannot be read or is empty, or its weight or `--data.limit` is not allowed.
    """
    data, seed = cfg.data, cfg.run.seed
    pairs = [split_weight(spec) for spec in data.train]
    parts: list[Permuted | Blocks] = []
    joined: list[Any] = []
    for number, (spec, weight) in enumerate(pairs):
        source: Any = open_rows(spec)
        if hasattr(source, "rows"):
            if data.limit:
                raise ValueError(
                    f"--data.limit {data.limit}: {spec} is a stream; limit its rows with --run.steps instead"
                )
            parts.append(Blocks(source, seed + number, data.shuffle))
            continue
        if data.limit and len(source) > data.limit:
            source = Table(source.name, [source[i] for i in range(data.limit)])
        if not len(source):
            raise ValueError(f"{spec} holds no rows (--data.train)")
        if weight is None:
            joined.append(source)
        else:
            parts.append(Permuted([source], seed + number, data.shuffle))
    if joined:
        if parts:
            raise ValueError(
                "--data.train: give each source a weight, as in a.jsonl=0.7, because one of them has a weight or is a "
                "stream"
            )
        return Mixture([Permuted(joined, seed, data.shuffle)], [1.0])
    weights = [weight if weight is not None else 1.0 for _, weight in pairs]
    return Mixture(parts, weights)


def rows_due(cfg: SupervisedConfig, rows: int | None, step: int) -> int:
    """Return the number of rows in a step. In a job that is limited by its epochs, the last step can have fewer rows.

    rows: number of rows per epoch, or None if unknown. step: step number, starting at 0.
    """
    each = cfg.data.rows_per_step
    if rows is None or cfg.run.steps != steps_of_epochs(cfg, rows):
        return each
    return min(each, math.ceil(cfg.data.epochs * rows) - step * each)


def steps_of_epochs(cfg: SupervisedConfig, rows: int) -> int:
    """Return the number of steps in all epochs. rows: number of rows per epoch."""
    return math.ceil(cfg.data.epochs * rows / cfg.data.rows_per_step)


class Encode(Protocol):
    """Turns a dataset row into its sequences."""

    beside: bool
    """Whether encoding a row also uses the previous row of the step. The first row then uses the last row."""

    def __call__(self, row: dict, before: dict | None = None) -> Encoded:
        """Encode a row. before: the previous row (see `beside`), or None if it cannot be read or `beside` is False.

        Raises:
            RowError: the row cannot be used.
            TemplateError: the template rejects the row, or the tokens of a turn cannot be determined.
        """
        ...


class Precomputed(Protocol):
    """Computes per-token values of the rows before the models are built, such as a reference's log p."""

    def fill(self, mixture: Mixture, held_out: Any) -> None:
        """Compute missing values. Collective. held_out: the source of the held-out rows, or None."""
        ...

    def attach(self, key: Any, sequences: list[Masked]) -> None:
        """Add a row's values to its sequences as columns. Raises ValueError if the row has no values.

        key: (name of the row's source, index of the row in that source).
        """
        ...


@dataclass
class Step:
    """This rank's encoded rows of one step."""

    sequences: Placed = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    kept: int = 0
    """Number of rows with a trained token."""
    unread: dict[str, None] = field(default_factory=dict)
    """Names of the columns that the encoder did not use, in the order found."""
    refused: list[str] = field(default_factory=list)
    """One line per rejected row, with its source, number and the reason."""
    shortened: list[str] = field(default_factory=list)
    """One line per row that has counts in `NAMED`: the row's source, its number and the names of these counts."""

    def name_rows(self) -> None:
        """Write the lines in `refused` and `shortened` to this rank's log file."""
        for line in self.refused:
            log.warning("refused: %s", line, extra={"file_only": True})
        for line in self.shortened:
            log.info("left out in part: %s", line, extra={"file_only": True})


class Rows:
    """Draws and encodes the rows of each step. A thread reads and encodes the next step's rows in advance."""

    def __init__(
        self, cfg: SupervisedConfig, world: World, mixture: Mixture, encoder: Encode, known: Precomputed | None = None
    ):
        self.cfg, self.world, self.mixture, self.encoder, self.known = cfg, world, mixture, encoder, known
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self.ahead: tuple[int, Future[Step], dict] | None = None
        self.returned = mixture.state()
        """State of the mixture after the last step returned by `take`."""
        self.totals: Counter = Counter()
        """Numbers of rows, rejected rows and rows with a trained token, over all ranks and steps so far."""

    def take(self, step: int, last: bool) -> tuple[Step, Counter]:
        """Return this rank's rows of a step, and counts over all ranks. Collective.

        last: whether this is the last step, so that no further step is prefetched.

        Raises:
            ValueError: on all ranks, if more rows were rejected than `--data.max-refused` allows, or if there was no
                row to train on.
        """
        if self.ahead is None:
            self._begin(step)
        assert self.ahead is not None and self.ahead[0] == step
        _, future, self.returned = self.ahead
        self.ahead = None
        mine = future.result()
        if not last:
            self._begin(step + 1)
        mine.name_rows()
        if not self.totals and self.world.is_first:
            hidden = [name.removesuffix(f" {UNSHOWN}") for name in mine.counts if name.endswith(UNSHOWN)]
            for line in filter(None, (unread_line(mine.unread), unshown_line(hidden))):
                log.warning("%s (--data.train)", line)
        sums = torch.tensor([*(mine.counts[name] for name in COUNTED), mine.kept], dtype=torch.int64)
        *numbers, kept = all_reduce(sums, "sum", self.world.host_group).tolist()
        counts = Counter(dict(zip(COUNTED, numbers, strict=True)))
        self.totals += Counter({"rows": counts["rows"], "refused": counts["refused"], "kept": kept})
        if counts["refused"]:
            self._check_refused(mine)
        self._check_kept(last)
        return mine, counts

    def _check_refused(self, mine: Step) -> None:
        allowed = self.cfg.data.max_refused
        # A fraction of only a few rows is noisy, so the denominator is at least FEW, or the size of a smaller dataset.
        judged = max(self.totals["rows"], min(self.mixture.rows or FEW, FEW))
        if self.totals["refused"] > allowed * judged:
            raise too_many_refused(self.totals["refused"], self.totals["rows"], allowed, mine.refused, self.world)

    def _check_kept(self, last: bool) -> None:
        """Raise ValueError if no row so far could be trained on, so that an untrained model is never saved.

        The check runs once `FEW` rows (or all rows of a smaller dataset) have been read, and again at the last step.
        """
        rows = self.totals["rows"]
        if not self.totals["kept"] and (last or rows >= min(self.mixture.rows or FEW, FEW)):
            raise ValueError(
                f"none of {rows} rows of --data.train could be trained on: all are refused, or longer than "
                f"--data.max-tokens {self.cfg.data.max_tokens} with --data.too-long {self.cfg.data.too_long} "
                "(logs/rank_*.log name them)"
            )

    def _begin(self, step: int) -> None:
        """Draw the rows of a step, and start encoding this rank's share of them in the thread."""
        drawn = self.mixture.draw(rows_due(self.cfg, self.mixture.rows, step))
        mine = range(self.world.rank, len(drawn), self.world.size)
        self.ahead = (step, self.thread.submit(encoded, drawn, mine, self.encoder, self.known), self.mixture.state())

    def state(self) -> dict[str, Any]:
        """Return the state after the last step returned by `take`, as JSON values identical on all ranks."""
        return {"mixture": self.returned, "totals": dict(self.totals)}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a state returned by `state`."""
        self.mixture.restore(state["mixture"])
        self.returned, self.totals = state["mixture"], Counter(state["totals"])
        # If a checkpoint lacks this count, all rows that were not rejected are counted as trained.
        self.totals.setdefault("kept", self.totals["rows"] - self.totals["refused"])


def encoded(drawn: list[Drawn], places: range, encode: Encode, known: Precomputed | None = None) -> Step:
    """Encode some of the rows of a step.

    drawn: all rows of the step. places: indices of the rows to encode. known: adds its columns to the sequences, if
    given.
    """
    out = Step()
    for place in places:
        each = drawn[place]
        out.counts["rows"] += 1
        try:
            row = Row(each.read())
            found = encode(row, _read(drawn[place - 1]) if encode.beside and len(drawn) > 1 else None)
            samples = found.samples or list(range(len(found.sequences)))
            if known:
                known.attach(each.key, found.sequences)
        except ValueError as e:
            out.counts["refused"] += 1
            out.refused.append(f"{each.where}: {e}")
            continue
        out.unread |= dict.fromkeys(row.unread)
        out.kept += bool(found.sequences)
        out.counts += found.notes
        if part := [name for name in NAMED if found.notes[name]]:
            out.shortened.append(f"{each.where}: {', '.join(part)}")
        out.sequences += [(place, i, sequence) for i, sequence in zip(samples, found.sequences, strict=True)]
    return out


def first_lines(lines: list[str], world: World) -> list[str]:
    """Return up to three lines per rank, at most five in total. lines: this rank's lines. Collective."""
    texts = all_gather_text("\n".join(lines[:3]), world.host_group)
    return [line for text in texts for line in text.split("\n") if line][:5]


def too_many_refused(refused: int, rows: int, allowed: float, lines: list[str], world: World) -> ValueError:
    """Return the error about rejected rows, which shows up to five of them. Collective.

    refused, rows: number of rejected rows, and number of all rows. allowed: maximum fraction that may be rejected.
    lines: one line per rejected row of this rank.
    """
    shown = first_lines(lines, world) or ["no row has a sequence within --data.max-tokens"]
    return ValueError(
        f"{refused} of {rows} rows were refused, and --data.max-refused allows a share of {allowed:g} "
        "(logs/rank_*.log name all):\n  " + "\n  ".join(shown)
    )


def _read(drawn: Drawn) -> dict | None:
    try:
        return drawn.read()
    except ValueError:
        return None


def pack(
    sequences: Placed,
    noise: float = 0.0,
    key: tuple[int, ...] = (),
    columns: dict[str, torch.dtype] | None = None,
    placeholder: int | None = None,
) -> Batch:
    """Pack sequences into the batch of one optimizer step, in row order.

    noise: the value of `--sft.neftune`. key: numbers that seed the noise, together with the sequence's position.
    columns: maps the name of each additional per-token column to its dtype. placeholder: id of the placeholder tokens
    of a model that reads images; None for other models.
    """
    ordered = sorted(sequences, key=lambda each: each[:2])
    none = Masked(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool))
    all_of = [none, *(sequence for *_, sequence in ordered)]
    lengths = torch.tensor([len(sequence) for *_, sequence in ordered], dtype=torch.int64)
    token = {"tokens": torch.cat([s.tokens for s in all_of]), "mask": torch.cat([s.mask for s in all_of])}
    for name, dtype in (columns or {}).items():
        values = [sequence.columns[name].to(dtype) for sequence in all_of[1:]]
        token[name] = torch.cat([torch.zeros(0, dtype=dtype), *values])
    seq = {
        "position": torch.tensor([place for place, *_ in ordered], dtype=torch.int64),
        "sample": torch.tensor([i for _, i, _ in ordered], dtype=torch.int64),
        "update": torch.zeros_like(lengths),
        "work": lengths,
    }
    batch = Batch(lengths, token, seq)
    if noise:
        seeds = [seed_for(*key, place, i) for place, i, _ in ordered]
        seed_T = batch.per_token(torch.tensor(seeds, dtype=torch.int64))
        token["noise"] = seed_T ^ (torch.arange(batch.n_tokens) - batch.cu_seqlens[batch.seq_index]) * STRIDE
        token["noise_scale"] = (noise / batch.per_token(lengths).double().sqrt()).float()
    if placeholder is None:
        return batch
    return with_images(batch, [tuple(image for image, *_ in sequence.images) for *_, sequence in ordered], placeholder)
