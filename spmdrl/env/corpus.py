"""A corpus of passages on this machine, and its BM25 index, which is built once and kept in a folder.

BM25 by bm25s: Lù 2024, https://arxiv.org/abs/2407.03618.
"""

import hashlib
import json
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.data.rowfiles import Lines

CACHE = "~/.cache/spmdrl/search"
KEYS = ("text", "contents", "passage")
"""Columns of a .jsonl file that may hold a passage, the first that is there."""
_open: dict[Path, "Corpus"] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Passage:
    """A part of a corpus."""

    title: str
    text: str


class Corpus:
    """Passages of a file with an index of their words. May be used from several threads."""

    def __init__(self, path: Path, folder: Path):
        """Open a file, as `open_corpus`. folder: of the index, which is built if it does not exist."""
        try:
            import bm25s
        except ImportError:
            raise ValueError("search over a local corpus needs the package bm25s: pip install bm25s") from None
        self.path, self.bm25s, self.lock = path, bm25s, threading.Lock()
        self.passages: Any = _paragraphs(path) if path.suffix == ".txt" else Lines(path)
        if not len(self.passages):
            raise ValueError(f"the corpus {path} holds no passages")
        if not (folder / "complete").exists():
            self._build(folder)
        self.index = bm25s.BM25.load(str(folder), mmap=True, show_progress=False)

    def _build(self, folder: Path) -> None:
        from filelock import FileLock

        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if (folder / "complete").exists():
                return
            texts = [f"{each.title} {each.text}" for each in map(self.passage, range(len(self.passages)))]
            words = self.bm25s.tokenize(texts, stopwords="en", show_progress=False)
            if not any(map(len, words.ids)):
                raise ValueError(f"the corpus {self.path} holds no words to search for")
            index = self.bm25s.BM25()
            index.index(words, show_progress=False)
            part = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            index.save(str(part), show_progress=False)
            (part / "complete").touch()
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)

    def passage(self, number: int) -> Passage:
        """Return a passage. Raises ValueError if its row has no text."""
        with self.lock:
            row = self.passages[number]
        if isinstance(row, str):
            return Passage("", row)
        found = passage_of(row)
        if found is None:
            raise ValueError(
                f"{self.passages.where(number)} has no text: a row has one of the columns {', '.join(KEYS)}"
            )
        return found

    def search(self, query: str, most: int) -> list[Passage]:
        """Return the passages that share words with a query, the best first; of equal ones the earlier."""
        import numpy as np

        words = self.bm25s.tokenize([query], stopwords="en", show_progress=False, return_ids=False)[0]
        if not (known := [word for word in words if word in self.index.vocab_dict]):
            return []
        scores = np.asarray(self.index.get_scores(known))
        least = np.partition(scores, -most)[-most] if most < len(scores) else 0.0
        found = np.flatnonzero((scores >= least) & (scores > 0))
        order = np.argsort(-scores[found], kind="stable")[:most]
        return [self.passage(int(number)) for number in found[order]]


def passage_of(row: Any) -> Passage | None:
    """Return the passage of a row: its text, with its title in a column of its own or, quoted, in the first line.

    The latter is the form of the corpora of https://github.com/PeterGriffinJin/Search-R1. None if there is no text.
    """
    text = next((row[key] for key in KEYS if isinstance(row.get(key), str)), None) if isinstance(row, dict) else None
    if text is None:
        return None
    title = row.get("title")
    first, _, rest = text.partition("\n")
    if not isinstance(title, str):
        title = ""
        if rest and len(first) > 2 and first[0] == first[-1] == '"':
            title, text = first[1:-1], rest
    return Passage(title.strip(), text.strip())


def open_corpus(path: str, cache: str = CACHE) -> Corpus:
    """Return the corpus of a file, opened once in this process. A file that changed gets another index.

    path: a .jsonl file of rows with `text` (or `contents`) and perhaps `title`, or a .txt file with a passage in each
    paragraph, which empty lines divide.

    Raises:
        ValueError: the file cannot be read, or bm25s is not installed.
    """
    file = Path(path).expanduser().resolve()
    if file.suffix not in (".jsonl", ".txt"):
        raise ValueError(f"the corpus {path!r} is neither a .jsonl nor a .txt file")
    try:
        about = os.stat(file)
    except OSError as error:
        raise ValueError(f"cannot read the corpus {path!r} ({error.strerror})") from None
    facts = json.dumps([str(file), about.st_size, about.st_mtime_ns])
    folder = Path(cache).expanduser() / f"{file.stem}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
    with _lock:
        if folder not in _open:
            _open[folder] = Corpus(file, folder)
        return _open[folder]


def _paragraphs(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"cannot read the corpus {path} ({error})") from None
    return [part.strip() for part in text.split("\n\n") if part.strip()]
