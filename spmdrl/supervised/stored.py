"""Writes values for the trained tokens of rows, such as log-probabilities, to files, and reads them during training.

A folder contains safetensors files and a manifest that lists these files. The manifest is written last. A file contains
the concatenated tokens of its sequences, and a mask that is True at tokens with values. Sequences are looked up by
their tokens and images, so the row order, source names and number of ranks do not matter.

T: tokens in a file or batch; N: sequences in a file; M: tokens with values in a file; L: tokens in one sequence.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from spmdrl.data.batch import Batch
from spmdrl.data.distribute import balance
from spmdrl.data.mixture import Drawn, Mixture, Permuted
from spmdrl.data.placeholders import COLUMN, distinct_tokens
from spmdrl.session.session import Session
from spmdrl.spmd.exchange import all_gather_text, all_reduce
from spmdrl.spmd.world import World
from spmdrl.supervised.rows import Encode, encoded, too_many_refused

MANIFEST = "manifest.json"
PLACES = ("tokens", "lengths", "mask")
STEPS = 4
"""Values are computed for the rows of this many steps at a time, but for at least one row per rank."""
FULL = 256 * 2**20
"""Values are written to a file once they take up this many bytes of memory."""


class NoNumbersError(ValueError):
    """Raised if the files lack values for some or all trained tokens of a sequence."""


def indexed(mixture: Mixture) -> list[Any]:
    """Return a mixture's indexed sources, i.e. all but its streams."""
    return [source for part in mixture.parts if isinstance(part, Permuted) for source in part.sources]


def row_parts(session: Session[Any], sources: list[Any]) -> Iterator[tuple[list[Drawn], range]]:
    """Yield all rows in chunks: the rows of a chunk, and the indices of the rows that this rank encodes."""
    world, rows, total = session.world, Permuted(sources, seed=0, shuffle=False), sum(map(len, sources))
    count = max(STEPS * session.cfg.data.rows_per_step, world.size)
    for start in range(0, total, count):
        part = [rows.draw() for _ in range(min(count, total - start))]
        yield part, range(world.rank, len(part), world.size)


def write(
    session: Session[Any],
    sources: list[Any],
    encode: Encode,
    pack: Callable[[list], Batch],
    numbers: Callable[[Batch], dict[str, torch.Tensor]],
    folder: Path,
    facts: dict[str, Any],
    max_refused: float,
) -> None:
    """Write values for all trained tokens of all rows that are not rejected. Collective.

    pack: turns a rank's sequences into a batch. numbers: returns a batch's columns [T, ...] by name; all ranks call it
    together. facts: additional manifest entries. max_refused: maximum fraction of rows that may be rejected. Rejected
    rows are logged.

    Raises:
        ValueError: more rows are rejected than allowed, no sequence is left, or rank 0 cannot see another rank's file.
    """
    world, writer = session.world, _Writer(folder, session.world)
    rows, refused = 0, list[str]()
    for part, places in row_parts(session, sources):
        found = encoded(part, places, encode)
        rows, refused = rows + found.counts["rows"], refused + found.refused
        found.name_rows()
        batch = balance(pack(found.sequences), world)
        with session.timer("logp"):
            writer.take(batch, numbers(batch))
    writer.flush()
    total, lost = all_reduce(torch.tensor([rows, len(refused)]), "sum", world.host_group).tolist()
    files = [json.loads(text) for text in all_gather_text(json.dumps(writer.files), world.host_group)]
    if lost > max_refused * total or not any(files):
        raise too_many_refused(lost, total, max_refused, refused, world)
    if lost:
        session.note(f"{lost} of {total} rows were refused (logs/rank_*.log name them)")
    if unseen := [name for each in files for name in each if world.is_first and not (folder / name).is_file()]:
        raise ValueError(
            f"{folder}: {unseen[0]} of another rank is not visible from rank 0; use a folder that all nodes share"
        )
    if world.is_first:
        manifest = facts | {"files": {name: count for each in files for name, count in each.items()}}
        half = folder / f".{MANIFEST}"
        half.write_text(json.dumps(manifest, indent=1))
        os.replace(half, folder / MANIFEST)
    wait(world)


def tokens_of(batch: Batch) -> list[torch.Tensor]:
    """Return the tokens of each sequence, int64 [L], by which its values are found (`distinct_tokens`)."""
    lengths = batch.lengths.tolist()
    marks = batch.token[COLUMN].split(lengths) if COLUMN in batch.token else [None] * len(lengths)
    return [distinct_tokens(*row) for row in zip(batch.token["tokens"].split(lengths), marks, strict=True)]


class _Writer:
    """Writes sequences to files. Of the ranks that hold the same sequences, only the first one writes."""

    def __init__(self, folder: Path, world: World):
        self.folder, self.files = folder, dict[str, int]()
        position = (world.holders == world.rank).nonzero()
        self.position = int(position[0, 0]) if len(position) and int(position[0, 1]) == 0 else None
        self.waiting: list[dict[str, torch.Tensor]] = []
        self.bytes = 0

    def take(self, batch: Batch, columns: dict[str, torch.Tensor]) -> None:
        if self.position is None or not len(batch):
            return
        mask_T = batch.token["mask"]
        columns = {name: x_T[mask_T] for name, x_T in columns.items()}
        columns |= {"tokens": torch.cat(tokens_of(batch)).int(), "lengths": batch.lengths, "mask": mask_T}
        self.waiting.append(columns)
        self.bytes += sum(x.nbytes for x in columns.values())
        if self.bytes >= FULL:
            self.flush()

    def flush(self) -> None:
        if not self.waiting:
            return
        whole = {name: torch.cat([each[name] for each in self.waiting]) for name in self.waiting[0]}
        name = f"{self.position}_{len(self.files)}.safetensors"
        save_file(whole, self.folder / name)
        self.files[name] = len(whole["lengths"])
        self.waiting, self.bytes = [], 0


def read_manifest(folder: Path, flag: str) -> dict[str, Any]:
    """Return a folder's manifest. flag: name of the setting that holds the folder, for messages.

    Raises:
        ValueError: the folder has no manifest, or the manifest cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{flag} {folder}: it lacks {MANIFEST}, the file that is written last: write the folder (again)"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        files = found["files"]
        if not files or not all(isinstance(count, int) and "/" not in name for name, count in files.items()):
            raise TypeError("files must have a number of sequences for each name")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f'{flag} {path} has no valid "files": {{name: sequences}} ({why}): write it again') from None
    return found


class Stored:
    """Reads the values of sequences from the files in a folder."""

    def __init__(self, folder: Path, manifest: dict[str, Any], flag: str, needed: tuple[str, ...]):
        """Open the files and index their sequences. Values are not loaded into memory.

        needed: names of the required columns.

        Raises:
            ValueError: a file is missing, incomplete or has another format; the message includes its name.
        """
        self.files: list[Any] = []
        self.names: tuple[str, ...] = ()
        """Names of the columns that are in all files."""
        wrong = [name for name in manifest["files"] if not (folder / name).is_file()]
        if wrong:
            raise ValueError(
                f"{flag} {folder}: files that are missing: {len(wrong)} of {len(manifest['files'])} "
                f"({', '.join(wrong[:3])}): copy the folder again, or write it again"
            )
        keys, places = [], []
        for number, (name, count) in enumerate(manifest["files"].items()):
            try:
                file = safe_open(folder / name, "pt")
                columns = tuple(sorted(set(file.keys()) - set(PLACES)))
                key_N, place_N4 = _places(file, columns, needed, count)
            except (SafetensorError, OSError, KeyError, ValueError) as error:
                raise ValueError(
                    f"{flag} {folder / name} is not a complete file of numbers ({error}): copy it again, or write the "
                    "folder again"
                ) from error
            place_N4[:, 0] = number
            self.names = columns if not number else tuple(sorted(set(columns) & set(self.names)))
            self.files.append(file)
            if odd := [name for name in self.names if _row(file, name) != _row(self.files[0], name)]:
                raise ValueError(
                    f"{flag} {folder / name}: the rows of {odd[0]} are {_row(file, odd[0])}, but those of the first "
                    f"file are {_row(self.files[0], odd[0])}: write the folder again"
                )
            keys.append(key_N)
            places.append(place_N4)
        self.key_N, order_N = torch.cat(keys).sort(stable=True)
        self.place_N4 = torch.cat(places)[order_N]
        """Four numbers per sequence: index of its file, index of its first token in the file, index of its first row in
        the file's value columns, and number of tokens."""

    def shape(self, name: str) -> list[int]:
        """Return the shape of a column in the first file, [M, ...]."""
        return list(self.files[0].get_slice(name).get_shape())

    def columns(self, tokens_L: torch.Tensor, mask_L: torch.Tensor, names: tuple[str, ...]) -> list[torch.Tensor]:
        """Return the columns [L, ...] of a sequence, with zeros where the mask is False. tokens_L: as in `tokens_of`.

        Raises:
            NoNumbersError: the files lack the sequence, or values for some of its trained tokens.
        """
        key, problem = _key(tokens_L), "its tokens are in none of the files"
        first, last = (int(torch.searchsorted(self.key_N, key, right=right)) for right in (False, True))
        for number, start, first_M, length in self.place_N4[first:last].tolist():
            file = self.files[number]
            if length != len(tokens_L) or not torch.equal(_part(file, "tokens", start, length), tokens_L.int()):
                continue
            has_L = _part(file, "mask", start, length)
            if lacking := int((mask_L & ~has_L).sum()):
                problem = f"it lacks numbers for {lacking} of its {int(mask_L.sum())} trained tokens"
                continue
            return [_column(_part(file, name, first_M, int(has_L.sum())), has_L, mask_L) for name in names]
        raise NoNumbersError(problem)


def _column(numbers: torch.Tensor, has_L: torch.Tensor, mask_L: torch.Tensor) -> torch.Tensor:
    """Return values as a column [L, ...], with zeros where mask_L is False.

    numbers: one row per token where has_L is True. mask_L: the tokens to fill, a subset of has_L.
    """
    column = numbers.new_zeros(len(mask_L), *numbers.shape[1:])
    column[mask_L] = numbers[mask_L[has_L]]
    return column


def _row(file: Any, name: str) -> str:
    column = file.get_slice(name)
    return f"{column.get_dtype()} {column.get_shape()[1:]}"


def _places(file: Any, names: tuple[str, ...], needed: tuple[str, ...], count: int) -> tuple[torch.Tensor, ...]:
    """Return the keys (`_key`) of a file's sequences, int64 [N], and their `Stored.place_N4` with file index 0.

    names: names of all value columns. needed: names of the required columns. count: number of sequences according to
    the manifest. Raises ValueError if the file lacks a column or its tensors do not match.
    """
    if missing := [name for name in (*PLACES, *needed) if name not in file.keys()]:  # noqa: SIM118
        raise ValueError(f"it has no tensor {missing[0]}")
    tokens_T, lengths_N, mask_T = (file.get_tensor(name) for name in PLACES)
    if tokens_T.dtype != torch.int32 or lengths_N.dtype != torch.int64 or mask_T.dtype != torch.bool:
        raise ValueError("tokens must be int32, lengths int64, mask bool")
    if len(lengths_N) != count:
        raise ValueError(f"it has {len(lengths_N)} sequences, but {count} in {MANIFEST}")
    if not len(tokens_T) == len(mask_T) == int(lengths_N.sum()) or bool((lengths_N < 1).any()):
        raise ValueError(f"its lengths add up to {int(lengths_N.sum())} tokens, but it has {len(tokens_T)}")
    for name in names:
        if (rows := file.get_slice(name).get_shape()[0]) != int(mask_T.sum()):
            raise ValueError(f"{name} has {rows} rows, but the mask is True at {int(mask_T.sum())} tokens")
    start_N = lengths_N.cumsum(0) - lengths_N
    before_T = torch.cat([torch.zeros(1, dtype=torch.int64), mask_T.cumsum(0)])
    keys = [_key(each) for each in tokens_T.split(lengths_N.tolist())]
    place = torch.stack([torch.zeros_like(start_N), start_N, before_T[start_N], lengths_N], 1)
    return torch.tensor(keys, dtype=torch.int64), place


def _key(tokens_L: torch.Tensor) -> int:
    found = hashlib.blake2b(tokens_L.int().numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)


def _part(file: Any, name: str, start: int, count: int) -> torch.Tensor:
    # safetensors cannot read empty slices, so an empty part is sliced from the first row.
    return file.get_slice(name)[start : start + count] if count else file.get_slice(name)[0:1][:0]


def wait(world: World) -> None:
    """Wait until all ranks have called this function."""
    if dist.is_initialized():
        dist.barrier(group=world.host_group)
