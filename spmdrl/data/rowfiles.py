"""Supervised data sources that need not fit in memory: files read by index, hub data sets, and streams.

An indexed source has random access to its rows: a .jsonl file by line offsets, a .parquet file by row groups, a hub
data set by its memory map. A stream can only be read sequentially: a compressed .jsonl.gz file, or a data set that is
streamed from the hub during training. `where(index)` describes a row's location, for error messages.
"""

import gzip
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from spmdrl.data.sources import HUBS, json_row, read_source

FORMS = (
    "a .jsonl, .jsonl.gz or .parquet file, `hf:<name or folder>[:config[:split]]`, `stream:<name>[:config[:split]]` "
    "(read from the hub during training), `ms:<owner>/<name>[:config[:split]]` (ModelScope), `builtin:<task>[:eval]` "
    "or `reasoning-gym:<task>`"
)


@dataclass
class Table:
    """Rows in memory or in memory-mapped files."""

    name: str
    data: Any
    unit: str = "row"
    columnar: bool = False
    """True if the data is stored as columns, where a row has None for keys that only other rows have."""

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict:
        row = dict(self.data[index])
        return without_gaps(row) if self.columnar else row

    def where(self, index: int) -> str:
        """Describe a row's place in the source, for error messages."""
        return f"{self.name}, {self.unit} {index}"


class Lines:
    """A .jsonl file whose lines are read on demand; it uses 16 bytes of memory per line."""

    def __init__(self, path: Path):
        """Scan the file once to index its lines. Raises ValueError if it cannot be read."""
        self.name, self.path = str(path), path
        self.starts, self.numbers = array("q"), array("q")
        try:
            self.file = open(path, "rb")  # noqa: SIM115 (rows are read as long as the job runs)
            at = 0
            for number, line in enumerate(self.file, 1):
                if line.strip():
                    self.starts.append(at)
                    self.numbers.append(number)
                at += len(line)
        except OSError as e:
            raise ValueError(f"cannot read {path} ({e.strerror or e})") from e

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict:
        self.file.seek(self.starts[index])
        return json_row(self.file.readline())

    def where(self, index: int) -> str:
        """Describe a row's place in the source, for error messages."""
        return f"{self.name}:{self.numbers[index]}"


class Parquet:
    """A .parquet file with at most four row groups in memory at a time."""

    def __init__(self, path: Path):
        """Open the file. Raises ValueError if it is not a readable parquet file."""
        import pyarrow
        import pyarrow.parquet

        self.name = str(path)
        try:
            self.file = pyarrow.parquet.ParquetFile(path)
        except (OSError, pyarrow.ArrowException) as e:
            raise ValueError(f"cannot read {path} as parquet ({type(e).__name__}: {e})") from e
        groups = range(self.file.num_row_groups)
        self.ends = list(accumulate(self.file.metadata.row_group(i).num_rows for i in groups))
        self.group = lru_cache(maxsize=4)(self.file.read_row_group)

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int) -> dict:
        group = bisect_right(self.ends, index)
        first = self.ends[group - 1] if group else 0
        return without_gaps(self.group(group).slice(index - first, 1).to_pylist()[0])

    def where(self, index: int) -> str:
        """Describe a row's place in the source, for error messages."""
        return f"{self.name}, row {index}"


@dataclass
class Gzipped:
    """A compressed .jsonl.gz file, which can only be read from the start."""

    name: str

    def rows(self, start: int) -> Iterator[dict | ValueError]:
        """Yield the rows from index `start` to the end. Yield an error in place of a row that cannot be read.

        Raises ValueError if the file cannot be opened or ends early.
        """
        number = 0
        try:
            with gzip.open(Path(self.name).expanduser(), "rb") as f:
                full = (line for line in f if line.strip())
                for number, line in enumerate(full):
                    if number >= start:
                        yield _row_or_error(line)
        except (OSError, EOFError, zlib.error) as e:
            raise ValueError(f"{self.name} ends early, after row {number} ({type(e).__name__}: {e})") from e


@dataclass
class Hub:
    """A data set that is streamed from the Hugging Face hub during training."""

    name: str
    rest: str

    def rows(self, start: int) -> Iterator[dict | ValueError]:
        """Yield the rows from index `start` to the end. Raises ValueError if the stream fails to open or ends early."""
        import datasets

        path, config, split = (*self.rest.split(":"), "", "")[:3]
        number = start
        try:
            found: Any = datasets.load_dataset(path, config or None, split=split or "train", streaming=True)
            for row in found.skip(start) if start else found:
                yield without_gaps(dict(row))
                number += 1
        except Exception as e:  # the hub, the network and file systems raise errors of many types
            raise ValueError(f"{self.name} ends early, at row {number} ({type(e).__name__}: {e})") from e


Indexed = Table | Lines | Parquet
"""Sources with random access to rows. They raise ValueError for a row that cannot be read."""
Streamed = Gzipped | Hub
"""Sources that can only be read sequentially."""


def open_rows(spec: str) -> Indexed | Streamed:
    """Open a row source given in one of the FORMS. Raises ValueError, which names the setting to change."""
    kind, _, rest = spec.partition(":")
    if kind == "stream":
        return Hub(spec, rest)
    if kind in HUBS:
        return Table(spec, HUBS[kind](rest), columnar=True)
    if kind in ("builtin", "reasoning-gym"):
        found = read_source(spec, "prompt", "answer")
        return Table(spec, found.rows, found.unit)
    path = Path(spec).expanduser()
    if not path.is_file():
        raise ValueError(f"no data file {spec!r} (--data.train, --data.eval): a source is {FORMS}")
    if path.name.endswith(".jsonl"):
        return Lines(path)
    if path.name.endswith(".jsonl.gz"):
        return Gzipped(spec)
    if path.suffix == ".parquet":
        return Parquet(path)
    raise ValueError(
        f"{spec!r} is not a kind of file that is read here (--data.train, --data.eval): a source is {FORMS}"
    )


def without_gaps(value: Any) -> Any:
    """Remove keys whose value is None from a table row, at any depth.

    In a table every row has the keys of all rows, so without this step one tool's argument would appear as null in the
    calls of all other tools.
    """
    if isinstance(value, dict):
        return {k: without_gaps(v) for k, v in value.items() if v is not None}
    return [without_gaps(v) for v in value] if isinstance(value, list) else value


def _row_or_error(line: bytes) -> dict | ValueError:
    try:
        return json_row(line)
    except ValueError as error:
        return error
