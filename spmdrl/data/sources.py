"""Reads rows from built-in tasks, files, two data set hubs and reasoning-gym. A row is a dict of columns."""

import gzip
import itertools
import json
import os
import zlib
from codecs import BOM_UTF8
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from spmdrl.data.builtin import RAW, builtin_rows, nearest

REASONING_SIZE = {False: 1000, True: 200}
"""Default `size` of a reasoning-gym task in rows, for training (False) and for evaluation (True)."""
REASONING_EVAL_SEED = 1 << 30
"""reasoning-gym draws row i from seed + i, so evaluation seeds start beyond any training set."""
HASH_ORDER_TASKS = (
    "isomorphic_strings",
    "knight_swap",
    "list_functions",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
"""Tasks that reasoning-gym 0.1.25 draws in Python set order, which differs between processes."""
FORMS = (
    "`builtin:<task>[:eval]`, a .jsonl, .jsonl.gz or .parquet file, `hf:<name or folder>[:config[:split]]`, "
    "`ms:<owner>/<name>[:config[:split]]` (ModelScope), `reasoning-gym:<task>[:eval][?size=..&seed=..]`"
)


@dataclass
class Source:
    """The rows of a source and their column names."""

    rows: list[dict]
    name: str
    """Name of the source, and the data source of rows without a `data_source` column."""
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    raw: bool = False
    """True if prompts are plain text even if the tokenizer has a chat template."""
    unit: str = "row"
    numbers: list[int] = field(default_factory=list)
    """Line number of each row in its file, for messages; empty if rows are numbered by index."""
    folder: str = ""
    """Folder of the rows' file, from which relative paths in rows start; empty if there is no file."""

    def where(self, index: int) -> str:
        """Describe a row's place in the source, for error messages."""
        if self.numbers:
            return f"{self.name}:{self.numbers[index]}"
        return f"{self.name}, {self.unit} {index}"


def read_source(spec: str, prompt_column: str, answer_column: str, limit: int = 0) -> Source:
    """Read at most `limit` rows (0 for all) of a source in one of the FORMS.

    Raises ValueError if the source does not exist or cannot be read.
    """
    stop = limit or None
    kind, _, rest = spec.partition(":")
    if kind == "builtin":
        task, held_out = _eval_suffix(rest)
        return Source(builtin_rows(task, held_out)[:stop], f"builtin:{task}", raw=task in RAW)
    if kind == "reasoning-gym":
        return _reasoning_gym(rest, limit)
    if kind in HUBS:
        rows = [dict(row) for row in itertools.islice(HUBS[kind](rest), stop)]
        return Source(rows, rest.split(":")[0], prompt_column, answer_column)
    path = Path(spec).expanduser()
    if not path.is_file():
        raise ValueError(f"no data file {spec!r} (--data.train, --data.eval): a source is {FORMS}")
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        numbers, rows = _jsonl(path, stop)
        return Source(rows, spec, prompt_column, answer_column, numbers=numbers, folder=str(path.parent))
    if path.suffix == ".parquet":
        return Source(_parquet(path, stop), spec, prompt_column, answer_column, folder=str(path.parent))
    raise ValueError(
        f"{spec!r} is not a kind of file that is read here (--data.train, --data.eval): a source is {FORMS}"
    )


def _eval_suffix(text: str) -> tuple[str, bool]:
    return text.removesuffix(":eval"), text.endswith(":eval")


def _jsonl(path: Path, stop: int | None) -> tuple[list[int], list[dict]]:
    """Return the line numbers of all rows, and the rows."""
    opener, number, found = gzip.open if path.suffix == ".gz" else open, 0, []
    try:
        # Let bytes that are not UTF-8 pass, so that `json_row` rejects them and the error names the line.
        with opener(path, "rt", encoding="utf-8-sig", errors="surrogateescape") as f:
            full = ((n, line) for n, line in enumerate(f, 1) if line.strip())
            for number, line in itertools.islice(full, stop):
                found.append((number, json_row(line.encode(errors="surrogateescape"))))
    except (OSError, EOFError, zlib.error) as e:
        raise ValueError(f"cannot read {path} ({type(e).__name__}: {e})") from e
    except ValueError as e:
        raise ValueError(f"{path}:{number}: {e}") from None
    return [number for number, _ in found], [row for _, row in found]


def json_row(line: bytes) -> dict:
    """Parse a line as a row. Raises ValueError if the line is not a JSON object."""
    try:
        row = json.loads(line.removeprefix(BOM_UTF8))
    except json.JSONDecodeError as e:
        raise ValueError(f"not JSON ({e.msg} at column {e.colno})") from None
    except (ValueError, RecursionError) as e:  # very long numbers and very deep nesting raise these errors, too
        raise ValueError(f"not JSON ({e})") from None
    if not isinstance(row, dict):
        raise ValueError(f"a row is a JSON object with columns; this is {line.decode(errors='replace').strip()[:60]!r}")
    return row


def _parquet(path: Path, stop: int | None) -> list[dict]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=min(stop or 4096, 4096))
        return list(itertools.islice((row for batch in batches for row in batch.to_pylist()), stop))
    except (OSError, pyarrow.ArrowException) as e:
        raise ValueError(f"cannot read {path} as parquet ({type(e).__name__}: {e})") from e


def hf_data(rest: str) -> Any:
    """Open a Hugging Face data set, memory-mapped. rest: `<name or folder>[:config[:split]]`.

    Only data files are read; `datasets` itself rejects dataset scripts and pickles.
    Raises ValueError if the data set cannot be loaded.
    """
    name, config, split = _named(rest, "hf", "name or folder")
    return _loaded(f"hf:{rest}", name, config, split)


def ms_data(rest: str) -> Any:
    """Open a ModelScope data set, memory-mapped. rest: `<owner>/<name>[:config[:split]]`.

    The `modelscope` package downloads the files, which are then read like a Hugging Face data set. Its `MsDataset` is
    not used, because it needs an older release of `datasets` and monkey-patches it.
    Raises ValueError if the data set cannot be loaded.
    """
    name, config, split = _named(rest, "ms", "owner>/<name")
    try:
        from modelscope import dataset_snapshot_download  # type: ignore[import-not-found]
    except ImportError as e:
        raise ValueError(f"'ms:{rest}' needs the package: pip install modelscope ({e})") from e
    try:
        folder = dataset_snapshot_download(name, ignore_patterns=["*.py"])
    except Exception as e:  # the client raises errors of several packages
        raise ValueError(
            f"could not download the dataset 'ms:{rest}' (--data.train, --data.eval): {type(e).__name__}: {e}. Check "
            "the name and the network (MODELSCOPE_API_TOKEN for a gated one); offline, give its folder: hf:<folder>"
        ) from e
    return _loaded(f"ms:{rest}", str(folder), config, split)


HUBS = {"hf": hf_data, "ms": ms_data}
"""Maps each hub prefix to the function that opens a data set on that hub."""


def _named(rest: str, kind: str, form: str) -> tuple[str, str, str]:
    """Parse name, config and split. form: the expected format of the name, for the ValueError message."""
    name, config, split = (*rest.split(":"), "", "")[:3]
    if not name or rest.count(":") > 2:
        raise ValueError(f"'{kind}:{rest}' (--data.train, --data.eval): the form is {kind}:<{form}>[:config[:split]]")
    return name, config, split or "train"


def _loaded(spec: str, name: str, config: str, split: str) -> Any:
    import datasets

    folder = Path(name).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            data = datasets.load_from_disk(str(folder))
            return data[split] if isinstance(data, datasets.DatasetDict) else data
        return datasets.load_dataset(str(folder) if folder.is_dir() else name, config or None, split=split)
    except Exception as e:  # the hub, the network, builders and file systems raise errors of many types
        raise ValueError(
            f"could not load the dataset {spec!r} (--data.train, --data.eval; name {name!r}, config {config!r}, "
            f"split {split!r}): {type(e).__name__}: {e}"
        ) from e


def _reasoning_gym(rest: str, limit: int) -> Source:
    head, _, query = rest.partition("?")
    task, held_out = _eval_suffix(head)
    query, late = _eval_suffix(query)
    held_out = held_out or late
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as e:
        raise ValueError("reasoning-gym:<task> needs the package: pip install 'spmdrl[reasoning-gym]'") from e
    if task not in DATASETS:
        raise ValueError(f"unknown task 'reasoning-gym:{task}' (--data.train, --data.eval): {nearest(task, DATASETS)}")
    if task in HASH_ORDER_TASKS and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
        raise ValueError(
            f"reasoning-gym:{task} draws in the order of Python sets, so each rank would see different rows: "
            "start the run with PYTHONHASHSEED=0 in the environment, or choose another task"
        )
    config: dict = {"size": REASONING_SIZE[held_out], "seed": 0}
    for key, text in parse_qsl(query, keep_blank_values=True):
        try:
            config[key] = json.loads(text)
        except json.JSONDecodeError:
            config[key] = text
    for key in ("size", "seed"):
        if type(config[key]) is not int or config[key] < 0:
            raise ValueError(f"'reasoning-gym:{rest}': {key} must be a whole number of 0 or more, not {config[key]!r}")
    if limit:
        config["size"] = min(config["size"], limit)
    if held_out:
        config["seed"] += REASONING_EVAL_SEED
    try:
        data = reasoning_gym.create_dataset(task, **config)
        entries = [data[i] for i in range(config["size"])]
    except Exception as e:  # tasks raise errors of many types for their settings
        raise ValueError(f"'reasoning-gym:{rest}': the task refuses {config} ({type(e).__name__}: {e})") from e
    rows = [
        {"prompt": e["question"], "answer": e["answer"], "task": task, "config": config, "entry": e} for e in entries
    ]
    return Source(rows, f"reasoning-gym:{task}", unit="entry")
