"""Search as a tool: over a corpus on this machine, or by a server that keeps one.

The index of a corpus is BM25 by bm25s (Lù 2024, https://arxiv.org/abs/2407.03618), built once and kept in a folder.
"""

import hashlib
import json
import os
import shutil
import threading
import time
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from spmdrl.config.dump import redact_text
from spmdrl.data.rowfiles import Lines
from spmdrl.env.base import BrokenError, Stateless

MOST_BYTES = 8 << 20
"""Bytes of the longest answer of a server that is read."""
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


class SearchError(BrokenError):
    """A failure of a search server, with its reason, and without secrets of the address."""


class Search(Stateless):
    """A tool that searches a corpus on this machine (needs bm25s) or asks a server, `search`. It keeps nothing."""

    def __init__(
        self,
        corpus: str = "",
        url: str = "",
        results: int = 3,
        longest: int = 2_000,
        timeout: float = 20.0,
        cache: str = CACHE,
    ) -> None:
        """Open a corpus, or take the address of a server.

        Args:
            corpus: a .jsonl file with a passage in each row, or a .txt file with one in each paragraph, which empty
                lines divide: lines that follow each other are one passage (`Corpus`).
            url: of a server in the place of a corpus, which answers as that of Search-R1 does.
            results: passages of an answer.
            longest: characters of a passage that are shown.
            timeout: seconds in which the server has to answer.
            cache: folder for indexes of corpora.
        """
        if bool(corpus) == bool(url):
            raise ValueError("the tool search needs either `corpus`, a file, or `url`, a server")
        if url and urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"the tool search: `url` is an http address, not {redact_text(url)!r}")
        self.results, self.longest, self.timeout = results, longest, timeout
        self.timeout_s = timeout + 5.0
        self.url = url
        self.corpus: Corpus | None = open_corpus(corpus, cache) if corpus else None

    def search(self, query: str) -> str:
        """Search for passages about a subject.

        Args:
            query: Words to look for.
        """
        if not query.strip():
            raise ValueError("the query is empty")
        if self.corpus is not None:
            found = self.corpus.search(query, self.results)
        else:
            found = ask(self.url, query, self.results, self.timeout)
        return shown(found, self.longest)


def shown(found: list[Passage], longest: int) -> str:
    """Return passages as numbered text, each with its title in the line before it."""
    parts = []
    for number, each in enumerate(found, 1):
        text = each.text if len(each.text) <= longest else f"{each.text[:longest]} ..."
        parts.append(f"[{number}] {each.title}\n{text}" if each.title else f"[{number}] {text}")
    return "\n\n".join(parts) or "Nothing was found."


def ask(url: str, query: str, most: int, seconds: float) -> list[Passage]:
    """Return the passages that a server finds, the best first.

    The server takes `{"queries": [text], "topk": number, "return_scores": true}` and answers with
    `{"result": [[{"document": {"contents": ...}, "score": ...}]]}`, as that of
    https://github.com/PeterGriffinJin/Search-R1 does. seconds: for all of the answer.

    Raises:
        TimeoutError: the answer did not come in time.
        SearchError: there is no answer, or one of another form.
    """
    where = f"the search server at {urlsplit(url).hostname}"
    body = json.dumps({"queries": [query], "topk": most, "return_scores": True}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "spmdrl"})
    until, data = time.monotonic() + seconds, b""
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            # A socket's time-out limits each read alone, and a slow answer has many of them.
            while part := answer.read1(1 << 16):
                data += part
                if time.monotonic() > until:
                    raise TimeoutError
                if len(data) > MOST_BYTES:
                    raise SearchError(f"{where} sent more than {MOST_BYTES >> 20} MiB")
    except HTTPError as error:
        raise SearchError(f"{where} answered {error.code} {error.reason}") from None
    except (OSError, HTTPException) as error:
        cause = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, TimeoutError):
            raise TimeoutError(f"{where} did not answer within {seconds:g} s") from None
        raise SearchError(f"{where} cannot be reached ({type(cause).__name__})") from None
    try:
        rows: Any = json.loads(data)["result"][0]
        found = [passage_of(row.get("document", row)) for row in rows]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise SearchError(f"{where} sent an answer of another form: {data[:80]!r}") from None
    return [each for each in found if each is not None][:most]
